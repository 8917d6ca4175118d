"""Tests of the input files of experiments: their effect on stage keys, and rejected files."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import CorpusError, StoreError, TaskError
from bertsmith.lab import stage as stage_module
from bertsmith.lab import stage_runners
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.panel.tasks import TASKS, split_by_data
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources, read_squad
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import (
    OUTPUT,
    SENTENCES_FILE,
    STAGE_FUNCTIONS,
    TEXT_FILE,
    Job,
)
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.progress import NullProgress
from tests.lab.helpers import TWO_DOCUMENTS, RecordingProgress


def make_text_stage(text: Path, work_dir: Path | None = None) -> Stage:
    """Return the stage that samples a text at scale "smoke"."""
    sources = Sources(english=text)
    return StageFactory(
        SCALES["smoke"], sources, work_dir or text.parent / "work"
    ).create_text_stage()


def run_stage(tmp_path: Path, kind: str, stage: Stage, **inputs: Path) -> dict[str, Any]:
    """Run a stage in the directory ``kind`` without a runner, and return its result."""
    folder = tmp_path / kind
    folder.mkdir()
    return STAGE_FUNCTIONS[kind](Job(stage, folder / OUTPUT, inputs, NullProgress()))


def test_text_key_depends_on_file_contents_and_formats(tmp_path: Path) -> None:
    """File names matter only if they determine the format. Ignored files do not matter."""
    file, folder = tmp_path / "a.jsonl", tmp_path / "folder"
    folder.mkdir()
    for path in (file, folder / "b.jsonl"):
        path.write_text(TWO_DOCUMENTS)
    key = make_text_stage(file).key
    assert make_text_stage(folder).key == key
    (folder / ".DS_Store").write_text("x")
    (folder / "picture.png").write_text("x")
    assert make_text_stage(folder).key == key
    (folder / "c.txt").write_text("one more")
    assert make_text_stage(folder).key != key
    plain_text, markdown = tmp_path / "m.txt", tmp_path / "m.md"
    for path in (plain_text, markdown):
        path.write_text("# a\n\nthe cat sat\n")
    assert make_text_stage(plain_text).key != make_text_stage(markdown).key


def test_output_inside_an_input_folder_is_rejected(tmp_path: Path) -> None:
    """The next run would read the output as text. Output in hidden or unread folders is allowed."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    folder_sources = Sources(english=tmp_path)
    for out in ("lab", "."):
        with pytest.raises(TaskError, match=r"--text .*this folder contains the output folder"):
            ExperimentRun("learning", scale="smoke", out=tmp_path / out, sources=folder_sources)
    folder_sources.check_paths(("en",), tmp_path / ".lab")
    folder_sources.check_paths((), tmp_path / "lab")
    model_sources = Sources(english=tmp_path, model=str(tmp_path / "model"))
    model_sources.check_paths(("en",), tmp_path / "lab")
    (tmp_path / "model").mkdir()
    with pytest.raises(TaskError, match=r"--model .*this folder contains the output folder"):
        model_sources.check_paths(("en",), tmp_path / "model" / "lab")
    file_sources = Sources(english=tmp_path / "a.jsonl")
    run = ExperimentRun("learning", scale="smoke", sources=file_sources, out=tmp_path / "lab")
    assert run.stages


def test_experiments_and_panel_find_tasks_in_the_same_folders(tmp_path: Path) -> None:
    """A folder that the panel accepts is also one for experiments."""
    folder = tmp_path / "CoNLL-2003"
    folder.mkdir()
    assert Sources(tasks_dir=tmp_path).find_task_dir("conll2003") == folder
    available, _ = split_by_data([TASKS["rte"], TASKS["conll2003"]], tmp_path)
    assert available == [TASKS["conll2003"]]


def test_unreadable_input_is_reported_before_any_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input files are read before the first stage, not after hours of pre-training."""

    def raise_permission_error(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    sources = Sources(english=tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "compute_file_sha256", raise_permission_error)
        with pytest.raises(TaskError, match=r"a.jsonl: Permission denied"):
            ExperimentRun("learning", scale="smoke", out=tmp_path / "lab", sources=sources)
    missing = Sources(tmp_path / "a.jsonl", korean=tmp_path / "none")
    with pytest.raises(TaskError, match=r"--korean-text .*none: no such file or folder"):
        ExperimentRun("learning", scale="smoke", out=tmp_path / "lab", sources=missing)


def test_short_text_gives_a_warning(tmp_path: Path) -> None:
    """The warning contains the number of characters that the scale uses."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    progress = RecordingProgress()
    sources = Sources(english=tmp_path / "a.jsonl")
    ExperimentRun("activations", out=tmp_path / "lab", progress=progress, sources=sources)
    assert any("but scale small uses 40,000,000;" in line for line in progress.messages)


