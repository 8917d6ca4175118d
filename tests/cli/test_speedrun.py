"""benchmarks/speedrun.py: small speedruns from text to the record."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speedrun
import speedrun_record

from bertsmith.errors import TaskError
from bertsmith.runtime import device
from bertsmith.train.engine.metrics_log import read_metrics
from tests.cli.conftest import RunCli
from tests.lab.panel.conftest import SENTENCES, write_table

#: Settings of a very small model; one fine-tuning seed.
SMALL = [
    *("--size", "tiny", "--steps", "3", "--vocab-size", "140", "--finetune-seeds", "1"),
    *("--eval-sequences", "8", "--lr", "1e-3"),
    *("--set", "model.layers=1", "--set", "model.width=8", "--set", "model.feed_forward=12"),
    *("--set", "data.max_seqlen=32", "--set", "data.batch_size=4", "--set", "run.precision=fp32"),
    *("--set", "run.threads=1", "--set", "run.device=cpu"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 300 documents of random sentences."""
    path = tmp_path_factory.mktemp("speedrun") / "text.jsonl"
    words = sorted(set(" ".join(SENTENCES).split()))
    rng = np.random.default_rng(0)
    sentences = [" ".join(rng.choice(words, 7)).capitalize() + "." for _ in range(900)]
    documents = [" ".join(sentences[first : first + 3]) for first in range(0, 900, 3)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 examples of SST-2 and RTE."""
    folder = tmp_path_factory.mktemp("glue")
    texts = [SENTENCES[index % 4] for index in range(24)]
    labels = [str(index % 2) for index in range(24)]
    write_table(folder / "SST-2", ("sentence", "label"), list(zip(texts, labels, strict=True)))
    names = ["entailment" if label == "1" else "not_entailment" for label in labels]
    columns = ("index", "sentence1", "sentence2", "label")
    rows = list(zip(map(str, range(24)), texts, reversed(texts), names, strict=True))
    write_table(folder / "RTE", columns, rows)
    return folder


@pytest.fixture
def environments(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, str]]]:
    """Run commands of Bertsmith in this process, and use a constant speed of the machine.

    Returns:
        The name and the environment variables of each command.
    """
    environments: list[tuple[str, dict[str, str]]] = []

    def run_logged(command: list[str], log_file: Path, environment: dict[str, str]) -> int:
        assert command[1:3] == ["-m", "bertsmith"]
        environments.append((command[3], environment))
        completed = run_cli(*command[3:])
        with log_file.open("a", encoding="utf-8") as file:
            file.write(completed.out + completed.err)
        return completed.status

    monkeypatch.setattr(speedrun, "run_logged", run_logged)
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
    return environments


def test_speedrun_writes_a_record_and_continues(
    text: Path,
    data: Path,
    tmp_path: Path,
    environments: list[tuple[str, dict[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A speedrun goes from text to a record; with another seed, only new results are computed."""
    out = tmp_path / "out"
    arguments = ["--text", str(text), "--data", str(data), "--out", str(out), *SMALL]
    speedrun.main([*arguments, "--seeds", "0", "--tasks", "rte"])
    record = json.loads((out / "record" / "record.json").read_text())
    assert (record["size"], record["budget"]) == ("tiny", "3 steps")
    assert record["machine"]["accelerator"] is None or isinstance(
        record["machine"]["accelerator"], str
    )
    run = record["runs"]["0"]
    assert run["steps"] == 3
    # All batches of the log count, and each has 4 sequences of at most 32 tokens.
    lines = read_metrics(out / "runs" / "seed-0")
    assert run["tokens"] == sum(line["tokens"] for line in lines if line["kind"] == "train")
    assert 3 * 4 * 24 < run["tokens"] <= 3 * 4 * 32
    assert "--set run.seed=0" in run["command"]
    accuracy = run["panel"]["rte"]["accuracy"]
    assert record["score"] == {"mean": pytest.approx(100 * accuracy["mean"]), "std": None}
    assert record["heldout_loss"]["mean"] == run["heldout_loss"] > 0
    # The folder has RTE and SST-2, of which the default tasks of GLUE use both.
    speedrun.main([*arguments, "--seeds", "0,1"])
    record = json.loads((out / "record" / "record.json").read_text())
    assert list(record["panel"]) == ["rte", "sst-2"]
    assert set(record["tasks_without_data"]) == {"cola", "mrpc", "sts-b", "qnli", "qqp", "mnli"}
    assert record["runs"]["0"]["panel"]["rte"]["accuracy"] == accuracy
    # The record names the commit and the machine of each process.
    assert len(record["starts"]) == 2
    assert record["starts"][0]["commit"] == record["commit"]
    assert record["score"]["std"] is not None
    output = (out / "runs" / "seed-0.log").read_text()
    assert "this run is already finished" in output
    markdown = (out / "record" / "record.md").read_text()
    assert "# Speedrun: tiny, 3 steps" in markdown
    assert "not part of the score: cola, mrpc, sts-b, qnli, qqp, mnli" in markdown
    assert markdown in capsys.readouterr().out
    # Only processes of the same run share a compiler cache.
    caches = [
        [Path(variables[f"{name}_CACHE_DIR"]) for name in ("TORCHINDUCTOR", "TRITON")]
        for command, variables in environments
        if command == "pretrain"
    ]
    assert caches[0] == caches[1]
    assert len({*caches[0], *caches[2]}) == 4
    assert all(out in cache.parents for cache in caches[2])
    # Another budget is an error, and leaves the record unchanged.
    arguments[arguments.index("--steps") + 1] = "4"
    with pytest.raises(SystemExit, match="pretrain: exit status 2; see the end of"):
        speedrun.main([*arguments, "--seeds", "0"])
    assert "schedule.steps: 3 in the run, 4 now" in (out / "runs" / "seed-0.log").read_text()
    assert (out / "record" / "record.md").read_text() == markdown


def test_score_is_the_mean_of_the_tasks() -> None:
    """A task with two measures counts once; if a value is missing, there is no score."""
    results: dict[str, Any] = {
        "mrpc": {
            "f1": {"mean": 0.8, "values": [0.7, 0.9]},
            "accuracy": {"mean": 0.6, "values": [0.6, 0.6]},
        },
        "rte": {"accuracy": {"mean": 0.5, "values": [0.4, 0.6]}},
    }
    assert speedrun_record.compute_score(results) == pytest.approx(60)
    # The mean over the other seeds does not count.
    for value in (None, math.nan):
        results["rte"]["accuracy"] = {"mean": 0.6, "values": [value, 0.6]}
        assert speedrun_record.compute_score(results) is None
        assert speedrun_record.list_incomplete_measures(results) == ["rte, accuracy (1 of 2)"]
    results["rte"]["accuracy"] = {"mean": None, "values": []}
    assert speedrun_record.compute_score(results) is None
    assert speedrun_record.summarize([1.0, None]) == {"mean": None, "std": None}
    assert speedrun_record.summarize([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5)}


def test_task_without_a_value_of_each_seed_has_no_mean() -> None:
    """If a fine-tuning run of any model diverged, its task has "-" in the record."""
    panels = [
        {
            "rte": {"accuracy": {"mean": 0.5, "values": [0.5, 0.5]}},
            "cola": {"matthews": {"mean": 0.3, "values": values}},
        }
        for values in ([0.3, 0.3], [0.3, None])
    ]
    panel = speedrun_record.average_panels(panels)
    assert panel == {
        "rte": {"accuracy": {"mean": 0.5, "std": 0.0}},
        "cola": {"matthews": {"mean": None, "std": None}},
    }
    assert speedrun_record.format_summary(panel["cola"]["matthews"], 1, 100.0) == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "dev.tsv"),
        (("--tasks", "held-out"), "held-out needs a text"),
        (("--tasks", "mnli"), "mnli"),
    ],
)
def test_missing_files_are_found_before_training(
    data: Path,
    tmp_path: Path,
    environments: list[Any],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    """A task without a file is an error before the first run."""
    folder = tmp_path / "glue"
    shutil.copytree(data, folder)
    (folder / "RTE" / "dev.tsv").unlink()
    options = ["--text", str(tmp_path), "--data", str(folder), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=message):
        speedrun.main([*options, *arguments])
    assert not environments


@pytest.mark.parametrize("arguments", [("--finetune-seeds", "0"), ("--lr", "-1")])
def test_impossible_numbers_are_errors(arguments: tuple[str, str]) -> None:
    """At least one fine-tuning seed and a positive learning rate are needed."""
    with pytest.raises(SystemExit) as error:
        speedrun.parse_arguments(["--store", "store", "--data", "data", *arguments])
    assert error.value.code == 2


def test_default_tasks_are_those_of_glue(data: Path, tmp_path: Path) -> None:
    """Without data for any task, the folder is reported; the default has the eight tasks."""
    options = speedrun.parse_arguments(["--store", "store", "--data", str(tmp_path)])
    with pytest.raises(TaskError, match=f"--data {tmp_path}: no folder of a task"):
        speedrun.find_tasks(options)
    options.data = data
    tasks, missing = speedrun.find_tasks(options)
    assert [task.name for task in tasks] == ["rte", "sst-2"]
    assert len(missing) == 6
    assert all(task.evaluation == "finetune" for task in tasks)


def test_facts_name_the_machines_of_all_processes() -> None:
    """A record lists the machine and the versions of each process once."""
    machine = {"processor": "Xeon", "cores": 2, "memory_gib": 8, "accelerator": None}
    start = {"commit": "a1", "has_uncommitted_changes": False, "machine": machine,
             "versions": {"bertsmith": "1", "torch": "2"}}  # fmt: skip
    other = {**start, "machine": {**machine, "accelerator": "H200"},
             "versions": {"bertsmith": "1", "torch": "3"}}  # fmt: skip
    record = {"starts": [start, other, start], "date": "today", "settings": [], "runs": {},
              "finetune_seeds": 1,
              "store": {"training_tokens": 5, "vocab_size": 9, "id": "b2"}}  # fmt: skip
    facts = speedrun_record.list_facts(record)
    processor = "Xeon, 2 cores, 8 GiB"
    assert facts["hardware"] == f"no GPU; {processor}; then H200; {processor}"
    assert facts["versions"] == "Bertsmith 1, PyTorch 2; then Bertsmith 1, PyTorch 3"


def test_changed_text_has_a_store_of_its_own(
    text: Path, tmp_path: Path, environments: list[tuple[str, dict[str, str]]]
) -> None:
    """The store depends on the content of the text, not on the name of its file."""
    copy = tmp_path / "text.jsonl"
    shutil.copy(text, copy)
    stores = [speedrun.prepare_store([str(copy)], 140, tmp_path / "out") for _ in range(2)]
    copy.write_bytes(b"".join(copy.read_bytes().splitlines(keepends=True)[1:]))
    stores.append(speedrun.prepare_store([str(copy)], 140, tmp_path / "out"))
    assert stores[0] == stores[1] != stores[2]
    assert [command for command, _ in environments] == ["vocab", "prepare"] * 2


def test_vocabulary_size_needs_text() -> None:
    """--vocab-size is an error with a store, which has a vocabulary."""
    with pytest.raises(SystemExit):
        speedrun.parse_arguments(["--store", "s", "--data", "d", "--vocab-size", "9"])
