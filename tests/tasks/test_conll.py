"""Reading tagged sentences: CoNLL, CoNLL-U, KLUE and tables."""

import gzip
import json
from pathlib import Path

import pytest

from bertsmith.errors import SettingsError, TaskError
from bertsmith.settings import load_user_settings
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tagging import collect_labels, read_examples
from tests.tasks.conftest import CHARACTERS, ENTITIES

CONLL = """-DOCSTART- -X- O O

EU NNP B-NP I-ORG
rejects VBZ B-VP O

Peter NNP B-NP I-PER
Blackburn NNP I-NP I-PER
\u200b X O O

-DOCSTART- -X- O O

Oslo NNP B-NP B-LOC
"""
#: Settings for files with two columns, words and entity tags.
TWO_COLUMNS = ENTITIES.model_copy(update={"label_column": "1"})


def test_spaces_after_a_tag_are_ignored(tmp_path: Path) -> None:
    """A space at the end of a line with tabs does not make another label."""
    path = tmp_path / "a.tsv"
    path.write_text("EU\tB-ORG \nhere\tO\n\nEU\tB-ORG\n")
    sentences, _ = read_examples(path, TWO_COLUMNS)
    assert collect_labels(sentences, str(path)) == ("O", "B-ORG", "I-ORG")


def get_line_number(sentence: TaggedSentence) -> str:
    """Return the line number at the end of a sentence's location."""
    return sentence.location.rsplit(" ", 1)[1]


def test_conll_file_is_read(tmp_path: Path) -> None:
    """Sentences, documents, locations and tags are read; IOB1 tags are converted to BIO2."""
    (tmp_path / "a.txt").write_text(CONLL)
    sentences, counts = read_examples(tmp_path / "a.txt", ENTITIES)
    texts = [sentence.text for sentence in sentences]
    assert texts == ["EU rejects", "Peter Blackburn \u200b", "Oslo"]
    tags = [sentence.tags for sentence in sentences]
    assert tags == [("B-ORG", "O"), ("B-PER", "I-PER", "O"), ("B-LOC",)]
    assert [sentence.document for sentence in sentences] == [1, 1, 2]
    assert sentences[1].unit_offsets == ((0, 5), (6, 15), (16, 17))
    assert sentences[1].location.endswith("a.txt, line 6")
    assert counts.as_dict() == {"num_read": 3, "num_used": 3, "num_truncated": 0, "skipped": {}}
    tags_task = ENTITIES.model_copy(update={"kind": "tags", "label_column": "1"})
    plain_sentences, _ = read_examples(tmp_path / "a.txt", tags_task)
    assert plain_sentences[0].tags == ("NNP", "VBZ")
    labels = collect_labels(sentences, "f")
    assert labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")


def test_document_marker_ends_the_previous_sentence(tmp_path: Path) -> None:
    """A sentence never spans two documents, even without a blank line before the marker."""
    (tmp_path / "a.txt").write_text("-DOCSTART- O\na O\nb O\n-DOCSTART- O\nc O\n\nd O\n")
    sentences, _ = read_examples(tmp_path / "a.txt", TWO_COLUMNS)
    assert [(sentence.text, sentence.document) for sentence in sentences] == [
        ("a b", 1),
        ("c", 2),
        ("d", 2),
    ]
    assert list(map(get_line_number, sentences)) == ["2", "5", "7"]


CONLLU = """# newdoc id = weblog-1
# sent_id = weblog-1-1
# text = Don't go.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
1\tDo\tdo\tAUX\tVB\tMood=Imp\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

1\t#1\t#1\tSYM\tNN\t_\t0\troot\t_\t_
1.1\tleft\tleave\tVERB\tVBD\t_\t_\t_\t0:root\t_

# newdoc
1\t서울에서\t서울+에서\tADV\tNNP+JKB\t_\t0\troot\t_\t_
"""
TAGS = TaskSettings(kind="tags", text_column="0", label_column="-1", max_seqlen=32)


