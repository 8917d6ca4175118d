"""The checks of gpu.py, each of which runs in a process of its own.

    python benchmarks/gpu_checks.py NAME --store STORE --out DIR [--dry]

A check writes its results to DIR/NAME.json after each measurement.
"""

import argparse
import gc
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_training
import pretrain
import torch
from gpu_harness import (
    CPU,
    Check,
    time_function,
    write_entailment_data,
    write_random_model,
    write_texts,
)
from gpu_training import measure, measure_classifier, profile_steps, run_and_catch
from torch import distributed
from torch.nn import functional as F

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops import cross_entropy
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine import step
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import compute_mean_losses
from bertsmith.use.embed import Embedder

#: Sizes of the square matrices in the hardware check, and of the copied block in bytes.
MATRIX_SIZE, COPY_BYTES = 8192, 2**30
#: Tokens per micro-batch in the check of shapes.
SHAPE_TOKENS = (16384, 32768, 65536, 131072)


def check_hardware(check: Check) -> None:
    """Record properties, matmul speed, memory bandwidth and the cost of starting a kernel."""
    if not check.is_dry:
        properties = torch.cuda.get_device_properties(check.device)
        check.record("name", properties.name)
        check.record("memory_gib", properties.total_memory / 2**30)
        check.record("capability", f"{properties.major}.{properties.minor}")
        check.record("multiprocessors", properties.multi_processor_count)
        check.record("cuda", torch.version.cuda)
    size = 256 if check.is_dry else MATRIX_SIZE
    machine = Machine(check.device, "fp32", "padded")
    device.configure_determinism(is_cuda=not check.is_dry)
    for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
        matrix = torch.randn(size, size, device=check.device, dtype=dtype)
        seconds = time_function(partial(torch.matmul, matrix, matrix), machine)
        check.record(f"matmul_teraflops_{name}", 2e-12 * size**3 / seconds)
    block = torch.empty(COPY_BYTES // (1024 if check.is_dry else 1), dtype=torch.uint8).to(
        check.device
    )
    seconds = time_function(block.clone, machine)
    check.record("copy_terabytes_per_second", 2e-12 * len(block) / seconds)
    small = torch.zeros(1, device=check.device)

    def start_many_kernels() -> None:
        for _ in range(1000):
            small.add_(1.0)

    check.record("kernel_start_microseconds", 1e3 * time_function(start_many_kernels, machine))


