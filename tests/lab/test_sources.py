"""What an experiment reads: told apart by what is read, refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import CorpusError, StoreError, TaskError
from bertsmith.lab import stage as stages
from bertsmith.lab import stage_runners
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import pooling
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources, read_squad
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import OUTPUT, SENTENCES_FILE, STAGE_FUNCTIONS, TEXT_FILE, Job
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.progress import NullProgress
from tests.lab.helpers import TWO_DOCUMENTS, RecordingProgress


def key(place: Path) -> str:
    """Return the key of the stage that reads a text."""
    return (
        StageFactory(SCALES["smoke"], Sources(english=place), place.parent / "work")
        .text_stage()
        .key
    )


def test_a_text_is_what_is_read_of_it(tmp_path: Path) -> None:
    """The name counts where it decides how a file is read; what nobody reads does not."""
    alone, folder = tmp_path / "a.jsonl", tmp_path / "folder"
    folder.mkdir()
    for file in (alone, folder / "b.jsonl"):
        file.write_text(TWO_DOCUMENTS)
    assert key(alone) == key(folder)
    (folder / ".DS_Store").write_text("x")
    (folder / "picture.png").write_text("x")
    assert key(alone) == key(folder)
    (folder / "c.txt").write_text("one more")
    assert key(alone) != key(folder)
    plain, marked = tmp_path / "m.txt", tmp_path / "m.md"
    for file in (plain, marked):
        file.write_text("# a\n\nthe cat sat\n")
    assert key(plain) != key(marked)


def test_a_folder_around_what_the_lab_writes_is_refused(tmp_path: Path) -> None:
    """Its own results and stores would be read as text the next time."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    text = Sources(english=tmp_path)
    for out in ("lab", "."):
        with pytest.raises(TaskError, match=r"--text .*lies in it and would be a part of it"):
            ExperimentRun("learning", scale="smoke", out=tmp_path / out, sources=text)
    text.check_paths(("en",), tmp_path / ".lab")
    text.check_paths((), tmp_path / "lab")
    given = Sources(english=tmp_path, model=str(tmp_path / "model"))
    given.check_paths(("en",), tmp_path / "lab")
    (tmp_path / "model").mkdir()
    with pytest.raises(TaskError, match=r"--model .*lies in it"):
        given.check_paths(("en",), tmp_path / "model" / "lab")
    beside = ExperimentRun("learning", scale="smoke", sources=Sources(english=tmp_path / "a.jsonl"),
                        out=tmp_path / "lab")  # fmt: skip
    assert beside.stages


def test_what_cannot_be_read_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a task without permission would else end the lab after hours of pre-training."""

    def refusing(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    text = Sources(english=tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "sha256_of_file", refusing)
        with pytest.raises(TaskError, match=r"a.jsonl: Permission denied"):
            ExperimentRun("learning", scale="smoke", out=tmp_path / "lab", sources=text)
    korean = Sources(tmp_path / "a.jsonl", korean=tmp_path / "none")
    with pytest.raises(TaskError, match=r"--korean-text .*none: there is nothing there"):
        ExperimentRun("learning", scale="smoke", out=tmp_path / "lab", sources=korean)


def test_too_little_text_is_told(tmp_path: Path) -> None:
    """What a scale finds of a page of text is no finding of that scale."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    heard = RecordingProgress()
    ExperimentRun("activations", out=tmp_path / "lab", progress=heard,
               sources=Sources(english=tmp_path / "a.jsonl"))  # fmt: skip
    assert any("where scale small takes 40,000,000;" in own for own in heard.messages)


def made(tmp_path: Path, kind: str, stage: Stage, **needs: Path) -> dict[str, Any]:
    """Make a stage, without a bench."""
    folder = tmp_path / kind
    folder.mkdir()
    return STAGE_FUNCTIONS[kind](Job(stage, folder, needs, NullProgress()))


def test_a_sentence_a_line_stays_one(tmp_path: Path) -> None:
    """The lab's store has the sentences that `prepare` makes of the same file."""
    lines = "He met Smith. They talked.\n" + "The cat sat.\n" * 4
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(f"{lines}It had {number}.\n" for number in range(30)))
    stage = StageFactory(SCALES["smoke"], Sources(english=text), tmp_path).text_stage()
    assert made(tmp_path, "text", stage)["documents"] == 30
    cut = tmp_path / "text" / OUTPUT
    assert (cut / SENTENCES_FILE).exists()
    assert not (cut / TEXT_FILE).exists()
    words = Stage("words", {"size": 130, "segment": None}, {"text": stage})
    made(tmp_path, "words", words, text=cut)
    store = Stage("store", {"language": "en", "held_out": 0.1}, {"text": stage, "words": words})
    told = made(tmp_path, "store", store, text=cut, words=tmp_path / "words" / OUTPUT)
    assert sum(own["sentences"] for own in told["splits"].values()) == 30 * 6