def test_conllu_file_is_read(tmp_path: Path) -> None:
    """Words and UPOS are the default columns; comments and non-word lines are ignored."""
    path = tmp_path / "en-ud-train.conllu"
    path.write_text(CONLLU)
    compressed_path = tmp_path / "en-ud-train.conllu.gz"
    compressed_path.write_bytes(gzip.compress(CONLLU.encode()))
    sentences, counts = read_examples(path, TAGS)
    compressed_sentences, _ = read_examples(compressed_path, TAGS)
    assert [sentence.tags for sentence in compressed_sentences] == [
        sentence.tags for sentence in sentences
    ]
    assert [sentence.text for sentence in sentences] == ["Do n't go", "#1", "서울에서"]
    tags = [sentence.tags for sentence in sentences]
    assert tags == [("AUX", "PART", "VERB"), ("SYM",), ("ADV",)]
    assert [sentence.document for sentence in sentences] == [1, 1, 2]
    assert list(map(get_line_number, sentences)) == ["5", "9", "13"]
    assert counts.as_dict() == {"num_read": 3, "num_used": 3, "num_truncated": 0, "skipped": {}}
    # Comments of any length precede the first word.
    path.write_text("# a comment\n" * 600 + CONLLU)
    assert [sentence.text for sentence in read_examples(path, TAGS)[0]] == [
        "Do n't go",
        "#1",
        "서울에서",
    ]
    path.write_text(CONLLU)
    named_columns = TAGS.model_copy(update={"text_column": "lemma", "label_column": "XPOS"})
    sentences, _ = read_examples(path, named_columns)
    assert (sentences[0].text, sentences[2].tags) == ("do not go", ("NNP+JKB",))
    with pytest.raises(SettingsError, match=r"no column 'pos' in CoNLL-U; expected .* upos, xpos"):
        read_examples(path, TAGS.model_copy(update={"label_column": "pos"}))
    path.write_text("1\tDo\tdo\n")
    with pytest.raises(TaskError, match=r"line 1: a line of 3 columns, but column 3 is expected"):
        read_examples(path, TAGS)


def test_numeric_tags_are_converted_to_text(tmp_path: Path) -> None:
    """Hugging Face datasets use integers as tags."""
    (tmp_path / "a.jsonl").write_text('{"tokens": ["a", "b"], "tags": [0, 12]}\n')
    [sentence], _ = read_examples(tmp_path / "a.jsonl", TAGS)
    assert sentence.tags == ("0", "12")


def test_klue_characters_are_read(tmp_path: Path) -> None:
    """KLUE's files have comments, tabs between columns, and spaces as units."""
    (tmp_path / "k.tsv").write_text("## c\n## x\t<서울:LC>\n서\tB-LC\n울\tI-LC\n \tO\n살\tO\n\n")
    [sentence], _ = read_examples(tmp_path / "k.tsv", CHARACTERS)
    assert (sentence.text, sentence.tags) == ("서울 살", ("B-LC", "I-LC", "O", "O"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "a O\nb\n\nc O\n",
         r"line 2: a line with a different number of columns: 1 .* line 1 has 2"),
        ("a.txt", "a O\n\nNew York B-X\n", r"line 3: .* 3 separated by spaces; .* 1 has 2"),
        ("a.txt", "a O\n\nb\tB-X I-X\n", r"line 3: .* 3 separated by spaces; .* 1 has 2"),
        ("a.txt", "a B-X\n\nc PER\n", r"line 3: a tag that is not an entity tag: 'PER'"),
        ("a.txt", "a B-X\n\nc O\nd B-Y\n",
         r"line 4: an unknown label: 'B-Y'; known labels are 'O', 'B-"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', r"line 1: 2 words but 1 tag"),
        ("a.jsonl", '{"tokens": ["a", " "], "tags": ["O", "O"]}', r"line 1: an empty word"),
        ("a.jsonl", '{"tokens": [], "tags": []}', r"line 1: a sentence without words"),
        ("a.jsonl", '{"tokens": "a", "tags": ["O"]}', r"no list where words or tags are"),
        ("a.jsonl", '{"tokens": ["a", null], "tags": ["O", "O"]}', r"not text in 'tokens': None"),
        ("a.jsonl", '{"tokens": [{"x": 1}], "tags": ["O"]}', r"not text in 'tokens': {'x': 1}"),
        ("a.jsonl", '{"tokens": [7], "tags": ["O"]}', r"not text in 'tokens': 7"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [null]}', r"line 1: .* not text in 'tags': None"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [true]}', r"not text in 'tags': True"),
        ("a.jsonl", '{"tokens": ["\\ud83d"], "tags": ["O"]}', r"line 1: a lone surrogate"),
        ("a.jsonl", '{"words": ["a"]}', r"no column 'tokens'; the columns are 'words'"),
    ],
)  # fmt: skip
def test_invalid_sentence_is_an_error_or_skipped(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """With skip_invalid, invalid sentences are skipped and counted; a wrong column is an error."""
    labels = ["O", "B-X", "I-X"]
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / name, TWO_COLUMNS, labels=labels)
    if "no column" in message:
        return
    valid_sentence = (
        '\n{"tokens": ["a"], "tags": ["O"]}\n' if name.endswith("jsonl") else "\n\na O\n"
    )
    (tmp_path / name).write_text(text + valid_sentence)
    task = TWO_COLUMNS.model_copy(update={"skip_invalid": True})
    sentences, counts = read_examples(tmp_path / name, task, labels=labels)
    assert sentences[-1].tags == ("O",)
    assert sum(counts.skipped.values()) == 1
    assert counts.num_read == counts.num_used + 1