def test_one_sentence_per_line_is_preserved(tmp_path: Path) -> None:
    """The store has one sentence per line of such a file, as with `bertsmith prepare`."""
    sentences = "He met Smith. They talked.\n" + "The cat sat.\n" * 4
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(f"{sentences}It had {number}.\n" for number in range(30)))
    text = make_text_stage(file, tmp_path)
    assert run_stage(tmp_path, "text", text)["documents"] == 30
    sample = tmp_path / "text" / OUTPUT
    assert (sample / SENTENCES_FILE).exists()
    assert not (sample / TEXT_FILE).exists()
    vocabulary = Stage("vocabulary", {"size": 130, "segment": None}, {"text": text})
    run_stage(tmp_path, "vocabulary", vocabulary, text=sample)
    dependencies = {"text": text, "vocabulary": vocabulary}
    store = Stage("store", {"language": "en", "held_out": 0.1}, dependencies)
    inputs = {"text": sample, "vocabulary": tmp_path / "vocabulary" / OUTPUT}
    splits = run_stage(tmp_path, "store", store, **inputs)["splits"]
    assert sum(split["sentences"] for split in splits.values()) == 30 * 6


@pytest.mark.parametrize(("num_repeats", "is_long_enough"), [(40, True), (1, False)])
def test_single_document_is_split_if_it_is_long_enough(
    tmp_path: Path, num_repeats: int, *, is_long_enough: bool
) -> None:
    """A part of a single document is held out. If the document is too short, this is an error."""
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"text": "the cat sat. it ran. " * num_repeats}))
    text = make_text_stage(file, tmp_path)
    run_stage(tmp_path, "text", text)
    sample = tmp_path / "text" / OUTPUT
    vocabulary = Stage("vocabulary", {"size": 220, "segment": None}, {"text": text})
    run_stage(tmp_path, "vocabulary", vocabulary, text=sample)
    dependencies = {"text": text, "vocabulary": vocabulary}
    store = Stage("store", {"language": "en", "held_out": 0.1}, dependencies)
    inputs = {"text": sample, "vocabulary": tmp_path / "vocabulary" / OUTPUT}
    if is_long_enough:
        splits = run_stage(tmp_path, "store", store, **inputs)["splits"]
        assert splits["heldout"]["documents"] > 0
        assert splits["train"]["documents"] > 0
    else:
        with pytest.raises(StoreError, match="too short for a held-out split: 2 sentences"):
            run_stage(tmp_path, "store", store, **inputs)


def test_corpus_error_names_the_command_that_converts_text(tmp_path: Path) -> None:
    """JSON lines without the field "text" must be converted, because the lab has no --field."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"content": "the cat sat."}))
    text = make_text_stage(file, tmp_path)
    with pytest.raises(CorpusError, match=r"no options for text .*`bertsmith corpus convert`"):
        run_stage(tmp_path, "text", text)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"data": 1}', '{"version": "1"}', '{"data": [{}]}',
                '{"data": [{"paragraphs": [{"context": 1, "qas": []}]}]}'],
)  # fmt: skip
def test_invalid_squad_file_is_rejected(tmp_path: Path, content: str) -> None:
    """The error names the file that is not in the SQuAD format."""
    file = tmp_path / "train-v1.1.json"
    file.write_text(content)
    with pytest.raises(TaskError, match=r"train-v1.1.json: not in the SQuAD format"):
        read_squad(file)


def test_advice_to_skip_invalid_rows_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--skip-invalid is an option of `finetune`, not of the lab."""

    def raise_bad_row(*_: object, **__: object) -> None:
        raise TaskError("train.tsv, line 3: no label; leave such examples out with --skip-invalid")

    monkeypatch.setattr(stage_runners, "finetune", raise_bad_row)
    sources = fill_missing_sources(Sources(), tmp_path / "toy")
    factory = StageFactory(SCALES["smoke"], sources, tmp_path)
    stage = factory.create_finetuning_run(factory.create_baseline_run(), "mrpc")
    with pytest.raises(
        TaskError, match=r"line 3: .*--skip-invalid \(an option of finetune; the lab"
    ):
        run_stage(tmp_path, "finetune", stage, model=tmp_path)
