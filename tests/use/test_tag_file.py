"""Tagging of CoNLL, CoNLL-U and JSON files, and the words of plain text."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from bertsmith.bundle import FineTunedBundle, HeadConfig, TaskKind, load_fine_tuned
from bertsmith.errors import BertsmithError, InputError, TaskError
from bertsmith.model.task_models import TaskModel
from bertsmith.tasks.conll import TaggedSentence, has_token_lists, looks_like_conll
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.tables import TableSource, read_rows
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import inputs as inputs_module
from bertsmith.use import tag as tag_module
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict_table import predict_table
from bertsmith.use.tag import _split_into_units, iter_tagged_texts, tag, tag_sentences
from bertsmith.use.tag_file import tag_file
from tests.use.conftest import SENTENCES
from tests.use.test_predict import save_task_model

LABELS = ("O", "B-X", "I-X")
#: A file with three sentences in two documents, and a comment.
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


def load_tagger(
    folder: Path,
    tokenizer: Tokenizer,
    kind: TaskKind = "entities",
    labels: tuple[str, ...] = LABELS,
    **task: str,
) -> FineTunedBundle:
    """Return a random tagger whose metadata contains the task settings of its fine-tuning."""
    directory = save_task_model(folder / "m", tokenizer, HeadConfig(kind, labels))
    info = json.loads((directory / "bertsmith.json").read_text())
    task = {"text_column": "0", "label_column": "2", **task}
    (directory / "bertsmith.json").write_text(json.dumps({**info, "provenance": {"task": task}}))
    return load_fine_tuned(directory)


@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("chunk_size", [1, 512])
def test_conll_output_has_an_added_column(
    tmp_path: Path,
    tokenizer: Tokenizer,
    context: str,
    chunk_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CoNLL output has all lines of the input, with the tags that ``evaluate`` scores."""
    monkeypatch.setattr(tag_module, "_CHUNK_SIZE", chunk_size)
    bundle = load_tagger(tmp_path, tokenizer, context=context)
    (tmp_path / "in.txt").write_text(CONLL)
    counts = tag_file(bundle, TableSource(tmp_path / "in.txt"), tmp_path / "out.txt")
    lines = (tmp_path / "out.txt").read_text().splitlines()
    without_tag = [line.rsplit(" ", 1)[0] for line in lines if line and not line.startswith("##")]
    input_lines = [line for line in CONLL.splitlines() if line and not line.startswith("##")]
    assert without_tag == input_lines
    assert len(lines) == len(CONLL.splitlines())
    assert counts.num_rows == 3
    tags = [line.split()[-2:] for line in lines if line[:1].isalpha()]
    metrics = evaluate(bundle, tmp_path / "in.txt", changes={"metrics": ["accuracy"]})
    num_correct = sum(gold == predicted for gold, predicted in tags)
    assert metrics["accuracy"] == pytest.approx(num_correct / len(tags))
    assert len({predicted for _, predicted in tags}) > 1