@pytest.mark.parametrize("text", ["Paris\nParis\n", "a,B-X\nb,O\n"])
def test_single_column_cannot_hold_words_and_tags(tmp_path: Path, text: str) -> None:
    """Files with one column, such as CSV that is read as CoNLL, are rejected."""
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(TaskError, match=r"line 1: words and tags would both be column 0 of 1"):
        read_examples(tmp_path / "a.txt", TAGS)


@pytest.mark.parametrize("separator", ["\t", " "])
def test_klue_comments_are_ignored(tmp_path: Path, separator: str) -> None:
    """Lines that start with "##" are comments, unless they have the columns of the file."""
    lines = [
        "## word, tag:",
        "## s1\t<Oslo:LC> is",
        f"Oslo{separator}B-LC",
        f"##{separator}O",
        f"is{separator}O",
        "",
        "## s2\t<it> has",
        f"it{separator}O",
    ]
    (tmp_path / "a.tsv").write_text("\n".join([*lines, ""]))
    sentences, counts = read_examples(tmp_path / "a.tsv", TWO_COLUMNS)
    assert [sentence.text for sentence in sentences] == ["Oslo ## is", "it"]
    assert counts.num_read == 2


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (
            "#\thttp://a.de [2009]\n1\t#\tO\tO\n2\tOslo\tB-LC\tO\n\n#\tb\n1\tit\tO\tO\n",
            {"text_column": "1", "label_column": "2"},
        ),
        (
            "# id 0\tdomain=en\n# _ _ O\nOslo _ _ B-LC\n\n\n# id 1\tdomain=en\nit _ _ O\n",
            {"label_column": "-1"},
        ),
        ("# a sentence\n# O\nOslo B-LC\n\n# another one\nit O\n", {}),
    ],
    ids=["GermEval", "MultiCoNER", "other"],
)
def test_comments_before_sentences_are_ignored(
    tmp_path: Path, text: str, columns: dict[str, str]
) -> None:
    """A line that starts with "# " before a sentence is a comment, unless it has a word "#"."""
    (tmp_path / "a.conll").write_text(text)
    task = TWO_COLUMNS.model_copy(update=columns)
    first, second = read_examples(tmp_path / "a.conll", task)[0]
    assert (first.text, first.tags) == ("# Oslo", ("O", "B-LC"))
    assert (second.text, second.tags) == ("it", ("O",))


def test_a_damaged_line_in_a_sentence_is_not_a_comment(tmp_path: Path) -> None:
    """The word "#" is not dropped if its line has a wrong number of columns."""
    (tmp_path / "a.conll").write_text("Oslo B-LC\n# X O\n\nit O\n")
    with pytest.raises(TaskError, match=r"line 2: a line with a different number of columns"):
        read_examples(tmp_path / "a.conll", TWO_COLUMNS)


def test_damaged_first_line_does_not_determine_the_columns(tmp_path: Path) -> None:
    """Most lines determine the number of columns; a sentence with another line is invalid."""
    (tmp_path / "a.txt").write_text("damaged\n\na O\nb B-X\n\nc O\n")
    with pytest.raises(TaskError, match=r"line 1: .* number of columns: 1 .* line 3 has 2"):
        read_examples(tmp_path / "a.txt", TWO_COLUMNS)
    task = TWO_COLUMNS.model_copy(update={"skip_invalid": True})
    sentences, counts = read_examples(tmp_path / "a.txt", task)
    assert [sentence.text for sentence in sentences] == ["a b", "c"]
    assert sum(counts.skipped.values()) == 1


def test_error_for_characters_read_as_words_suggests_the_setting(tmp_path: Path) -> None:
    """A space is an empty word, but a valid character; the message names task.tag_level."""
    (tmp_path / "k.tsv").write_text("서\tB-LC\n \tO\n살\tO\n")
    with pytest.raises(TaskError, match=r"an empty word; if .* --set task\.tag_level=character"):
        read_examples(tmp_path / "k.tsv", TWO_COLUMNS)


