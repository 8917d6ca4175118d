"""benchmarks/recipe_search.py: stored results, budgets in steps, the table and the loss curves."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import recipe_search
from recipe_search import (
    Variant,
    append_result,
    build_table,
    get_budget,
    group_results,
    hash_settings,
    plot_curves,
    read_curve,
    read_results,
    run_variant,
)
from reporting import describe_machine
from scipy import stats

from bertsmith.data.store import Store
from bertsmith.files import lock_open_file
from bertsmith.train.pretraining.resolve import compute_store_id

FAST, MUON = Variant("fast", ("run.threads=1",)), Variant("muon", ("optim.optimizer=muon",))


def _make_options(results: Path, **changes: Any) -> argparse.Namespace:
    values = {"steps": None, "minutes": None, "budget_minutes": None, "size": "mini",
              "eval_sequences": 64}  # fmt: skip
    return argparse.Namespace(results=results, **(values | changes))


def test_log_has_the_full_name_of_the_variant(tmp_path: Path) -> None:
    """The logs of variants whose names differ after a dot are different files."""
    run = tmp_path / "lr1.5e-3-0"
    options = argparse.Namespace(data=tmp_path / "no-store", size="tiny")
    with pytest.raises(SystemExit, match=r"exit status \d; see .*lr1\.5e-3-0\.log"):
        recipe_search.train(Variant("lr1.5e-3", ()), 0, ["--steps", "1"], run, options)
    assert (tmp_path / "lr1.5e-3-0.log").exists()


def test_plot_without_results_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plot needs results of at least one variant."""
    variants = tmp_path / "variants.toml"
    variants.write_text("[variants]\na = []\n")
    arguments = [str(variants), "--results", str(tmp_path), "--report", "--plot", "curves.png"]
    monkeypatch.setattr(sys, "argv", ["recipe_search.py", *arguments])
    with pytest.raises(SystemExit, match="no results of these variants with a curve to plot"):
        recipe_search.main()


