"""Tags for sentences that are split into words: CoNLL, CoNLL-U, JSON, and words of plain text."""

import json
from pathlib import Path

import pytest

from bertsmith.bundle import FineTunedBundle, HeadConfig, TaskKind, load_fine_tuned
from bertsmith.errors import BertsmithError, TaskError
from bertsmith.tasks.conll import looks_like_conll
from bertsmith.tasks.tables import TableSource, read_rows
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import tag as tagging
from bertsmith.use.evaluate import evaluate
from bertsmith.use.tag import tag
from bertsmith.use.tag_file import tag_file
from tests.use.conftest import TEXT
from tests.use.test_predict import made

LABELS = ("O", "B-X", "I-X")
CONLL = """-DOCSTART- -X- O

The DT O
forge NN B-X
stood VB I-X

## of the smith
water NN O
was VB O
white JJ O

-DOCSTART- -X- O

he PR O
"""


def trained(
    folder: Path, tokenizer: Tokenizer, kind: TaskKind = "entities", labels: tuple[str, ...] = LABELS,
    **task: str,
) -> FineTunedBundle:  # fmt: skip
    """Return a random tagger whose directory says how its training files were read."""
    directory = made(folder / "m", tokenizer, HeadConfig(kind, labels))
    info = json.loads((directory / "bertsmith.json").read_text())
    task = {"text": "0", "label": "2", **task}
    (directory / "bertsmith.json").write_text(json.dumps({**info, "provenance": {"task": task}}))
    return load_fine_tuned(directory)