def test_tags_without_type_are_labels(tmp_path: Path) -> None:
    """B and I alone are valid tags, and a missing I is added to the labels."""
    (tmp_path / "a.txt").write_text("a B\nb O\n\nc I\n")
    sentences, _ = read_examples(tmp_path / "a.txt", TWO_COLUMNS)
    assert [sentence.tags for sentence in sentences] == [("B", "O"), ("B",)]
    assert collect_labels(sentences, "f") == ("O", "B", "I")


def test_sentences_are_read_from_a_json_array(tmp_path: Path) -> None:
    """A .json file may hold an array of sentences."""
    (tmp_path / "a.json").write_text('[{"tokens": ["a", "b"], "tags": ["O", "B-X"]}]')
    [sentence], _ = read_examples(tmp_path / "a.json", ENTITIES)
    assert (sentence.text, sentence.tags) == ("a b", ("O", "B-X"))


def test_word_may_contain_a_non_breaking_space(tmp_path: Path) -> None:
    """Columns are separated by spaces and tabs only, and in files with tabs by tabs only."""
    (tmp_path / "a.txt").write_text("New\u00a0York   B-X \n is\tO\n")
    (tmp_path / "b.txt").write_text("New York\tB-X\nis\tO\n")
    for name, text in (("a.txt", "New\u00a0York is"), ("b.txt", "New York is")):
        [sentence], _ = read_examples(tmp_path / name, TWO_COLUMNS)
        assert (sentence.text, sentence.tags) == (text, ("B-X", "O"))


def test_conll_column_names_are_rejected(tmp_path: Path) -> None:
    """CoNLL columns are selected by number; a name is an error."""
    (tmp_path / "a.txt").write_text("a O x\n")
    for name in ("text_column", "label_column"):
        task = ENTITIES.model_copy(update={name: "word"})
        with pytest.raises(SettingsError, match=rf"a\.txt: task\.{name} is 'word'"):
            read_examples(tmp_path / "a.txt", task)


def test_integer_column_is_converted_to_text(tmp_path: Path) -> None:
    """``--set task.label_column=1`` selects the column "1"; values of other types are errors."""
    values = load_user_settings(None, None, ["task.label_column=1", "task.text_column=0"])["task"]
    task = TaskSettings.parse({"kind": "tags", **values}, "the test")
    assert (task.text_column, task.label_column) == ("0", "1")
    (tmp_path / "a.txt").write_text("a X O\n")
    [sentence], _ = read_examples(tmp_path / "a.txt", task)
    assert sentence.tags == ("X",)
    with pytest.raises(SettingsError, match="label_column: Input should be a valid string"):
        TaskSettings.parse({"label_column": 1.5}, "the test")


def test_consecutive_rows_of_a_document_are_grouped(tmp_path: Path) -> None:
    """Rows with the same value in the column "document" are grouped; document context needs it."""
    sentence = {"tokens": ["a"], "tags": ["O"]}
    rows = [
        {**sentence, "document": "x"},
        {**sentence, "document": "x"},
        {**sentence, "document": "y"},
        sentence,
        sentence,
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentences, _ = read_examples(tmp_path / "a.jsonl", ENTITIES)
    assert [sentence.document for sentence in sentences] == [0, 0, 1, 2, 3]
    task = ENTITIES.model_copy(update={"context": "document"})
    with pytest.raises(TaskError, match="line 4: no column 'document', needed for"):
        read_examples(tmp_path / "a.jsonl", task)


def test_conll_2003_is_read_completely(labeled_data: Path) -> None:
    """The numbers of sentences and entities equal those of Tjong Kim Sang and De Meulder 2003."""
    values = PUBLIC_TASKS["conll2003"].resolve_settings(labeled_data / "conll2003")
    task = TaskSettings.parse({"name": "conll2003", **values}, "the task")
    files = {"train": task.train_file, **task.validation_files}
    for name, num_sentences, num_entities in (
        ("train", 14041, 23499),
        ("dev", 3250, 5942),
        ("test", 3453, 5648),
    ):
        sentences, counts = read_examples(Path(files[name]), task)
        assert counts.num_used == counts.num_read == num_sentences
        begin_tags = [
            tag for sentence in sentences for tag in sentence.tags or () if tag.startswith("B-")
        ]
        assert len(begin_tags) == num_entities
