"""Time a pre-training step beside transformers' BertForPreTraining, in one process, in turn.

Both take the same step: forward, both losses, backward, clipping to norm 1, fused AdamW, dropout
0.1 everywhere. Full sequences of random words; 15 % of the positions are predicted. It never
measures data or learning.

    python benchmarks/pretrain.py --size mini --size small --json pretrain.json
    python benchmarks/pretrain.py --size base --batch 256 --length 128 --json cuda.json   # on CUDA
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from reporting import report
from torch import Tensor

from bertsmith.data.packing import Batch
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig, size_preset
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.train.engine import optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.micro_batches import MicroBatch, to_device
from bertsmith.train.pretraining.objective import compute_mean_losses

VOCABULARY, SHARE, RATE = 30522, 0.15, 1e-4


def batch_of(sequences: int, length: int, generator: torch.Generator) -> Batch:
    """Return full sequences of random words, 15 % of them to be predicted."""
    tokens = sequences * length
    draw = torch.rand(sequences, length, generator=generator)
    chosen = draw.argsort(1)[:, : round(SHARE * length)].sort(1).values
    places = (chosen + torch.arange(sequences)[:, None] * length).flatten()
    ids = torch.randint(5, VOCABULARY, (tokens,), generator=generator)
    halves = (torch.arange(tokens) % length >= length // 2).long()
    return Batch(
        ids=ids.numpy(),
        segments=halves.numpy(),
        positions=(torch.arange(tokens) % length).numpy(),
        cu_seqlens=torch.arange(0, tokens + 1, length).int().numpy(),
        max_seqlen=length,
        masked_positions=places.numpy(),
        masked_labels=ids[places].numpy(),
        nsp_labels=torch.randint(0, 2, (sequences,), generator=generator).numpy(),
    )


def config_of(size: str) -> ModelConfig:
    """Return the peer's own defaults at a named size."""
    values = {"vocab_size": VOCABULARY, "activation": "gelu", **size_preset(size)}
    return ModelConfig.parse(values, size)


def ours(machine: Machine, size: str, piece: MicroBatch, compiled: bool) -> Callable[[], None]:
    """Return a step of Bertsmith."""
    config = config_of(size)
    model = BertForPreTraining(config, machine.kernel).to(machine.device).train()
    compute: Any = torch.compile(model, dynamic=True) if compiled else model
    adam = optimizer.build_optimizer(model, OptimSettings(lr=RATE))
    losses = partial(compute_mean_losses, compute)
    count = iter(range(10**9))

    def step() -> None:
        take_step(
            losses,
            [piece],
            model,
            adam,
            machine,
            step=next(count),
            seed=0,
            lr=RATE,
            max_grad_norm=1.0,
        )

    return step


def theirs(machine: Machine, size: str, piece: MicroBatch, compiled: bool) -> Callable[[], None]:
    """Return a step of transformers, in a plain loop."""
    sizes = size_preset(size)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["feed_forward"],
    )
    model = transformers.BertForPreTraining(config).to(machine.device).train()
    compute = torch.compile(model) if compiled else model
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    shape = (piece.num_sequences, piece.packed.max_seqlen)
    labels = torch.full_like(piece.packed.ids, -100)
    labels[piece.masked_positions] = piece.masked_labels
    inputs: dict[str, Tensor] = {
        "input_ids": piece.packed.ids.view(shape),
        "token_type_ids": piece.packed.segments.view(shape),
        "attention_mask": torch.ones(shape, dtype=torch.long, device=machine.device),
        "labels": labels.view(shape),
    }
    assert piece.nsp_labels is not None
    inputs["next_sentence_label"] = piece.nsp_labels

    def step() -> None:
        with machine.autocast():
            loss = compute(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        float(loss.detach())
        adam.step()
        adam.zero_grad()

    return step


def seconds_of(step: Callable[[], None], machine: Machine) -> float:
    """Return the time of one step."""
    device.synchronize(machine)
    began = time.perf_counter()
    step()
    device.synchronize(machine)
    return time.perf_counter() - began


def compare(
    machine: Machine, size: str, piece: MicroBatch, compiled: bool, steps: int
) -> dict[str, Any]:
    """Time both in turn; return ratio, tokens a second and shares of the ceiling."""
    torch.manual_seed(0)
    both = {"ours": ours(machine, size, piece, compiled)}
    both["theirs"] = theirs(machine, size, piece, compiled)
    for step in both.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in both}
    ceilings = []
    for _ in range(steps):
        ceilings.append(device.measure_peak_macs(machine, seconds=0.1))
        for name, step in both.items():
            times[name].append(seconds_of(step, machine))
    config = config_of(size)
    tokens, predictions = len(piece.packed.ids), len(piece.masked_labels)
    products = 3 * (
        tokens * config.macs_per_token(piece.packed.max_seqlen)
        - (tokens - predictions - piece.num_sequences) * config.macs_saved_per_unused_output()
        + predictions * config.macs_per_prediction()
    )
    middle = {name: statistics.median(values) for name, values in times.items()}
    ceiling = statistics.median(ceilings)
    pairs = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    return {
        "ratio": statistics.median(pairs),
        "lowest": min(pairs),
        "highest": max(pairs),
        "tokens_per_second": {name: tokens / value for name, value in middle.items()},
        "flops": {name: 2 * products / value for name, value in middle.items()},
        "of_ceiling": {name: products / value / ceiling for name, value in middle.items()},
        "ceiling_flops": 2 * ceiling,
    }


def flat(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    """Return nested figures under joined names."""
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}, {key}"
        result |= flat(name, value) if isinstance(value, dict) else {name: value}
    return result


def main() -> None:
    """Compare every size, precision and mode asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", help="named sizes; default mini and small")
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"))
    parser.add_argument("--mode", action="append", choices=("eager", "compiled"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    for precision in options.precision or ("fp32", "bf16"):
        machine = device.resolve_machine(
            options.device, precision, "padded", attention_dropout=0.1, threads=None
        )
        draw = torch.Generator().manual_seed(0)
        piece = to_device(batch_of(options.batch, options.length, draw), machine.device)
        for size in options.size or ("mini", "small"):
            for mode in options.mode or ("eager", "compiled"):
                found = compare(machine, size, piece, mode == "compiled", options.steps)
                torch.compiler.reset()
                name = f"{size} {options.batch}x{options.length} {precision} {mode}"
                ratios[name] = found.pop("ratio")
                figures |= flat(name, found)
                speed, share = found["tokens_per_second"], found["of_ceiling"]
                print(
                    f"{name}: {ratios[name]:.2f} x ({found['lowest']:.2f} to "
                    f"{found['highest']:.2f}); {speed['ours']:,.0f} tokens/s against "
                    f"{speed['theirs']:,.0f}; {share['ours']:.0%} of the ceiling "
                    f"({found['ceiling_flops'] / 1e9:,.0f} GFLOP/s) against {share['theirs']:.0%}",
                    flush=True,
                )
    report("pretrain", ratios, figures, options.json)


if __name__ == "__main__":
    main()