def check_kernels(check: Check) -> None:
    """Compare losses and gradients of each kernel, precision and mode with float32 on the CPU."""
    device.configure_determinism(is_cuda=False)
    config = ModelConfig(vocab_size=1000, layers=2, width=128, heads=2, feed_forward=256)
    generator = torch.Generator().manual_seed(0)
    batch = pretrain.make_batch(8, 64, generator)
    batch.ids[:] %= config.vocab_size
    batch.masked_labels[:] %= config.vocab_size
    torch.manual_seed(0)
    model = BertForPreTraining(config, "reference").eval()

    def compute(machine: Machine, *, is_compiled: bool) -> list[torch.Tensor]:
        model.to(machine.device).zero_grad()
        model.bert.kernel = machine.kernel
        torch.compiler.reset()
        forward: Any = torch.compile(model, dynamic=False) if is_compiled else model
        micro_batch = to_device(batch, machine.device)
        with machine.autocast():
            losses = compute_mean_losses(
                forward, micro_batch, [micro_batch], DropoutSeed(torch.tensor(0))
            )
        loss = torch.stack(list(losses.values())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return [loss.detach().cpu().double(), torch.cat(gradients).cpu().double()]

    expected = compute(Machine(CPU, "fp32", "reference"), is_compiled=False)
    device.configure_determinism(is_cuda=not check.is_dry)
    torch.set_float32_matmul_precision("highest")
    for precision in ("fp32", "bf16"):
        for kernel in ("reference", "padded", "varlen"):
            if kernel == "varlen" and (check.is_dry or precision == "fp32"):
                continue
            for is_compiled in (False,) if check.is_dry else (False, True):
                machine = Machine(check.device, precision, kernel)
                loss, gradient = compute(machine, is_compiled=is_compiled)
                name = f"{kernel}, {precision}, {'compiled' if is_compiled else 'eager'}"
                cosine = F.cosine_similarity(gradient, expected[1], dim=0)
                error = abs(float(loss / expected[0]) - 1.0)
                check.record(name, {"loss_error": error, "gradient_cosine": float(cosine)})


def check_stream(check: Check) -> None:
    """Train base at length 128 on the real stream, with a profile."""
    session = check.open_session("base")
    runner, result = measure(session, check.num_steps)
    check.record("base_128", result)
    check.record("profile", profile_steps(runner))


def check_transformers(check: Check) -> None:
    """Alternate steps of Bertsmith and transformers at base and length 128, in one process."""
    size, num_sequences, length = ("tiny", 2, 16) if check.is_dry else ("base", 256, 128)
    machine = device.resolve_machine(
        str(check.device), "auto", "auto",
        attention_dropout=pretrain.make_config(size).attention_dropout, head_dim=64, threads=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    batch = to_device(pretrain.make_batch(num_sequences, length, generator), machine.device)
    for is_compiled in (False,) if check.is_dry else (False, True):
        result = pretrain.compare(machine, size, batch, 2 if check.is_dry else 7,
                                  is_compiled=is_compiled)  # fmt: skip
        check.record("compiled" if is_compiled else "eager", result)


def check_shapes(check: Check) -> None:
    """Compare eager, dynamic and static shapes for several sizes of micro-batches."""
    for num_tokens in (128, 256) if check.is_dry else SHAPE_TOKENS:
        for mode in ("static", "eager", "dynamic"):
            settings: dict[str, Any] = {"run__compile": str(mode != "eager").lower()}
            settings |= {
                "run__micro_batch_tokens": num_tokens,
                "data__batch_size": num_tokens // 128,
            }
            if check.is_dry:
                settings["run__compile"] = "false"
            if mode == "dynamic":
                # Batches that grow are compiled with dynamic shapes. This one has its final size.
                settings["data__initial_batch_size"] = num_tokens // 128

            def run(settings: dict[str, Any] = settings) -> dict[str, Any]:
                return measure(check.open_session("base", **settings), check.num_steps)[1]

            check.record(f"{num_tokens}, {mode}", run_and_catch(run))
            torch.compiler.reset()
            gc.collect()


def check_switches(check: Check) -> None:
    """Switch each optimization off, and a possible one on, in turns with the present state."""
    switches: dict[str, Any] = {
        "all on": nullcontext(),
        "vocabulary not padded": patch.object(cross_entropy, "VOCAB_MULTIPLE", 1),
        "each loss read at once": patch.object(step, "can_skip_step", lambda *_: False),
        "all on again": nullcontext(),
    }
    for name, switch in switches.items():
        torch.compiler.reset()
        with switch:
            check.record(name, measure(check.open_session("base"), check.num_steps)[1])
        gc.collect()
    settings: dict[str, dict[str, Any]] = {
        "residual stream in bf16": {"run__residual_dtype": "bf16", "run__precision": "bf16"},
        "not compiled": {"run__compile": "false"},
    }
    for name, values in settings.items():
        torch.compiler.reset()
        check.record(name, measure(check.open_session("base", **values), check.num_steps)[1])
        gc.collect()


def check_large(check: Check) -> None:
    """Train large at length 128."""
    check.record("large_128", measure(check.open_session("large"), check.num_steps)[1])


def check_length(check: Check) -> None:
    """Train base at length 512."""
    settings = {"data__max_seqlen": 512, "data__batch_size": 64}
    check.record("base_512", measure(check.open_session("base", **settings), check.num_steps)[1])


def check_embedding(check: Check) -> None:
    """Compare the speed of embeddings with sentence-transformers in the same precision."""
    from sentence_transformers import SentenceTransformer

    folder = write_random_model(check, "tiny" if check.is_dry else "base")
    texts = write_texts(check, 32 if check.is_dry else 20_000)
    machine = Machine(check.device, "fp32", "padded")
    repeats = 1 if check.is_dry else 3
    for precision in ("fp32",) if check.is_dry else ("fp32", "bf16"):
        embedder = Embedder.load(folder, device=check.device, fast=precision == "bf16")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        reference = SentenceTransformer(
            str(folder), device=str(check.device), model_kwargs={"torch_dtype": dtype}
        )
        device.configure_determinism(is_cuda=not check.is_dry)
        seconds = {
            "bertsmith": time_function(partial(embedder.encode, texts), machine, repeats),
            "sentence_transformers": time_function(
                partial(reference.encode, texts, batch_size=128), machine, repeats
            ),
        }
        result = {f"{name}_texts_per_second": len(texts) / s for name, s in seconds.items()}
        result["ratio"] = seconds["sentence_transformers"] / seconds["bertsmith"]
        check.record(precision, result)


def check_resume(check: Check) -> None:
    """Kill a run halfway, resume it, and compare its losses with an uninterrupted run."""
    folder = check.make_folder("resume")
    num_steps, size = (12, "tiny") if check.is_dry else (120, "mini")
    common = ["-m", "bertsmith", "pretrain", "--data", str(check.store), "--size", size]
    common += ["--steps", str(num_steps)]
    for setting in (*check.list_settings(), "run.log_every=1", "checkpoint.steps=4"):
        common += ["--set", setting]
    check.record("seconds", check.run_cli(*common, "--out", str(folder / "whole")))
    killed = [sys.executable, *common, "--out", str(folder / "killed")]
    process = subprocess.Popen(killed)
    checkpoints = folder / "killed" / "checkpoints"
    while process.poll() is None and not (checkpoints / f"step-{num_steps // 2}").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    check.record("resumed_seconds", check.run_cli(*killed[1:]))
    losses = [
        [line["loss"] for line in read_metrics(folder / name) if line["kind"] == "train"]
        for name in ("whole", "killed")
    ]
    errors = [abs(a / b - 1.0) for a, b in zip(*losses, strict=True)]
    check.record("largest_relative_loss_difference", max(errors))


def check_checkpoint(check: Check) -> None:
    """Time checkpoints of base: written at once, and by a thread during training."""
    session = check.open_session("base")
    folder = check.make_folder("checkpoint")
    for name, value in gpu_training.measure_checkpoints(session, folder, check.num_steps):
        check.record(name, value)
    shutil.rmtree(folder)


def check_finetuning(check: Check) -> None:
    """Fine-tune base on generated texts of two classes; time a compiled classifier."""
    size = "tiny" if check.is_dry else "base"
    machine = Machine(check.device, "fp32" if check.is_dry else "bf16", "padded")
    for is_compiled in (False,) if check.is_dry else (False, True):
        result = measure_classifier(machine, size, check.num_steps, is_compiled=is_compiled)
        check.record("classifier, compiled" if is_compiled else "classifier, eager", result)
    folder = write_random_model(check, size)
    texts = write_texts(check, 40 if check.is_dry else 8000)
    table = check.out / "labeled.jsonl"
    lines = [json.dumps({"text": t, "label": "ab"[i % 2]}) for i, t in enumerate(texts)]
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = check.make_folder("finetuning")
    arguments = ["finetune", "classify", "--model", str(folder), "--data", str(table)]
    arguments += ["--out", str(run), "--epochs", "1", "--set", f"run.device={check.device}"]
    check.record("seconds", check.run_cli("-m", "bertsmith", *arguments))
    lines_of_training = [line for line in read_metrics(run) if line["kind"] == "train"]
    speeds = [line["tokens_per_second"] for line in lines_of_training]
    check.record("tokens_per_second", statistics.median(speeds))


def run_torchrun(check: Check, num_processes: int, device_name: str, num_steps: int) -> None:
    """Pre-train a small model with torchrun and record its final loss."""
    run = check.make_folder(f"torchrun-{num_processes}")
    arguments = ["-m", "torch.distributed.run", "--standalone"]
    arguments += ["--nproc-per-node", str(num_processes), "-m", "bertsmith", "pretrain"]
    arguments += ["--data", str(check.store), "--size", "tiny", "--out", str(run)]
    settings = (f"run.device={device_name}", "run.log_every=1", "run.threads=1")
    arguments += ["--steps", str(num_steps)]
    arguments += [part for setting in settings for part in ("--set", setting)]
    check.record("seconds", check.run_cli(*arguments))
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    check.record("final_loss", lines[-1]["loss"])
    speeds = [line["tokens_per_second"] for line in lines[len(lines) // 2 :]]
    check.record("tokens_per_second", statistics.median(speeds))


def check_nccl(check: Check) -> None:
    """Sum a tensor and gradients with NCCL, and train on all GPUs if there are several.

    With --dry, the sums use gloo.
    """
    store = distributed.HashStore()  # type: ignore[attr-defined]
    backend = "gloo" if check.is_dry else "nccl"
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        # The group of PyTorch has one process. With two, Bertsmith takes the distributed path.
        processes = ProcessGroup(world_size=2)
        tensor = processes.sum_tensor(torch.ones(8, device=check.device))
        model = torch.nn.Linear(8, 1, bias=False).to(check.device)
        compute_loss = processes.synchronize_gradients(lambda x, _: {"loss": model(x).sum()}, model)
        loss = compute_loss(tensor, [tensor])["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        assert model.weight.grad is not None
        check.record("gradient", model.weight.grad.tolist())
        assert torch.equal(model.weight.grad[0], torch.ones(8, device=check.device))
    finally:
        distributed.destroy_process_group()
    if torch.cuda.device_count() > 1:
        run_torchrun(check, torch.cuda.device_count(), "cuda", 100)


def check_gloo(check: Check) -> None:
    """Train with torchrun and gloo in four processes on the CPU; with --dry two."""
    run_torchrun(check, 2 if check.is_dry else 4, "cpu", 4 if check.is_dry else 50)


def check_serving(check: Check) -> None:
    """Serve base to 64 clients that send one text each."""
    folder = write_random_model(check, "tiny" if check.is_dry else "base")
    texts = check.out / "texts.txt"
    texts.write_text("\n".join(write_texts(check, 64 if check.is_dry else 2000)) + "\n")
    clients, seconds = (2, 1) if check.is_dry else (64, 15)
    script = str(Path(__file__).with_name("serve.py"))
    result = check.out / "serving-benchmark.json"
    check.run_cli(script, "--model", str(folder), "--texts", str(texts), "--clients", str(clients),
                  "--seconds", str(seconds), "--json", str(result))  # fmt: skip
    check.record("serving", json.loads(result.read_text()))


def check_fp8(check: Check) -> None:
    """Time the matrix products of a feed-forward layer of base in bf16 and fp8."""
    width, num_tokens = (64, 64) if check.is_dry else (768, 65536)
    machine = Machine(check.device, "bf16", "padded")
    x = torch.randn(num_tokens, width, device=check.device, dtype=torch.bfloat16)
    weight = torch.randn(4 * width, width, device=check.device, dtype=torch.bfloat16)
    seconds = time_function(lambda: x @ weight.t(), machine)
    check.record("bf16_milliseconds", 1e3 * seconds)
    if check.is_dry:
        return
    one = torch.ones((), device=check.device)
    x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)

    def multiply() -> torch.Tensor:
        return F.scaled_mm(
            x8, weight8.t(), one, F.ScalingType.TensorWise, one, F.ScalingType.TensorWise,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    seconds = time_function(multiply, machine)
    check.record("fp8_milliseconds", 1e3 * seconds)
    seconds = time_function(lambda: x.to(torch.float8_e4m3fn), machine)
    check.record("conversion_milliseconds", 1e3 * seconds)


def check_speedrun(check: Check) -> None:
    """Run or continue the speedrun; it continues if the stage is run again."""
    data = write_entailment_data(check) if check.is_dry and check.data is None else check.data
    if data is None:
        sys.exit("--data is missing: give the folder with the data of GLUE")
    arguments = [str(Path(__file__).with_name("speedrun.py")), "--store", str(check.store)]
    arguments += ["--data", str(data), "--out", str(check.out / "speedrun")]
    if check.is_dry:
        arguments += ["--size", "tiny", "--steps", "3", "--seeds", "0", "--finetune-seeds", "1"]
        arguments += ["--tasks", "rte"]
    check.record("seconds", check.run_cli(*arguments))
    record = json.loads((check.out / "speedrun" / "record" / "record.json").read_text())
    check.record("score", record["score"])
    check.record("heldout_loss", record["heldout_loss"])


CHECKS: dict[str, Callable[[Check], None]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}


def main(argv: Sequence[str]) -> None:
    """Run a check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(CHECKS))
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(argv)
    CHECKS[options.name](Check(options.name, options))


if __name__ == "__main__":
    main(sys.argv[1:])
