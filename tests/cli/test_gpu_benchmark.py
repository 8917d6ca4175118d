"""benchmarks/gpu.py: checks that succeed, fail and hang, on the CPU."""

import argparse
import json
import subprocess
from pathlib import Path

import gpu
import gpu_checks
import gpu_harness
import pretrain
import pytest
import torch

from bertsmith.runtime import device
from tests.train.conftest import make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store; the default would be one of all documentation."""
    return make_store(tmp_path_factory.mktemp("gpu"))


def test_dry_checks_write_their_results(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --dry, a stage runs without a GPU and writes one file with all results."""
    # The limits of a GPU are too short for a busy CPU.
    monkeypatch.setitem(gpu.STAGES, "A", {"hardware": 600.0, "kernels": 600.0})
    arguments = ["--stage", "A", "--dry", "--out", str(tmp_path), "--only", "hardware,kernels"]
    arguments += ["--store", str(store)]
    assert gpu.main(arguments) == 0
    record = json.loads((tmp_path / "stage-A.json").read_text())
    assert record["dry"] is True
    assert {outcome["status"] for outcome in record["checks"].values()} == {"ok"}
    kernels = record["checks"]["kernels"]["results"]
    assert kernels["padded, fp32, eager"]["loss_error"] < 1e-5
    assert kernels["padded, bf16, eager"]["gradient_cosine"] > 0.99
    assert record["checks"]["hardware"]["results"]["matmul_teraflops_bf16"] > 0
    assert "kernels: ok" in capsys.readouterr().out


def test_a_failed_check_is_reported_and_the_next_one_starts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that fails, exceeds its time or has no time left does not end the stage."""
    limits = {"fp8": 0.2, "speedrun": 600.0, "hardware": 600.0}
    monkeypatch.setitem(gpu.STAGES, "C", limits)
    arguments = ["--stage", "C", "--dry", "--out", str(tmp_path), "--store", str(store)]
    assert gpu.main([*arguments, "--data", str(tmp_path / "missing")]) == 1
    checks = json.loads((tmp_path / "stage-C.json").read_text())["checks"]
    assert {name: outcome["status"] for name, outcome in checks.items()} == {
        "fp8": "timeout", "speedrun": "failed", "hardware": "ok",
    }  # fmt: skip
    assert "missing" in checks["speedrun"]["error"]
    monkeypatch.setattr(gpu, "MIN_SECONDS", 1e9)
    assert gpu.main([*arguments, "--only", "fp8"]) == 1
    checks = json.loads((tmp_path / "stage-C.json").read_text())["checks"]
    assert checks["fp8"]["status"] == "skipped"


@pytest.mark.parametrize(
    ("trap", "output"), [("", b""), ("echo saved; exit", b"saved\n")], ids=["ignored", "handled"]
)
def test_processes_that_outlive_a_check_are_stopped(
    monkeypatch: pytest.MonkeyPatch, trap: str, output: bytes
) -> None:
    """After SIGTERM they have time to end, and are then killed."""
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 1.0)
    child = f"trap '{trap}' TERM; echo ready; for _ in 1 2 3 4 5 6; do sleep 1; done; echo alive"
    command = ["sh", "-c", f"({child}) & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        gpu.stop(process)
        assert process.stdout.read() == output


def test_speed_is_measured_without_the_attention_bias(tmp_path: Path) -> None:
    """The settings of all checks switch off the bias, which the recipe has in its first steps."""
    options = argparse.Namespace(store=None, out=tmp_path, data=None, dry=True)
    settings = gpu_harness.Check("stream", options).list_settings()
    assert "schedule.neighbor_bias_steps=0" in settings


def test_transformers_is_compared_with_a_kernel_for_its_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the comparison with transformers supports the dropout of its config."""
    rates: list[float] = []

    def resolve_machine(*_: str, attention_dropout: float, **__: object) -> device.Machine:
        rates.append(attention_dropout)
        return device.Machine(torch.device("cpu"), "fp32", "padded")

    monkeypatch.setattr(device, "resolve_machine", resolve_machine)
    monkeypatch.setattr(pretrain, "compare", lambda *_, **__: {})
    options = argparse.Namespace(store=None, out=tmp_path, data=None, dry=True)
    gpu_checks.check_transformers(gpu_harness.Check("transformers", options))
    assert rates == [pretrain.make_config("tiny").attention_dropout]


def test_unknown_checks_are_an_error(tmp_path: Path) -> None:
    """The error lists the checks of the stage."""
    with pytest.raises(SystemExit, match="--only speed: stage B has the checks large, length"):
        gpu.main(["--stage", "B", "--dry", "--out", str(tmp_path), "--only", "speed"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_stage_needs_a_gpu(tmp_path: Path) -> None:
    """Without a GPU, the error suggests --dry, and nothing is written."""
    with pytest.raises(SystemExit, match="no CUDA device here; --dry runs"):
        gpu.main(["--stage", "A", "--out", str(tmp_path / "gpu")])
    assert not (tmp_path / "gpu").exists()
