"""Checking the settings of a command against a run directory, which may be in use."""

import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.errors import ModelError, RunError, SettingsError
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.settings import parse_assignments, read_toml
from bertsmith.train.engine.run_device import check_same_settings, needs_machine
from bertsmith.train.engine.run_directory import (
    SETTINGS_FILE,
    check_run_directory,
    load_run_settings,
)
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.recipes import (
    PretrainSettings,
    get_accepted_defaults,
    resolve_steps,
)
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import RecordingProgress, TrainFunction, make_assignments


def test_differences_to_stored_settings_are_listed(resolve: Any, tmp_path: Path) -> None:
    """The error lists exactly the differences, except for settings that may change."""
    stored = resolve_steps(resolve(size="tiny"), 40)
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    assert load_run_settings(tmp_path, resolve(size="tiny")) == stored
    changes = [
        "model.dropout=0.2",
        "run.seed=3",
        "data.batch_size=7",
        "checkpoint.keep=9",
        "optim.lr=0.5",
    ]
    changed = resolve(size="tiny", assignments=changes)
    with pytest.raises(RunError) as caught:
        load_run_settings(tmp_path, changed)
    lines = {line.strip() for line in str(caught.value).splitlines()[1:-1]}
    assert lines == {
        "model.dropout: 0.1 in the run, 0.2 now",
        "data.batch_size: 32 in the run, 7 now",
        "optim.lr: 0.002 in the run, 0.5 now",
        "run.seed: 0 in the run, 3 now",
    }


