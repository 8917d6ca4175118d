"""The verb ``vocab extend``: a model directory with more words, told and refused."""

import json
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from tests.cli.conftest import Run

WORDS = "Ferrymen\nriverboat\n\nthe\nwinter-time\n나룻배\nzz zz\n"


def test_words_of_a_file_are_added(run: Run, model: Path, tmp_path: Path) -> None:
    """Each word's fate is told, the old rows are there, and the next commands are named."""
    (tmp_path / "words.txt").write_text(WORDS)
    out = tmp_path / "out"
    done = run("vocab", "extend", model, "--words", tmp_path / "words.txt", "--out", out)
    assert done.status == 0, done.err
    assert done.out == ""
    for part in (
        "1 there already: the",
        "Ferrymen as ferrymen",
        "2 refused:",
        "winter-time: it is split: winter | - | time",
        "1 of the words were unknown until now",
        "added 3, ids ",
        f"wrote {out}",
        f"next: bertsmith prepare CORPUS... --tokenizer {out}",
        f"bertsmith pretrain --from {out}",
    ):
        assert part in done.err
    old, new = bundle.load(model), bundle.load(out)
    assert new.tokenizer.vocab == (*old.tokenizer.vocab, "ferrymen", "riverboat", "나룻배")
    size = old.tokenizer.vocab_size
    rows = new.model.bert.embeddings.words.weight
    assert torch.equal(rows[:size], old.model.bert.embeddings.words.weight)


def test_words_of_a_corpus_are_added(run: Run, model: Path, tmp_path: Path) -> None:
    """The most frequent split words, as many as asked for, with pieces a word before and now."""
    text = "Riverboats and ferrymen. " * 9 + "Riverboats, pilots and lanterns, pilots! " * 2
    (tmp_path / "a.txt").write_text(text)
    more = tmp_path / "b.jsonl"
    more.write_text(json.dumps({"text": "ferrymen ferrymen ferrymen winters"}) + "\n")
    options = ["--from-corpus", tmp_path / "a.txt", "--from-corpus", more, "--count", 2]
    done = run("vocab", "extend", model, *options, "--out", tmp_path / "out", "--json")
    assert done.status == 0, done.err
    facts = json.loads(done.out)
    assert facts["words"] == ["ferrymen", "riverboats"]
    assert facts["before"]["pieces_a_word"] > facts["after"]["pieces_a_word"] >= 1
    assert len(facts["pieces"]) == 2
    assert "before: " in done.err
    assert "now: " in done.err
    found = bundle.load(tmp_path / "out")
    assert found.tokenizer.vocab[-2:] == ("ferrymen", "riverboats")
    assert found.info["extended"][0]["source"] == f"{tmp_path / 'a.txt'}, {more}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "either --words FILE or --from-corpus"),
        (["--words", "w.txt", "--from-corpus", "a.txt"], "either --words FILE or --from-corpus"),
        (["--words", "nowhere.txt"], "nowhere.txt"),
        (["--words", "known.txt"], "no word to add"),
        (["--from-corpus", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: list[object], message: str,
) -> None:  # fmt: skip
    """A wrong option, or nothing to add, exits with 2 and leaves no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.txt").write_text("the\nriver bank\n")
    done = run("vocab", "extend", model, *options, "--out", tmp_path / "out")
    assert done.status == 2
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_nothing_is_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    """A folder that holds something is refused, the model's own first of all."""
    done = run("vocab", "extend", model, "--words", "-", "--out", model, stdin=b"pilots\n")
    assert done.status == 2
    assert "something is there already" in done.err


def test_learn_is_meant_where_no_command_is_named(run: Run, tmp_path: Path) -> None:
    """``vocab FILE`` and ``vocab learn FILE`` make the same; so do options that come first."""
    (tmp_path / "a.txt").write_text("The ferry crossed the river twice a day. " * 20)
    forms = (
        ["vocab", tmp_path / "a.txt", "--size", 120],
        ["vocab", "learn", tmp_path / "a.txt", "--size", 120],
        ["vocab", "--size", 120, tmp_path / "a.txt"],
    )
    made = []
    for number, form in enumerate(forms):
        done = run(*form, "--out", tmp_path / str(number))
        assert done.status == 0, done.err
        made.append((tmp_path / str(number) / "vocab.txt").read_bytes())
    assert made[0] == made[1] == made[2]
    (tmp_path / "extend").write_text("The ferry crossed the river twice a day. " * 20)
    done = run("vocab", f"{tmp_path}/extend", "--size", 120, "--out", tmp_path / "named")
    assert done.status == 0, done.err