def test_conllu_output_has_the_tag_in_misc(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """CoNLL-U output has the tag of each word in its last column; other lines are unchanged."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    text = (
        "# sent_id = 1\n1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_\n1\tDo\t_\tAUX\t_\t_\t_\t_\t_\t_\n"
        "2\tnot\t_\tPART\t_\t_\t_\t_\t_\tA=b|Predicted=X\n\n# end\n"
    )
    (tmp_path / "in.conllu").write_text(text)
    tag_file(bundle, TableSource(tmp_path / "in.conllu"), tmp_path / "out.conllu")
    lines = (tmp_path / "out.conllu").read_text().splitlines()
    input_lines = text.splitlines()
    # Comments, the multiword token "Don't" and the blank line.
    for index in (0, 1, 4, 5):
        assert lines[index] == input_lines[index]
    assert lines[2].split("\t")[9] in ("Predicted=N", "Predicted=V")
    assert lines[3].split("\t")[9] in ("A=b|Predicted=N", "A=b|Predicted=V")


@pytest.mark.parametrize(
    ("in_name", "out_names", "message"),
    [
        ("in.conllu", ("o.conll", "o.txt", "o.tsv.gz"), "CoNLL-U.* ends in .conllu, .jsonl"),
        ("in.conll", ("o.conllu", "o.conllu.gz"), "CoNLL, .* ends in .txt, .conll, .tsv, .jsonl"),
    ],
)
def test_conll_and_conllu_are_not_converted(
    tmp_path: Path, tokenizer: Tokenizer, in_name: str, out_names: tuple[str, ...], message: str
) -> None:
    """The suffix of the other format is an error, which names the suffixes that fit the input."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    (tmp_path / in_name).write_text("1\tiron" + "\t_" * 8 + "\n\n")
    for out_name in out_names:
        with pytest.raises(InputError, match=message):
            tag_file(bundle, TableSource(tmp_path / in_name), tmp_path / out_name)
        assert not (tmp_path / out_name).exists()


def test_separators_in_tags_are_escaped_in_misc(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A tag with "|" is one field of MISC, which another prediction replaces completely."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("NN|UTR|SIN", r"NN|UTR\SIN"))
    (tmp_path / "in.conllu").write_text("1\tiron" + "\t_" * 7 + "\tA=b\n\n")
    for in_name, out_name in (("in", "first"), ("first", "second")):
        source = TableSource(tmp_path / f"{in_name}.conllu")
        tag_file(bundle, source, tmp_path / f"{out_name}.conllu")
    line = (tmp_path / "first.conllu").read_text().splitlines()[0]
    assert line.split("\t")[9] in (r"A=b|Predicted=NN\pUTR\pSIN", r"A=b|Predicted=NN\pUTR\\SIN")
    assert (tmp_path / "second.conllu").read_text() == (tmp_path / "first.conllu").read_text()


def test_json_output_has_added_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows keep their columns, also the gold tags. CoNLL written as JSON has the same tags."""
    bundle = load_tagger(tmp_path, tokenizer)
    table = [
        {"id": number, "tokens": text.split(), "tags": ["O"] * len(text.split())}
        for number, text in enumerate(SENTENCES)
    ]
    (tmp_path / "in.json").write_text(json.dumps(table))
    counts = tag_file(bundle, TableSource(tmp_path / "in.json"), tmp_path / "out.parquet")
    assert counts.added_columns == ["predicted_tags", "probabilities"]
    rows = [dict(row.cells) for row in read_rows(tmp_path / "out.parquet")]
    for row, input_row in zip(rows, table, strict=True):
        assert {name: row[name] for name in input_row} == input_row
        assert len(row["predicted_tags"]) == len(row["probabilities"]) == len(row["tokens"])
        assert set(row["predicted_tags"]) <= set(LABELS)
    blocks = "\n\n".join("\n".join(f"{word} X O" for word in text.split()) for text in SENTENCES)
    (tmp_path / "in.txt").write_text(blocks + "\n")
    tag_file(bundle, TableSource(tmp_path / "in.txt"), tmp_path / "out.jsonl")
    conll_rows = [dict(row.cells) for row in read_rows(tmp_path / "out.jsonl")]
    assert [row["tokens"] for row in conll_rows] == [row["tokens"] for row in rows]
    assert [row["tags"] for row in conll_rows] == [row["predicted_tags"] for row in rows]


def test_parquet_output_keeps_the_schema(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Columns keep their types, also those that Python values do not determine, such as maps."""
    bundle = load_tagger(tmp_path, tokenizer)
    schema = pa.schema(
        [
            ("tokens", pa.list_(pa.large_string())),
            ("number", pa.int8()),
            ("name", pa.dictionary(pa.int32(), pa.string())),
            ("time", pa.timestamp("ns")),
            ("scores", pa.map_(pa.string(), pa.int16())),
        ]
    )
    row = {"tokens": ["iron"], "number": 1, "name": "a", "time": 0, "scores": [("a", 2)]}
    for rows in ([row, {**row, "number": None}], []):
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "in.parquet")
        out = tmp_path / f"out{len(rows)}.parquet"
        tag_file(bundle, TableSource(tmp_path / "in.parquet"), out)
        table = pq.read_table(out)
        assert list(table.schema)[:5] == list(schema)
        assert table.column_names[5:] == ["tags", "probabilities"]
        assert table.select(schema.names).to_pylist() == (
            pq.read_table(tmp_path / "in.parquet").to_pylist()
        )


def test_token_lists_are_detected(tmp_path: Path) -> None:
    """A table has token lists if its first row has; without rows, if its column is "tokens"."""
    files = {
        "a.jsonl": '{"tokens": ["iron"]}\n', "b.jsonl": '{"tokens": "iron"}\n',
        "c.jsonl": '{"words": ["iron"]}\n', "d.jsonl": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name, column in (("e.parquet", "tokens"), ("f.parquet", "text")):
        pq.write_table(pa.table({column: []}), tmp_path / name)
    names = ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "e.parquet", "f.parquet"]
    results = [has_token_lists(TableSource(tmp_path / name), "0") for name in names]
    assert results == [True, False, False, True, True, False]
    assert has_token_lists(TableSource(tmp_path / "c.jsonl"), "words")
    assert has_token_lists(TableSource(tmp_path / "c.jsonl"), None, "words")
    assert has_token_lists(TableSource(tmp_path / "d.jsonl"), None, "words")
    stream = TableSource(Path("standard input"), "jsonl", stream=BytesIO())
    columns = [(None, "words"), ("words", "words"), ("tokens", "words"), ("text", "words")]
    assert [has_token_lists(stream, *names) for names in columns] == [True, True, True, False]


def test_error_names_the_column_of_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Without --text, JSON is read from the column "tokens", not from a CoNLL column number."""
    bundle = load_tagger(tmp_path, tokenizer)
    (tmp_path / "in.jsonl").write_text('{"words": ["iron"]}\n')
    with pytest.raises(TaskError, match="reads the column 'tokens', but the columns are 'words'"):
        predict_table(bundle, TableSource(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")


def test_ids_of_rows_may_repeat(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each row gets tags, also if several rows have the same id."""
    bundle = load_tagger(tmp_path, tokenizer)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "tokens": ["iron"]}\n' * 2)
    counts = tag_file(bundle, TableSource(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    rows = [row.cells for row in read_rows(tmp_path / "out.jsonl")]
    assert (counts.num_rows, counts.num_without_prediction) == (2, 0)
    assert rows[0] == rows[1]
    assert rows[0]["tags"]


def test_invalid_sentences_can_be_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With ``skip_invalid``, an invalid sentence is written without tags; else it is an error."""
    bundle = load_tagger(tmp_path, tokenizer)
    (tmp_path / "in.txt").write_text("iron X O\nwas X\n\nwhite X O\n")
    source, out = TableSource(tmp_path / "in.txt"), tmp_path / "out.txt"
    with pytest.raises(TaskError, match=r"line 2: .*--skip-invalid"):
        tag_file(bundle, source, out)
    assert not out.exists()
    counts = tag_file(bundle, source, out, skip_invalid=True)
    assert (counts.num_rows, counts.num_without_prediction) == (2, 1)
    first, second, blank, last = out.read_text().splitlines()
    assert (first, second, blank) == ("iron X O _", "was X _", "")
    assert last.rsplit(" ", 1)[1] in LABELS
    (tmp_path / "in.jsonl").write_text('{"tokens": []}\n{"tokens": ["iron"]}\noops\n')
    source = TableSource(tmp_path / "in.jsonl")
    counts = tag_file(bundle, source, tmp_path / "o.jsonl", skip_invalid=True)
    assert (counts.num_rows, counts.num_without_prediction, counts.num_unreadable) == (2, 1, 1)
    for out_name, in_name in (("o.csv", "in.txt"), ("o.txt", "in.jsonl")):
        with pytest.raises(BertsmithError, match="expected a name that ends in"):
            tag_file(bundle, TableSource(tmp_path / in_name), tmp_path / out_name)


@pytest.mark.parametrize(
    ("text", "is_conll"),
    [
        (CONLL, True),
        ("EU O\nrejects O\n", True),
        ("EU\nrejects\n\nOslo\n", True),
        ("The\ncat\nsat\n.\n\nIt\nran\n.\n", True),
        ("\nYes\nNo\n\n", False),
        ("서\tB-X\n \tO\n", True),
        ("He went\nShe came\n", False),
        ("He went home\nShe came\n", False),
        ("Yes\nNo\n", False),
        ("One text\n", False),
        ("", False),
    ],
)
def test_conll_is_detected(text: str, *, is_conll: bool) -> None:
    """Lines are CoNLL if they have equal columns with a label, or blocks of single words."""
    assert looks_like_conll(text, LABELS) == is_conll


def test_names_and_addresses_are_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """@names, #topics, URLs and email addresses are single words, without punctuation around."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    text = "ask @the_smith, me@x.org (https://x.org/a?b=1,2): #iron #1 don't U.S www.x.org."
    (tagged,) = tag(bundle, [text])
    assert [span.text for span in tagged.spans] == [
        "ask", "@the_smith", ",", "me@x.org", "(", "https://x.org/a?b=1,2", ")", ":", "#iron", "#",
        "1", "don't", "U.S", "www.x.org", ".",
    ]  # fmt: skip
    assert all(text[span.start : span.end] == span.text for span in tagged.spans)


def test_long_texts_of_address_characters_are_split_in_linear_time(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Such a text takes well under a second. In quadratic time it would take hours."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    task = get_task_settings(bundle)
    assert len(_split_into_units("a+" * 200_000, task)) == 400_000


@pytest.mark.parametrize(
    "words",
    [
        ("हिन्दी", "भाषा", "!"),
        ("ภาษาไทย",),
        ("cafe\u0301", "re\u0301sume\u0301"),
        ("می\u200cخواهم",),
        ("스파이더", "."),
    ],
    ids=["hindi", "thai", "decomposed", "persian", "korean"],
)
def test_marks_do_not_separate_words(
    tmp_path: Path, tokenizer: Tokenizer, words: tuple[str, ...]
) -> None:
    """Combining marks and zero-width joiners belong to their word."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    (tagged,) = tag(bundle, [" ".join(words)])
    assert tuple(span.text for span in tagged.spans) == words


def test_han_and_kana_characters_are_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Scripts without spaces are split into characters, which keep their marks; Hangul is not."""
    bundle = load_tagger(tmp_path, tokenizer, "tags", ("N", "V"))
    text = "王小明 住在NLP1.5城。か\u3099カー 葛\U000e0100 스파이더 请a@b.com或https://x.org/a看"
    (tagged,) = tag(bundle, [text])
    assert [span.text for span in tagged.spans] == [
        "王", "小", "明", "住", "在", "NLP1.5", "城", "。", "か\u3099", "カ", "ー", "葛\U000e0100",
        "스파이더", "请", "a@b.com", "或", "https://x.org/a", "看",
    ]  # fmt: skip
    character_task = get_task_settings(bundle, {"tag_level": "character"})
    assert len(_split_into_units(text, character_task)) == len(text)


def test_long_texts_are_tagged_in_small_chunks(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk ends when its texts have enough characters, which does not change the tags."""
    bundle = load_tagger(tmp_path, tokenizer)
    expected = tag(bundle, SENTENCES)
    chunk_sizes: list[int] = []

    def compute(model: TaskModel, inputs: ModelInputs) -> list[NDArray[np.float32]]:
        chunk_sizes.append(len(inputs.decoding_data))
        return compute_outputs(model, inputs)

    monkeypatch.setattr(inputs_module, "MAX_CHUNK_CHARACTERS", len(SENTENCES[0]))
    monkeypatch.setattr(tag_module, "MAX_CHUNK_CHARACTERS", len(SENTENCES[0]))
    tagged = list(iter_tagged_texts(bundle, SENTENCES, compute))
    assert chunk_sizes[0] == 1
    assert [[span.label for span in text.spans] for text in tagged] == [
        [span.label for span in text.spans] for text in expected
    ]
    sentences = [
        TaggedSentence(text, ((0, len(text)),), None, number, "")
        for number, text in enumerate(SENTENCES)
    ]
    chunk_sizes.clear()
    assert len(list(tag_sentences(bundle, sentences, compute=compute))) == len(SENTENCES)
    assert chunk_sizes[0] == 1