def test_new_values_that_do_not_affect_the_weights_are_used(
    train: TrainFunction, tmp_path: Path
) -> None:
    """A resumed run uses and stores the new values; later runs that do not set them keep them."""
    run = tmp_path / "run"
    train(steps=6, checkpoint__steps=1, checkpoint__keep=9, checkpoint__keep_optimizer="true")
    weights = (run / "model" / "model.safetensors").read_bytes()
    for step in (4, 5, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    shutil.rmtree(run / "model")
    train(steps=6, checkpoint__keep=1, checkpoint__steps=2, run__log_every=5)
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    stored = read_toml(run / SETTINGS_FILE)
    assert stored["checkpoint"] == {
        "steps": 2, "minutes": 10.0, "keep": 1, "keep_optimizer": True,
    }  # fmt: skip
    assert stored["run"]["log_every"] == 5
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-6"]
    train(steps=6, run__log_every=5)
    assert read_toml(run / SETTINGS_FILE) == stored


def test_settings_that_a_time_budget_determines_are_kept(resolve: Any, tmp_path: Path) -> None:
    """In a resumed run, a new evaluation interval has no effect, and a log message says so."""
    budget = ["schedule.minutes=3", "schedule.steps=40"]
    stored = resolve_steps(resolve(assignments=budget), 40)
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    progress = RecordingProgress()
    changed = resolve(assignments=[*budget, "run.eval_every=7"])
    user_values = {"run": {"eval_every": 7}}
    assert load_run_settings(tmp_path, changed, user_values, progress) == stored
    assert (
        "run.eval_every: 10 in the run, 7 now; using the value in the run" in progress.messages[0]
    )


def test_a_resumed_run_may_have_another_number_of_threads(resolve: Any, tmp_path: Path) -> None:
    """A number set by the user is stored, and a message says so; otherwise it stays the same."""
    stored = resolve_steps(resolve(assignments=["run.threads=1"]), 40)
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    unchanged = resolve(assignments=["schedule.steps=40"])
    assert load_run_settings(tmp_path, unchanged, {}, RecordingProgress()) == stored
    progress = RecordingProgress()
    changed = resolve(assignments=["schedule.steps=40", "run.threads=2"])
    resumed = load_run_settings(tmp_path, changed, {"run": {"threads": 2}}, progress)
    assert resumed is not None
    assert resumed.run.threads == 2
    assert read_toml(tmp_path / SETTINGS_FILE)["run"]["threads"] == 2
    change = "run.threads: 1 in the run, 2 now; using the new value"
    assert progress.messages == [f"{tmp_path}: {change}; the result will differ by rounding"]


def _store_cuda_run(resolve: Any, run: Path, assignments: Sequence[str] = ()) -> PretrainSettings:
    """Write the settings of a run that was started on the device cuda:0, and return them."""
    machine = ["run.device=cuda:0", "run.precision=bf16", "run.attention_kernel=varlen",
               "run.threads=16"]  # fmt: skip
    settings = resolve_steps(resolve(cuda=True, assignments=[*machine, *assignments]), 40)
    (run / SETTINGS_FILE).write_text(settings.to_toml())
    return settings


def test_run_of_a_gpu_continues_on_a_machine_without_one(resolve: Any, tmp_path: Path) -> None:
    """Batch size and length are kept; device, precision, kernel and threads are selected again."""
    stored = _store_cuda_run(resolve, tmp_path)
    progress = RecordingProgress()
    moved = load_run_settings(
        tmp_path, resolve(), {}, progress, is_device_available=lambda device: device == "cpu",
        accepted_defaults=get_accepted_defaults(stored),
    )  # fmt: skip
    assert moved is not None
    machine = {"device": "auto", "precision": "auto", "attention_kernel": "auto", "threads": None}
    assert moved.run == stored.run.model_copy(update=machine)
    assert moved.model_copy(update={"run": stored.run}) == stored
    assert len(progress.messages) == 2
    assert "the device cuda:0 of this run is not available here" in progress.messages[0]
    assert "data.batch_size: 256 in the run, 32 now; using the" in progress.messages[1]


def test_run_stays_on_its_device_while_it_is_available(resolve: Any, tmp_path: Path) -> None:
    """The default device does not move a run; its default batch size is kept, with a message."""
    stored = _store_cuda_run(resolve, tmp_path)
    progress = RecordingProgress()
    defaults = get_accepted_defaults(stored)
    settings = load_run_settings(tmp_path, resolve(), {}, progress, accepted_defaults=defaults)
    assert settings == stored
    change = "data.batch_size: 256 in the run, 32 now"
    assert progress.messages == [f"{tmp_path}: {change}; using the value in the run"]


@pytest.mark.parametrize(("old", "new"), [(None, 3), (2, 3), (2, None)])
def test_run_continues_in_another_number_of_processes(
    resolve: Any, tmp_path: Path, old: int | None, new: int | None
) -> None:
    """The number of processes is replaced and the threads are selected again, with a message."""

    def change_run(settings: PretrainSettings, **changes: Any) -> PretrainSettings:
        return settings.model_copy(update={"run": settings.run.model_copy(update=changes)})

    machine = {"device": "cpu", "precision": "fp32", "attention_kernel": "padded", "threads": 2}
    stored = change_run(resolve_steps(resolve(), 40), **machine, world_size=old)
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    progress = RecordingProgress()
    continued = load_run_settings(tmp_path, change_run(resolve(), world_size=new), {}, progress)
    assert continued == change_run(stored, world_size=new, threads=None)
    assert needs_machine(continued)
    assert len(progress.messages) == 1
    assert f"{old or 1} processes in the run, {new or 1} now" in progress.messages[0]
    assert load_run_settings(tmp_path, change_run(resolve(), world_size=new)) == continued


def test_processes_with_different_settings_are_rejected(resolve: Any) -> None:
    """A process with other settings than process 0 fails; the path of the store may differ."""

    class Processes(ProcessGroup):
        def broadcast(self, _: Any) -> Any:
            values = resolve().model_dump()
            values["run"]["store_path"] = "/elsewhere"
            return PretrainSettings.parse(values, "process 0")

    check_same_settings(resolve(), Processes(1, 2))
    with pytest.raises(SettingsError, match=r"optim.lr: 0.002 in process 0, 0.5 in process 1"):
        check_same_settings(resolve(assignments=["optim.lr=0.5"]), Processes(1, 2))


def test_several_processes_reject_what_they_cannot_train(resolve: Any, store: Path) -> None:
    """Batch norm needs a single process."""
    processes = ProcessGroup(0, 2)
    batch_norm = resolve(assignments=["model.norm=batch"])
    with pytest.raises(SettingsError, match="would differ between the 2 processes"):
        Session(batch_norm, Store.open(store), processes)


def test_user_may_move_a_run_to_another_device(resolve: Any, tmp_path: Path) -> None:
    """A device that the user sets replaces the stored one, with the precision the user sets."""
    _store_cuda_run(resolve, tmp_path)
    assignments = ["run.device=cpu", "run.precision=fp32"]
    progress = RecordingProgress()
    moved = load_run_settings(
        tmp_path, resolve(assignments=assignments), parse_assignments(assignments), progress,
        accepted_defaults={"data.batch_size": (32, 256)},
    )  # fmt: skip
    assert moved is not None
    assert (moved.run.device, moved.run.precision) == ("cpu", "fp32")
    assert (moved.run.attention_kernel, moved.run.threads) == ("auto", None)
    assert "run.device: 'cuda:0' in the run, 'cpu' now" in progress.messages[0]


def test_batch_size_of_the_user_is_not_a_default(resolve: Any, tmp_path: Path) -> None:
    """A batch size that is no default must be repeated, and a default must not be changed."""
    stored = _store_cuda_run(resolve, tmp_path, ["data.batch_size=64"])
    defaults = get_accepted_defaults(stored)
    with pytest.raises(RunError, match=r"data.batch_size: 64 in the run, 32 now"):
        load_run_settings(tmp_path, resolve(), {}, accepted_defaults=defaults)
    _store_cuda_run(resolve, tmp_path)
    assignments = ["data.batch_size=32"]
    changed = resolve(cuda=True, assignments=assignments)
    with pytest.raises(RunError, match=r"data.batch_size: 256 in the run, 32 now"):
        load_run_settings(
            tmp_path, changed, parse_assignments(assignments), accepted_defaults=defaults
        )
    paper = resolve(recipe="paper")
    assert get_accepted_defaults(paper).keys() == {"run.start_id"}


def test_omitted_data_settings_are_differences(resolve: Any, tmp_path: Path) -> None:
    """A run that sets a constant masking rate, or no second phase, is not a run with these."""
    stored = resolve()
    (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
    defaults = get_accepted_defaults(stored)
    assignments = ["data.masking_rate=0.3"]
    values = parse_assignments(assignments)
    constant = resolve(assignments=assignments)
    with pytest.raises(RunError, match=r"data\.final_masking_rate: 0\.15 in the run, None now"):
        load_run_settings(tmp_path, constant, values, accepted_defaults=defaults)
    for key in ("data.initial_batch_size", "data.max_predictions_per_seq",
                "schedule.phase2_max_seqlen"):  # fmt: skip
        stored = resolve(assignments=["data.max_seqlen=16", f"{key}=16"])
        (tmp_path / SETTINGS_FILE).write_text(stored.to_toml())
        with pytest.raises(RunError, match=rf"{key}: 16 in the run, None now"):
            load_run_settings(
                tmp_path,
                resolve(assignments=["data.max_seqlen=16"]),
                {},
                accepted_defaults=defaults,
            )


def test_moved_run_records_its_new_device(train: TrainFunction, tmp_path: Path) -> None:
    """A run whose device is not available continues from its checkpoint, and stores the CPU."""
    train(steps=4, checkpoint__steps=2, checkpoint__keep_optimizer="true")
    run = tmp_path / "run"
    path = run / SETTINGS_FILE
    shutil.rmtree(run / "checkpoints" / "step-4")
    shutil.rmtree(run / "model")
    text = path.read_text()
    weights_on_cpu = text.replace('device = "cpu"', 'device = "cuda:7"')
    path.write_text(weights_on_cpu.replace('precision = "fp32"', 'precision = "bf16"'))
    progress = RecordingProgress()
    outcome = train(
        steps=4, checkpoint__steps=2, checkpoint__keep_optimizer="true", run__device="auto",
        run__precision=None, run__threads=None, progress=progress,
    ).outcome  # fmt: skip
    assert outcome.state.step == 4
    stored = read_toml(path)["run"]
    assert stored["device"] == "cpu"
    assert stored["precision"] in ("fp32", "bf16")
    assert stored["attention_kernel"] == "padded"
    assert stored["threads"] >= 1
    assert any("cuda:7 of this run is not available" in line for line in progress.messages)


def test_store_may_move_but_not_change(resolve: Any, tmp_path: Path) -> None:
    """A resumed run accepts and stores a new path of its store, but rejects another store."""
    (tmp_path / SETTINGS_FILE).write_text(resolve_steps(resolve(), 5).to_toml())
    settings = resolve()
    moved = settings.model_copy(
        update={"run": settings.run.model_copy(update={"store_path": "/else"})}
    )
    assert load_run_settings(tmp_path, moved)
    assert read_toml(tmp_path / SETTINGS_FILE)["run"]["store_path"] == "/else"
    other = settings.model_copy(
        update={"run": settings.run.model_copy(update={"store_id": "0" * 16})}
    )
    with pytest.raises(RunError, match=r"run\.store_id: .* in the run, '0000000000000000' now"):
        load_run_settings(tmp_path, other)


def _stop_run(run: Path, steps: int) -> None:
    """Remove the results of a run after ``steps`` steps, as if it had been stopped there."""
    shutil.rmtree(run / "model")
    for path in (run / "checkpoints").iterdir():
        if path.name != f"step-{steps}":
            shutil.rmtree(path)


def test_continued_run_does_not_need_its_start_model(train: TrainFunction, tmp_path: Path) -> None:
    """A run with --from resumes if its start model has moved, or no longer exists."""
    first, run = tmp_path / "first", tmp_path / "run"
    options: dict[str, Any] = {
        "steps": 4, "checkpoint__steps": 2, "checkpoint__keep_optimizer": "true",
    }  # fmt: skip
    train("first", steps=2)
    train(start_from=str(first), **options)
    expected = (run / "model" / "model.safetensors").read_bytes()
    stored = (run / SETTINGS_FILE).read_text()
    _stop_run(run, 2)
    first.rename(tmp_path / "moved")
    progress = RecordingProgress()
    train(start_from=str(tmp_path / "moved"), progress=progress, **options)
    assert (run / "model" / "model.safetensors").read_bytes() == expected
    assert read_toml(run / SETTINGS_FILE)["run"]["start_from"] == str(tmp_path / "moved")
    assert any("run.start_from: " in line and "first" in line for line in progress.messages)
    (run / SETTINGS_FILE).write_text(stored)
    _stop_run(run, 2)
    train(start_from=str(first), **options)
    assert (run / "model" / "model.safetensors").read_bytes() == expected
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ModelError, match="first: no such file"):
        train(start_from=str(first), **options)


def test_other_start_model_is_rejected(train: TrainFunction, tmp_path: Path) -> None:
    """Another model at another or the same path is an error; without its id, so is another path."""
    first, run = tmp_path / "first", tmp_path / "run"
    train("first", steps=1)
    train("other", steps=2)
    train(steps=1, start_from=str(first))
    for path in (tmp_path / "other", first):
        with pytest.raises(RunError, match=r"run\.start_id: '\w{16}' in the run, '\w{16}' now"):
            train(steps=1, start_from=str(path))
        shutil.rmtree(first, ignore_errors=True)
        shutil.copytree(tmp_path / "other", first)
    lines = (run / SETTINGS_FILE).read_text().splitlines(keepends=True)
    (run / SETTINGS_FILE).write_text(
        "".join(line for line in lines if not line.startswith("start_id"))
    )
    train(steps=1, start_from=str(first))
    with pytest.raises(RunError, match=r"run\.start_from: '.*first' in the run, '.*other' now"):
        train(steps=1, start_from=str(tmp_path / "other"))


def test_directories_with_other_files_are_rejected(store: Path, tmp_path: Path) -> None:
    """A file, or a directory with other files, is rejected as a run directory and not changed."""
    folder = tmp_path / "home"
    folder.mkdir()
    letter = folder / "letter.txt"
    letter.write_text("mine")
    for out, message in ((folder, "this directory has other files"), (letter, "a file")):
        with pytest.raises(RunError, match=message):
            pretrain(store, out, steps=1, assignments=make_assignments())
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
    assert letter.read_text() == "mine"


def test_files_of_a_killed_start_are_accepted(tmp_path: Path) -> None:
    """A run can start where a killed process has left a lock and a temporary settings file."""
    (tmp_path / ".lock").touch()
    (tmp_path / f".{SETTINGS_FILE}.4711.tmp").write_text("[mod")
    check_run_directory(tmp_path)
    check_run_directory(tmp_path / "none")


def test_second_process_is_rejected(train: TrainFunction, tmp_path: Path) -> None:
    """If another process holds the lock of a run, training fails without changing files."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is training here"):
            train(steps=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