@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("window", [1, 512])
def test_conll_gets_a_column(
    tmp_path: Path, tokenizer: Tokenizer, context: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line stays; the tags are those that evaluate scores."""
    monkeypatch.setattr(tagging, "_WINDOW", window)
    bundle = trained(tmp_path, tokenizer, context=context)
    (tmp_path / "in.txt").write_text(CONLL)
    counts = tag_file(bundle, TableSource(tmp_path / "in.txt"), tmp_path / "out.txt")
    lines = (tmp_path / "out.txt").read_text().splitlines()
    added = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("##")]
    kept = [line for line in CONLL.splitlines() if line and not line.startswith("##")]
    assert [before for before, _ in added] == kept
    assert len(lines) == len(CONLL.splitlines())
    assert counts.rows == 3
    tags = [line.split()[-2:] for line in lines if line[:1].isalpha()]
    scored = evaluate(bundle, tmp_path / "in.txt", changes={"metrics": ["accuracy"]})
    assert scored["accuracy"] == pytest.approx(sum(a == b for a, b in tags) / len(tags))
    assert len({predicted for _, predicted in tags}) > 1


def test_conllu_stays_conllu(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The tag goes into the last column; words written as one and comments have none."""
    bundle = trained(tmp_path, tokenizer, "tags", ("N", "V"))
    text = ("# sent_id = 1\n1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_\n1\tDo\t_\tAUX\t_\t_\t_\t_\t_\t_\n"
            "2\tnot\t_\tPART\t_\t_\t_\t_\t_\tA=b|Predicted=X\n\n# end\n")  # fmt: skip
    (tmp_path / "in.conllu").write_text(text)
    tag_file(bundle, TableSource(tmp_path / "in.conllu"), tmp_path / "out.conllu")
    lines = (tmp_path / "out.conllu").read_text().splitlines()
    before = text.splitlines()
    assert [lines[n] for n in (0, 1, 4, 5)] == [before[n] for n in (0, 1, 4, 5)]
    assert lines[2].split("\t")[9] in ("Predicted=N", "Predicted=V")
    assert lines[3].split("\t")[9] in ("A=b|Predicted=N", "A=b|Predicted=V")


def test_tokens_of_json_get_tags(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows keep their columns; gold tags stay beside predicted ones; CoNLL comes as JSON, too."""
    bundle = trained(tmp_path, tokenizer)
    table = [{"id": n, "tokens": text.split(), "tags": ["O"] * len(text.split())}
             for n, text in enumerate(TEXT)]  # fmt: skip
    (tmp_path / "in.json").write_text(json.dumps(table))
    counts = tag_file(bundle, TableSource(tmp_path / "in.json"), tmp_path / "out.parquet")
    assert counts.columns == ["predicted_tags", "probabilities"]
    found = [dict(row.cells) for row in read_rows(tmp_path / "out.parquet")]
    for row, before in zip(found, table, strict=True):
        assert {name: row[name] for name in before} == before
        assert len(row["predicted_tags"]) == len(row["probabilities"]) == len(row["tokens"])
        assert set(row["predicted_tags"]) <= set(LABELS)
    blocks = "\n\n".join("\n".join(f"{word} X O" for word in text.split()) for text in TEXT)
    (tmp_path / "in.txt").write_text(blocks + "\n")
    tag_file(bundle, TableSource(tmp_path / "in.txt"), tmp_path / "out.jsonl")
    again = [dict(row.cells) for row in read_rows(tmp_path / "out.jsonl")]
    assert [row["tokens"] for row in again] == [row["tokens"] for row in found]
    assert [row["tags"] for row in again] == [row["predicted_tags"] for row in found]


def test_bad_sentences_stay_without_tags(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With skip_bad; else the error names the line, and nothing is written."""
    bundle = trained(tmp_path, tokenizer)
    (tmp_path / "in.txt").write_text("iron X O\nwas X\n\nwhite X O\n")
    source, out = TableSource(tmp_path / "in.txt"), tmp_path / "out.txt"
    with pytest.raises(
        TaskError, match=r"line 2: a line with another number of columns.*--skip-bad"
    ):
        tag_file(bundle, source, out)
    assert not out.exists()
    counts = tag_file(bundle, source, out, skip_bad=True)
    assert (counts.rows, counts.without_prediction) == (2, 1)
    first, second, blank, last = out.read_text().splitlines()
    assert (first, second, blank) == ("iron X O _", "was X _", "")
    assert last.rsplit(" ", 1)[1] in LABELS
    (tmp_path / "in.jsonl").write_text('{"tokens": []}\n{"tokens": ["iron"]}\noops\n')
    source = TableSource(tmp_path / "in.jsonl")
    counts = tag_file(bundle, source, tmp_path / "o.jsonl", skip_bad=True)
    assert (counts.rows, counts.without_prediction, counts.unreadable) == (2, 1, 1)
    for name, given in (("o.csv", "in.txt"), ("o.txt", "in.jsonl")):
        with pytest.raises(BertsmithError, match="expected a name that ends in"):
            tag_file(bundle, TableSource(tmp_path / given), tmp_path / name)


@pytest.mark.parametrize(
    ("text", "is_conll"),
    [
        (CONLL, True),
        ("EU O\nrejects O\n", True),
        ("EU\nrejects\n\nOslo\n", True),
        ("서\tB-X\n \tO\n", True),
        ("He went\nShe came\n", False),
        ("He went home\nShe came\n", False),
        ("Yes\nNo\n", False),
        ("One text\n", False),
        ("", False),
    ],
)
def test_a_file_of_words_is_told_from_texts(text: str, *, is_conll: bool) -> None:
    """By its columns: equally many, and labels in one of them; or single words in blocks."""
    assert looks_like_conll(text, LABELS) == is_conll


def test_names_and_addresses_are_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Of plain text: @name, #topic, an address on the web or of mail; marks around them are not."""
    bundle = trained(tmp_path, tokenizer, "tags", ("N", "V"))
    text = "ask @the_smith, me@x.org (https://x.org/a?b=1,2): #iron #1 don't U.S www.x.org."
    (found,) = tag(bundle, [text])
    assert [span.text for span in found.spans] == [
        "ask", "@the_smith", ",", "me@x.org", "(", "https://x.org/a?b=1,2", ")", ":", "#iron", "#",
        "1", "don't", "U.S", "www.x.org", ".",
    ]  # fmt: skip
    assert all(text[span.start : span.end] == span.text for span in found.spans)