def test_variants_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """The common settings come before those of each variant."""
    path = tmp_path / "variants.toml"
    path.write_text('common = ["a=1"]\n[variants]\nz = []\nb = ["c=2"]\n')
    variants = recipe_search.read_variants(path)
    assert variants == [Variant("z", ("a=1",)), Variant("b", ("a=1", "c=2"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_command_saves_its_state(tmp_path: Path, number: int) -> None:
    """After Ctrl-C or a signal, a search waits for its training process, and then ends."""
    save = f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: save())\n"
    save += "def save():\n    time.sleep(0.6)\n    print('saved', flush=True)\n    sys.exit(3)\n"
    training = save + "print('started', flush=True)\nwhile True:\n    time.sleep(9)\n"
    log_file = tmp_path / "run.log"
    search = "import signal, sys; from pathlib import Path; from logged_process import run_logged\n"
    # Signals that are ignored here, for example because of `nohup`, would be ignored there too.
    handler = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    search += f"signal.signal({int(number)}, signal.{handler})\n"
    search += f"run_logged([sys.executable, '-c', {training!r}], Path({str(log_file)!r}))"
    folder = str(Path(recipe_search.__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", search], env={**os.environ, "PYTHONPATH": folder},
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (log_file.exists() and "started" in log_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # A terminal sends signals to all processes of the group.
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors.decode()
    else:
        assert process.returncode == 128 + number
    assert log_file.read_text().split() == ["started", "saved"]


def test_incomplete_line_is_replaced(tmp_path: Path) -> None:
    """A line that a killed process left incomplete is ignored, and removed by the next result."""
    append_result(tmp_path, {"seed": 0})
    with (tmp_path / recipe_search.RESULTS_FILE).open("a") as file:
        file.write('{"seed": 1, "los')
    assert read_results(tmp_path) == [{"seed": 0}]
    append_result(tmp_path, {"seed": 2})
    assert read_results(tmp_path) == [{"seed": 0}, {"seed": 2}]


def test_result_of_another_search_is_not_lost(tmp_path: Path) -> None:
    """A search waits while another one, which uses the same folder, appends a result."""
    path = tmp_path / recipe_search.RESULTS_FILE
    with path.open("ab") as file:
        lock_open_file(file)
        thread = threading.Thread(target=append_result, args=(tmp_path, {"seed": 1}))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        file.write(b'{"seed": 0}\n')
    thread.join()
    assert read_results(tmp_path) == [{"seed": 0}, {"seed": 1}]


def test_stored_result_is_not_trained_again(
    tmp_path: Path, store: Path, opened_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result with the same variant, seed, store, size, length and evaluation is returned."""

    def fail(*_: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(recipe_search, "train", fail)
    key = {
        "variant": "fast",
        "seed": 3,
        "settings": ["run.threads=1"],
        "settings_hash": hash_settings(FAST, opened_store, "mini"),
        "size": "mini",
        "budget": "8 steps",
        "length": ["--steps", "8"],
        "store_id": compute_store_id(opened_store),
        "eval_sequences": 64,
    }
    append_result(tmp_path, key | {"heldout_loss": 2.5})
    assert run_variant(FAST, 3, _make_options(tmp_path, data=store, steps=8))["heldout_loss"] == 2.5
    time_key = key | {"budget": "9 minutes", "length": ["--minutes", "9"]}
    append_result(tmp_path, time_key | {"machine": describe_machine()})
    assert run_variant(FAST, 3, _make_options(tmp_path, data=store, minutes=9))["seed"] == 3
    append_result(tmp_path, key | {"seed": 5, "settings_hash": "defaults of another version"})
    append_result(tmp_path, key | {"seed": 7, "store_id": "another"})
    append_result(tmp_path, time_key | {"seed": 8, "machine": {"processor": "another"}})
    for variant, seed, changes in (
        (FAST, 4, {"steps": 8}),
        (MUON, 3, {"steps": 8}),
        (FAST, 3, {"steps": 9}),
        (FAST, 3, {"steps": 8, "size": "tiny"}),
        (FAST, 3, {"steps": 8, "eval_sequences": 128}),
        (FAST, 5, {"steps": 8}),
        (FAST, 7, {"steps": 8}),
        (FAST, 8, {"minutes": 9}),
    ):
        with pytest.raises(AssertionError, match="trained"):
            run_variant(variant, seed, _make_options(tmp_path, data=store, **changes))


def test_budget_is_converted_with_the_calibration(tmp_path: Path) -> None:
    """Half a minute at 0.04 s per step is 750 steps; other settings need a new calibration."""
    options = _make_options(tmp_path, budget_minutes=0.5)
    with pytest.raises(SystemExit, match="run --calibrate"):
        get_budget(FAST, "a", options)
    content = {"mini": {"fast": {"settings_hash": "a", "step_seconds": 0.04}}}
    (tmp_path / recipe_search.CALIBRATION_FILE).write_text(json.dumps(content))
    assert get_budget(FAST, "a", options) == ("0.5 calibrated minutes", ["--steps", "750"])
    with pytest.raises(SystemExit, match="run --calibrate"):
        get_budget(FAST, "b", options)


def test_table_has_a_paired_test() -> None:
    """The difference and the p-value are computed over the seeds that both variants have."""
    losses = {"fast": [3.0, 3.2, 3.1, 3.4], "muon": [2.9, 3.05, 3.0]}
    results = [
        {
            "variant": name,
            "seed": seed,
            "heldout_loss": loss,
            "run_loss": loss + 1,
            "nsp_accuracy": None,
            "steps": 10,
        }
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    _, _, fast, muon = build_table(results, [FAST, MUON])
    assert fast == "| fast | 4 | 3.1750 | 0.1708 |  |  | 4.1750 |  | 10 |"
    p_value = stats.ttest_rel(losses["muon"], losses["fast"][:3]).pvalue
    assert muon == f"| muon | 3 | 2.9833 | 0.0764 | -0.1167 (3) | {p_value:.3f} | 3.9833 |  | 10 |"


def test_curve_has_the_minutes_of_each_evaluation(tmp_path: Path) -> None:
    """Evaluations without a time have that of the last training line; the plot is a PNG file."""
    lines = [
        {"kind": "train", "step": 10, "seconds": 90.0},
        {"kind": "heldout", "step": 10, "mlm_loss": 5.5},
        {"kind": "heldout", "step": 20, "mlm_loss": 4.25, "elapsed_seconds": 180.0},
    ]
    curve = read_curve(lines)
    assert curve == [(1.5, 5.5), (3.0, 4.25)]
    results = [{"variant": name, "curve": curve} for name in ("fast", "muon", "fast")]
    plot_curves({"5 minutes": results, "30 minutes": results[:1]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_results_with_other_defaults_are_not_compared() -> None:
    """Of each variant, only results with its last defaults are reported, and the last per seed."""

    def make_result(seed: int, settings_hash: str, loss: float) -> dict[str, Any]:
        return {
            "variant": "fast", "settings": list(FAST.settings), "settings_hash": settings_hash,
            "seed": seed, "heldout_loss": loss, "size": "mini", "budget": "5 steps",
            "length": ["--steps", "5"],
        }  # fmt: skip

    results = [make_result(0, "old", 1.0), make_result(1, "old", 1.0),
               make_result(0, "new", 2.0), make_result(0, "new", 3.0)]  # fmt: skip
    assert group_results(results, [FAST, MUON]) == {"mini, 5 steps": results[3:]}
