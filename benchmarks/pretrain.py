"""Time a pre-training step, compared with transformers' BertForPreTraining.

The steps of both libraries alternate in one process. A step consists of the forward pass with the
masked-LM and NSP losses, the backward pass, gradient clipping to norm 1 and fused AdamW. Dropout is
0.1. All sequences have the full length and random tokens, of which 15 % are predicted. Data loading
is not included.

    python benchmarks/pretrain.py --size mini --size small --json pretrain.json
    python benchmarks/pretrain.py --size base --batch 256 --length 128 --json cuda.json   # on CUDA
"""

import argparse
import itertools
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

from bertsmith.data.packing import ExampleBatch
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.train.engine import optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch, to_device
from bertsmith.train.pretraining.objective import compute_mean_losses

VOCAB_SIZE = 30522
MASKING_RATE = 0.15
LEARNING_RATE = 1e-4


def make_batch(num_sequences: int, length: int, generator: torch.Generator) -> ExampleBatch:
    """Return full-length sequences of random tokens, 15 % of which are predicted."""
    num_tokens = num_sequences * length
    random_values = torch.rand(num_sequences, length, generator=generator)
    masked = random_values.argsort(1)[:, : round(MASKING_RATE * length)].sort(1).values
    masked_positions = (masked + torch.arange(num_sequences)[:, None] * length).flatten()
    ids = torch.randint(5, VOCAB_SIZE, (num_tokens,), generator=generator)
    segments = (torch.arange(num_tokens) % length >= length // 2).long()
    return ExampleBatch(
        ids=ids.numpy(),
        segments=segments.numpy(),
        positions=(torch.arange(num_tokens) % length).numpy(),
        cu_seqlens=torch.arange(0, num_tokens + 1, length).int().numpy(),
        max_seqlen=length,
        masked_positions=masked_positions.numpy(),
        masked_labels=ids[masked_positions].numpy(),
        nsp_labels=torch.randint(0, 2, (num_sequences,), generator=generator).numpy(),
    )


def make_config(size: str) -> ModelConfig:
    """Return the config of a named size, with the activation that transformers uses by default."""
    values = {"vocab_size": VOCAB_SIZE, "activation": "gelu", **get_size_preset(size)}
    return ModelConfig.parse(values, size)


def build_bertsmith_step(
    machine: Machine, size: str, batch: PretrainingMicroBatch, *, is_compiled: bool
) -> Callable[[], None]:
    """Return a function that runs one training step of Bertsmith."""
    config = make_config(size)
    model = BertForPreTraining(config, machine.kernel).to(machine.device).train()
    is_dynamic = machine.device.type != "cuda"
    forward: Any = torch.compile(model, dynamic=is_dynamic) if is_compiled else model
    adam = optimizer.build_optimizer(model, OptimSettings(lr=LEARNING_RATE))
    loss_fn = partial(compute_mean_losses, forward)
    step_numbers = itertools.count()

    def step() -> None:
        take_step(
            loss_fn,
            [batch],
            model,
            adam,
            machine,
            step=next(step_numbers),
            seed=0,
            lr=LEARNING_RATE,
            max_grad_norm=1.0,
        )

    return step


def build_transformers_step(
    machine: Machine, size: str, batch: PretrainingMicroBatch, *, is_compiled: bool
) -> Callable[[], None]:
    """Return a function that runs one training step of transformers."""
    sizes = get_size_preset(size)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["feed_forward"],
    )
    model = transformers.BertForPreTraining(config).to(machine.device).train()
    forward = torch.compile(model) if is_compiled else model
    adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    shape = (batch.num_sequences, batch.packed.max_seqlen)
    labels = torch.full_like(batch.packed.ids, -100)
    labels[batch.masked_positions] = batch.masked_labels
    inputs: dict[str, Tensor] = {
        "input_ids": batch.packed.ids.view(shape),
        "token_type_ids": batch.packed.segments.view(shape),
        "attention_mask": torch.ones(shape, dtype=torch.long, device=machine.device),
        "labels": labels.view(shape),
    }
    assert batch.nsp_labels is not None
    inputs["next_sentence_label"] = batch.nsp_labels

    def step() -> None:
        with machine.autocast():
            loss = forward(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Copy the loss to the CPU, as Bertsmith's step does. On a GPU, this waits for the device.
        loss.item()
        adam.step()
        adam.zero_grad()

    return step


def time_step(step: Callable[[], None], machine: Machine) -> float:
    """Return the seconds that one step takes."""
    device.synchronize(machine)
    start = time.perf_counter()
    step()
    device.synchronize(machine)
    return time.perf_counter() - start


def count_step_macs(size: str, batch: PretrainingMicroBatch) -> float:
    """Return the multiply-adds of a training step."""
    config = make_config(size)
    num_tokens, num_predictions = len(batch.packed.ids), len(batch.masked_labels)
    num_unused_outputs = num_tokens - num_predictions - batch.num_sequences
    forward_macs = (
        num_tokens * config.macs_per_token(batch.packed.max_seqlen)
        - num_unused_outputs * config.macs_saved_per_unused_output()
        + num_predictions * config.macs_per_prediction()
    )
    # The backward pass takes twice the multiply-adds of the forward pass.
    return 3 * forward_macs


def compare(
    machine: Machine, size: str, batch: PretrainingMicroBatch, num_steps: int, *, is_compiled: bool
) -> dict[str, Any]:
    """Time the steps of both libraries; return speed ratio, tokens per second and MFU."""
    torch.manual_seed(0)
    steps = {
        "bertsmith": build_bertsmith_step(machine, size, batch, is_compiled=is_compiled),
        "transformers": build_transformers_step(machine, size, batch, is_compiled=is_compiled),
    }
    # Warm up.
    for step in steps.values():
        for _ in range(2):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = []
    for _ in range(num_steps):
        peaks.append(device.measure_peak_macs_per_second(machine, seconds=0.1))
        for name, step in steps.items():
            seconds[name].append(time_step(step, machine))
    num_tokens = len(batch.packed.ids)
    macs = count_step_macs(size, batch)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peak = statistics.median(peaks)
    ratios = [
        transformers_seconds / bertsmith_seconds
        for bertsmith_seconds, transformers_seconds in zip(
            seconds["bertsmith"], seconds["transformers"], strict=True
        )
    ]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "tokens_per_second": {name: num_tokens / value for name, value in medians.items()},
        "flops": {name: 2 * macs / value for name, value in medians.items()},
        "mfu": {name: macs / value / peak for name, value in medians.items()},
        "peak_flops": 2 * peak,
    }