@pytest.mark.parametrize(("num_repeats", "is_long_enough"), [(40, True), (1, False)])
def test_one_document_is_split_if_it_is_long_enough(
    tmp_path: Path, num_repeats: int, *, is_long_enough: bool
) -> None:
    """A part of a single document is held out; a text too short for that is refused."""
    text = tmp_path / "one.jsonl"
    text.write_text(json.dumps({"text": "the cat sat. it ran. " * num_repeats}))
    stage = StageFactory(SCALES["smoke"], Sources(english=text), tmp_path).text_stage()
    made(tmp_path, "text", stage)
    cut = tmp_path / "text" / OUTPUT
    words = Stage("words", {"size": 220, "segment": None}, {"text": stage})
    made(tmp_path, "words", words, text=cut)
    store = Stage("store", {"language": "en", "held_out": 0.1}, {"text": stage, "words": words})
    needs = {"text": cut, "words": tmp_path / "words" / OUTPUT}
    if is_long_enough:
        splits = made(tmp_path, "store", store, **needs)["splits"]
        assert splits["heldout"]["documents"] > 0
        assert splits["train"]["documents"] > 0
    else:
        with pytest.raises(StoreError, match="too short to hold out a part of it: 2 sentences"):
            made(tmp_path, "store", store, **needs)


def test_text_that_needs_an_option_is_sent_to_the_command_that_has_it(tmp_path: Path) -> None:
    """The lab has no --field."""
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"content": "the cat sat."}))
    stage = StageFactory(SCALES["smoke"], Sources(english=text), tmp_path).text_stage()
    with pytest.raises(CorpusError, match=r"no such options: .*by `bertsmith corpus convert`"):
        made(tmp_path, "text", stage)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"data": 1}', '{"version": "1"}', '{"data": [{}]}',
                '{"data": [{"paragraphs": [{"context": 1, "qas": []}]}]}'],
)  # fmt: skip
def test_what_is_not_squad_is_named(tmp_path: Path, content: str) -> None:
    """A plan reads it as well."""
    file = tmp_path / "train-v1.1.json"
    file.write_text(content)
    with pytest.raises(TaskError, match=r"train-v1.1.json: this is no file in SQuAD's form"):
        read_squad(file)


def test_rows_that_a_map_cannot_use_are_named(tmp_path: Path) -> None:
    """By file and line, not by the error of whoever reads them."""
    file = tmp_path / "dev.tsv"
    names = ("sentence1", "sentence2", "score")
    for content, what in (
        ("sentence1\tscore\na\t1\n", "line 1: no column sentence2"),
        ("sentence1\tsentence2\tscore\na\tb\t1\na\n", "line 3: it has fewer columns"),
        ("sentence1\tsentence2\tscore\n", "it holds 0 lines beside the header"),
    ):
        file.write_text(content)
        with pytest.raises(TaskError, match=f"dev.tsv.*{what}"):
            pooling._rows(file, names, 10)
    for score in ("abc", "nan"):
        file.write_text(f"sentence1\tsentence2\tscore\na\tb\t1\n\nc\td\t{score}\n")
        with pytest.raises(TaskError, match=f"line 4: the score '{score}' is no number"):
            pooling._pairs(file, 10)
    file.write_bytes(b"sentence1\tsentence2\tscore\n\xff\tb\t1\n")
    with pytest.raises(TaskError, match=r"dev.tsv: it is not UTF-8 text"):
        pooling._pairs(file, 10)


def test_an_option_that_the_lab_has_not_is_told_to_be_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad row of a task is told with the option of `finetune` that leaves it out."""

    def bad(*_: object, **__: object) -> None:
        raise TaskError("train.tsv, line 3: no label; leave such examples out with --skip-bad")

    monkeypatch.setattr(stage_runners, "finetune", bad)
    kit = StageFactory(SCALES["smoke"], fill_missing_sources(Sources(), tmp_path / "toy"), tmp_path)
    stage = kit.finetuning_run(kit.baseline_run(), "mrpc")
    with pytest.raises(TaskError, match=r"line 3: .*--skip-bad \(an option of finetune; the lab"):
        made(tmp_path, "finetune", stage, model=tmp_path)
