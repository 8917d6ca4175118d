"""The command ``lab``: plan, results, failures and invalid arguments."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from bertsmith.lab import cost, stage_runners
from bertsmith.lab.stage_runners import Job
from bertsmith.runtime import device
from bertsmith.train.engine import curve, loop
from bertsmith.train.engine.step import take_step
from tests.cli.conftest import RunCli


@pytest.fixture(autouse=True)
def skip_speed_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a constant peak matmul speed instead of measuring it, and draw no loss curves."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
    monkeypatch.setattr(curve, "draw", lambda run, _, **__: run / curve.CURVE_FILE)


def test_experiment_is_planned_run_and_reused(run_cli: RunCli, tmp_path: Path) -> None:
    """--plan lists the stages; a run prints the table; a second run repeats no stage."""
    options = ("activations", "--scale", "smoke", "--out", tmp_path / "lab")
    completed = run_cli("lab", *options, "--plan")
    assert completed.status == 0, completed.err
    assert "7 stages to run for 4 results: about" in completed.out
    assert not (tmp_path / "lab/smoke/results").exists()
    plan = json.loads(run_cli("lab", *options, "--plan", "--json").out)
    assert len(plan["stages"]) == 7
    completed = run_cli("lab", *options)
    assert completed.status == 0, completed.err
    assert "| GELU, erf |" in completed.out
    assert "wrote" in completed.err
    assert (tmp_path / "lab/smoke/activations.png").exists()
    assert "0 stages to run for 4 results" in run_cli("lab", *options, "--plan").out
    results = json.loads(run_cli("lab", *options, "--json").out)
    assert set(results["data"]) == {"GELU, erf", "GELU, tanh", "ReLU", "ELU"}


def test_several_experiments_are_planned_together(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared stages are counted and steps are measured once; the plan has the core-hours."""
    measured: list[str] = []

    def record_shape(*shape: object) -> float:
        measured.append(repr(shape))
        return 0.5

    monkeypatch.setattr(cost, "measure_step_seconds", record_shape)
    options = ("--scale", "smoke", "--out", tmp_path / "lab", "--plan")

    def list_stages(names: str) -> set[str]:
        plan = json.loads(run_cli("lab", names, *options, "--json").out)
        assert plan["core_hours"] > 0
        names_of_stages = [stage["name"] for stage in plan["stages"]]
        assert len(set(names_of_stages)) == len(names_of_stages)
        return set(names_of_stages)

    first, second = list_stages("activations"), list_stages("positions")
    assert first & second
    measured.clear()
    assert list_stages("activations,positions") == first | second
    assert len(set(measured)) == len(measured)
    completed = run_cli("lab", "activations,positions", *options)
    assert " core-hours)" in completed.out
    assert run_cli("lab", "activations,position", *options).status == 2


def test_failed_run_is_reported_and_retried(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one run fails, the table has the others and the status is 1; a retry completes it."""
    pretrain_model = stage_runners.pretrain_model

    def fail_for_relu(job: Job) -> dict[str, Any]:
        """Raise an error for the model with ReLU; pre-train the other models."""
        if job.stage.settings["model"].get("activation") == "relu":
            raise OSError("the disk is full")
        return pretrain_model(job)

    options = ("lab", "activations", "--scale", "smoke", "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(stage_runners.STAGE_FUNCTIONS, "pretrain", fail_for_relu)
        completed = run_cli(*options)
    assert completed.status == 1
    assert "the disk is full" in completed.err
    assert "failed: relu, 0 (pretrain-" in completed.err
    assert "1 result is missing; run the same command to try again" in completed.err
    rows = [line for line in completed.out.splitlines() if line.startswith("| ReLU")]
    assert rows == ["| ReLU | - | - |"]
    assert run_cli(*options).status == 0


@pytest.mark.parametrize("debug_options", [(), ("--debug",)], ids=["", "debug"])
@pytest.mark.parametrize(
    ("signal_number", "moment"),
    [(signal.SIGINT, "stage"), (signal.SIGINT, "step"), (signal.SIGTERM, "step")],
)
def test_signal_ends_the_command_with_its_status(
    run_cli: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signal_number: signal.Signals,
    moment: str,
    debug_options: tuple[str, ...],
) -> None:
    """A signal during a stage or a training step ends the command after writing the report."""

    def send_signal(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal_number)
        return take_step(*arguments, **options)

    if moment == "step":
        monkeypatch.setattr(loop, "take_step", send_signal)
    else:
        monkeypatch.setitem(stage_runners.STAGE_FUNCTIONS, "store", send_signal)
    # --debug sets this variable; it is restored after the test.
    monkeypatch.setenv("BERTSMITH_DEBUG", "")
    options = ("lab", "activations", "--scale", "smoke", "--out", tmp_path)
    completed = run_cli(*debug_options, *options)
    assert (completed.status, completed.out) == (128 + signal_number, "")
    message = "stopped, progress is saved; run the same command to resume"
    assert completed.err.splitlines()[-1] == message
    assert (tmp_path / "smoke/activations.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "unknown experiment 'nothing'"),
        (("masking",), "--text FILE_OR_FOLDER"),
        (("masking", "--model", "x"), "--model does not apply to masking"),
    ],
)
def test_invalid_arguments_are_errors(
    run_cli: RunCli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Invalid arguments exit with 2 and write nothing."""
    completed = run_cli("lab", *arguments, "--out", tmp_path / "lab")
    assert completed.status == 2
    assert message in completed.err
    assert not (tmp_path / "lab").exists()