def flatten_measurements(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    """Return nested measurements as a flat dictionary; nested keys are joined with commas."""
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}, {key}"
        if isinstance(value, dict):
            result |= flatten_measurements(name, value)
        else:
            result[name] = value
    return result


def main() -> None:
    """Run the comparison for each requested size, precision and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", help="named size; default mini and small")
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"))
    parser.add_argument("--mode", action="append", choices=("eager", "compiled"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ratios: dict[str, float] = {}
    measurements: dict[str, float] = {}
    for precision in options.precision or ("fp32", "bf16"):
        machine = device.resolve_machine(
            options.device, precision, "padded", attention_dropout=0.1, head_dim=64, threads=None
        )
        generator = torch.Generator().manual_seed(0)
        batch = to_device(make_batch(options.batch, options.length, generator), machine.device)
        for size in options.size or ("mini", "small"):
            for mode in options.mode or ("eager", "compiled"):
                result = compare(
                    machine, size, batch, options.steps, is_compiled=mode == "compiled"
                )
                torch.compiler.reset()
                name = f"{size} {options.batch}x{options.length} {precision} {mode}"
                ratios[name] = result.pop("ratio")
                measurements |= flatten_measurements(name, result)
                speed, mfu = result["tokens_per_second"], result["mfu"]
                print(
                    f"{name}: {ratios[name]:.2f} x ({result['lowest']:.2f} to "
                    f"{result['highest']:.2f}); {speed['bertsmith']:,.0f} tokens/s, transformers "
                    f"{speed['transformers']:,.0f}; {mfu['bertsmith']:.0%} of peak "
                    f"({result['peak_flops'] / 1e9:,.0f} GFLOP/s), transformers "
                    f"{mfu['transformers']:.0%}",
                    flush=True,
                )
    report("pretrain", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
