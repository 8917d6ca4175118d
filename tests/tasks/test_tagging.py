"""Tagged sentences: reading, the pieces that are asked about, windows, and tags back again."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from bertsmith.bundle import HeadConfig
from bertsmith.errors import SettingsError, TaskError
from bertsmith.settings import user_settings
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tagging import (
    collect_labels,
    compute_class_report,
    compute_metrics,
    encode_examples,
    read_examples,
    to_unit_tags,
)
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import SPECIAL_TOKENS, Tokenizer

CONLL = """-DOCSTART- -X- O O

EU NNP B-NP I-ORG
rejects VBZ B-VP O

Peter NNP B-NP I-PER
Blackburn NNP I-NP I-PER
\u200b X O O

-DOCSTART- -X- O O

Oslo NNP B-NP B-LOC
"""
ENTITIES = TaskSettings(kind="entities", text="0", label="3", length=32, metrics=["f1", "accuracy"])
CHARACTERS = ENTITIES.model_copy(update={"unit": "character", "label": "1"})


@pytest.fixture
def words() -> Tokenizer:
    """Some words and endings, lower case, and Korean syllables."""
    vocab = (
        "eu",
        "rejects",
        "peter",
        "black",
        "##burn",
        "oslo",
        "서울",
        "##에서",
        "살",
        ".",
        "##s",
    )
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *vocab)))


def test_conll_is_read(tmp_path: Path) -> None:
    """Sentences, documents, places, IOB1 as BIO2; another column without entities."""
    (tmp_path / "a.txt").write_text(CONLL)
    found, counts = read_examples(tmp_path / "a.txt", ENTITIES)
    assert [one.text for one in found] == ["EU rejects", "Peter Blackburn \u200b", "Oslo"]
    assert [one.tags for one in found] == [("B-ORG", "O"), ("B-PER", "I-PER", "O"), ("B-LOC",)]
    assert [one.document for one in found] == [1, 1, 2]
    assert found[1].units == ((0, 5), (6, 15), (16, 17))
    assert found[1].location.endswith("a.txt, line 6")
    assert counts.as_dict() == {"read": 3, "used": 3, "cut_off": 0, "skipped": {}}
    plain, _ = read_examples(
        tmp_path / "a.txt", ENTITIES.model_copy(update={"kind": "tags", "label": "1"})
    )
    assert plain[0].tags == ("NNP", "VBZ")
    assert collect_labels(found, "f") == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER")


def test_a_new_document_ends_the_sentence_before_it(tmp_path: Path) -> None:
    """Also where no blank line stands before its mark: no sentence reaches over documents."""
    (tmp_path / "a.txt").write_text("-DOCSTART- O\na O\nb O\n-DOCSTART- O\nc O\n\nd O\n")
    found, _ = read_examples(tmp_path / "a.txt", ENTITIES.model_copy(update={"label": "1"}))
    assert [(one.text, one.document) for one in found] == [("a b", 1), ("c", 2), ("d", 2)]
    assert [one.location.rsplit(" ", 1)[1] for one in found] == ["2", "5", "7"]


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
PLAIN = TaskSettings(kind="tags", text="0", label="-1", length=32)


def test_conllu_is_read(tmp_path: Path) -> None:
    """Words and their universal tags, or others by name: no comment, no pair, nothing left out."""
    path = tmp_path / "en-ud-train.conllu"
    path.write_text(CONLLU)
    found, counts = read_examples(path, PLAIN)
    assert [one.text for one in found] == ["Do n't go", "#1", "서울에서"]
    assert [one.tags for one in found] == [("AUX", "PART", "VERB"), ("SYM",), ("ADV",)]
    assert [one.document for one in found] == [1, 1, 2]
    assert [one.location.rsplit(" ", 1)[1] for one in found] == ["5", "9", "13"]
    assert counts.as_dict() == {"read": 3, "used": 3, "cut_off": 0, "skipped": {}}
    other, _ = read_examples(path, PLAIN.model_copy(update={"text": "lemma", "label": "XPOS"}))
    assert (other[0].text, other[2].tags) == ("do not go", ("NNP+JKB",))
    with pytest.raises(SettingsError, match=r"no column 'pos' in CoNLL-U; expected .* upos, xpos"):
        read_examples(path, PLAIN.model_copy(update={"label": "pos"}))
    path.write_text("1\tDo\tdo\n")
    with pytest.raises(TaskError, match=r"line 1: a line of 3 columns where column 3 is expected"):
        read_examples(path, PLAIN)


def test_tags_may_be_numbers(tmp_path: Path) -> None:
    """As in Hugging Face's data sets; each is named as it is written."""
    (tmp_path / "a.jsonl").write_text('{"tokens": ["a", "b"], "tags": [0, 12]}\n')
    [found], _ = read_examples(
        tmp_path / "a.jsonl", TaskSettings(kind="tags", text="0", label="-1")
    )
    assert found.tags == ("0", "12")


def test_characters_are_read(tmp_path: Path) -> None:
    """KLUE's form: comments, a tab between columns, blanks that are characters."""
    (tmp_path / "k.tsv").write_text("## c\n## x\t<서울:LC>\n서\tB-LC\n울\tI-LC\n \tO\n살\tO\n\n")
    [found], _ = read_examples(tmp_path / "k.tsv", CHARACTERS)
    assert (found.text, found.tags) == ("서울 살", ("B-LC", "I-LC", "O", "O"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "a O\nb\n\nc O\n", r"line 2: a line of other columns: 1 .* line 1 has 2"),
        ("a.txt", "a O\n\nNew York B-X\n", r"line 3: .* 3 parted by blanks where .* 1 has 2"),
        ("a.txt", "a O\n\nb\tB-X I-X\n", r"line 3: .* 3 parted by blanks where .* 1 has 2"),
        ("a.txt", "a B-X\n\nc PER\n", r"line 3: a tag that is no entity's: 'PER'"),
        ("a.txt", "a B-X\n\nc O\nd B-Y\n", r"line 4: an unknown label: 'B-Y'; known are 'O', 'B-"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}', r"line 1: 2 words but 1 tags"),
        ("a.jsonl", '{"tokens": ["a", " "], "tags": ["O", "O"]}', r"line 1: an empty word"),
        ("a.jsonl", '{"tokens": [], "tags": []}', r"line 1: a sentence without words"),
        ("a.jsonl", '{"tokens": "a", "tags": ["O"]}', r"no list where words or tags are"),
        ("a.jsonl", '{"tokens": ["a", null], "tags": ["O", "O"]}', r"no text in 'tokens': None"),
        ("a.jsonl", '{"tokens": [{"x": 1}], "tags": ["O"]}', r"no text in 'tokens': {'x': 1}"),
        ("a.jsonl", '{"tokens": [7], "tags": ["O"]}', r"no text in 'tokens': 7"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [null]}', r"line 1: .* no text in 'tags': None"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [true]}', r"no text in 'tags': True"),
        ("a.jsonl", '{"tokens": ["\\ud83d"], "tags": ["O"]}', r"line 1: half a character"),
        ("a.jsonl", '{"words": ["a"]}', r"no column 'tokens'; the columns are 'words'"),
    ],
)
def test_bad_sentences_are_told_or_counted(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """File, line and fault; with skip_bad all but the wrong column is a counted skip."""
    task = ENTITIES.model_copy(update={"label": "1"})
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / name, task, labels=["O", "B-X", "I-X"])
    if "no column" in message:
        return
    good = '\n{"tokens": ["a"], "tags": ["O"]}\n' if name.endswith("jsonl") else "\n\na O\n"
    (tmp_path / name).write_text(text + good)
    task = task.model_copy(update={"skip_bad": True})
    found, counts = read_examples(tmp_path / name, task, labels=["O", "B-X", "I-X"])
    assert found[-1].tags == ("O",)
    assert sum(counts.skipped.values()) == 1
    assert counts.num_read == counts.num_used + 1


@pytest.mark.parametrize("text", ["Paris\nParis\n", "a,B-X\nb,O\n"])
def test_a_word_is_not_its_own_tag(tmp_path: Path, text: str) -> None:
    """Where lines have one column, as those of CSV, the last one is the first, too."""
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(TaskError, match=r"line 1: words and tags would both be column 0 of 1"):
        read_examples(
            tmp_path / "a.txt", ENTITIES.model_copy(update={"kind": "tags", "label": "-1"})
        )


@pytest.mark.parametrize("separator", ["\t", " "])
def test_comments_of_klue_are_passed_over(tmp_path: Path, separator: str) -> None:
    """Also in files of words, where "##" may be a word of its own."""
    units = ["Oslo B-LC", "## O", "is O", "", "## s2\t<it> has", "it O"]
    units = [one if "s2" in one else one.replace(" ", separator) for one in units]
    (tmp_path / "a.tsv").write_text("\n".join(["## word, tag:", "## s1\t<Oslo:LC> is", *units, ""]))
    found, counts = read_examples(tmp_path / "a.tsv", ENTITIES.model_copy(update={"label": "1"}))
    assert [one.text for one in found] == ["Oslo ## is", "it"]
    assert counts.num_read == 2


def test_a_damaged_first_line_of_conll_does_not_decide_the_columns(tmp_path: Path) -> None:
    """The commonest form does, and the sentence of the damaged line is a bad one."""
    (tmp_path / "a.txt").write_text("damaged\n\na O\nb B-X\n\nc O\n")
    task = ENTITIES.model_copy(update={"label": "1"})
    with pytest.raises(TaskError, match=r"line 1: a line of other columns: 1 .* line 3 has 2"):
        read_examples(tmp_path / "a.txt", task)
    found, counts = read_examples(tmp_path / "a.txt", task.model_copy(update={"skip_bad": True}))
    assert [one.text for one in found] == ["a b", "c"]
    assert sum(counts.skipped.values()) == 1


def test_characters_read_as_words_get_advice(tmp_path: Path) -> None:
    """A blank that is a character is an empty word; the message names the setting."""
    (tmp_path / "k.tsv").write_text("서\tB-LC\n \tO\n살\tO\n")
    with pytest.raises(TaskError, match=r"an empty word; if .* --set task\.unit=character"):
        read_examples(tmp_path / "k.tsv", ENTITIES.model_copy(update={"label": "1"}))


def test_bare_tags_are_labels(tmp_path: Path) -> None:
    """B and I without a type; an unseen I is added, as for types."""
    (tmp_path / "a.txt").write_text("a B\nb O\n\nc I\n")
    found, _ = read_examples(tmp_path / "a.txt", ENTITIES.model_copy(update={"label": "1"}))
    assert [one.tags for one in found] == [("B", "O"), ("B",)]
    assert collect_labels(found, "f") == ("O", "B", "I")


def test_sentences_come_as_a_json_array(tmp_path: Path) -> None:
    """As well as JSON lines, packed or not."""
    (tmp_path / "a.json").write_text('[{"tokens": ["a", "b"], "tags": ["O", "B-X"]}]')
    [found], _ = read_examples(tmp_path / "a.json", ENTITIES)
    assert (found.text, found.tags) == ("a b", ("O", "B-X"))


def test_a_word_may_hold_a_blank_that_does_not_break(tmp_path: Path) -> None:
    """Only blanks and tabs part columns, and in a file with tabs only these."""
    (tmp_path / "a.txt").write_text("New\u00a0York   B-X \n is\tO\n")
    (tmp_path / "b.txt").write_text("New York\tB-X\nis\tO\n")
    for name, text in (("a.txt", "New\u00a0York is"), ("b.txt", "New York is")):
        [found], _ = read_examples(tmp_path / name, ENTITIES.model_copy(update={"label": "1"}))
        assert (found.text, found.tags) == (text, ("B-X", "O"))


def test_columns_of_conll_have_no_names(tmp_path: Path) -> None:
    """A name is an error, and no silent guess at the first and last column."""
    (tmp_path / "a.txt").write_text("a O x\n")
    for name in ("text", "label"):
        task = ENTITIES.model_copy(update={name: "word"})
        with pytest.raises(SettingsError, match=rf"a\.txt: the {name} is said .* 'word'"):
            read_examples(tmp_path / "a.txt", task)


def test_a_column_may_be_said_as_a_number(tmp_path: Path) -> None:
    """``--set task.label=2`` means the column "2"; another kind of value is still an error."""
    said = user_settings(None, None, ["task.label=1", "task.text=0"])["task"]
    task = TaskSettings.parse({"kind": "tags", **said}, "the test")
    assert (task.text, task.label) == ("0", "1")
    (tmp_path / "a.txt").write_text("a X O\n")
    [found], _ = read_examples(tmp_path / "a.txt", task)
    assert found.tags == ("X",)
    with pytest.raises(SettingsError, match="label: Input should be a valid string"):
        TaskSettings.parse({"label": 1.5}, "the test")


def test_rows_of_a_document_belong_together(tmp_path: Path) -> None:
    """JSON lines say it in a field; with document context a row without it is a bad one."""
    rows = [{"tokens": ["a"], "tags": ["O"], **({"document": name} if name else {})}
            for name in ("x", "x", "y", "", "")]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone, _ = read_examples(tmp_path / "a.jsonl", ENTITIES)
    assert [one.document for one in alone] == [0, 0, 1, 2, 3]
    task = ENTITIES.model_copy(update={"context": "document"})
    with pytest.raises(TaskError, match="line 4: no column 'document' to tell which rows"):
        read_examples(tmp_path / "a.jsonl", task)


def sentence(text: str, tags: str, document: int = 0) -> TaggedSentence:
    """Return a sentence of words parted by blanks."""
    units, start = [], 0
    for word in text.split(" "):
        units.append((start, start + len(word)))
        start += len(word) + 1
    return TaggedSentence(text, tuple(units), tuple(tags.split()), document, "f, line 1")


HEAD = HeadConfig("entities", ("O", "B-PER", "I-PER", "B-ORG", "I-ORG"))


def test_the_first_piece_of_each_word_is_asked_about(words: Tokenizer) -> None:
    """[CLS] and [SEP] around, places of first pieces; a word without pieces has none."""
    examples = [sentence("Peter Blackburn \u200b rejects EU", "B-PER I-PER O O B-ORG")]
    found = encode_examples(examples, words, HEAD, ENTITIES, ExampleCounts())
    [[(ids, segments)]] = found.sequences
    assert words.ids_to_tokens(ids) == [
        "[CLS]",
        "peter",
        "black",
        "##burn",
        "rejects",
        "eu",
        "[SEP]",
    ]
    assert set(segments) == {0}
    assert found.token_indices == [[1, 2, 4, 5]]
    assert found.targets is not None
    assert found.targets[0].tolist() == [1, 2, 0, 3]


def answer(found: ModelInputs, head: HeadConfig) -> list[np.ndarray]:
    """Return outputs that say what is right at every place."""
    assert found.targets is not None
    return [np.eye(head.num_outputs, dtype=np.float32)[own] for own in found.targets]


@pytest.mark.parametrize("context", ["sentence", "document"])
@pytest.mark.parametrize("length", [8, 11, 64])
def test_right_outputs_score_one_unless_cut(words: Tokenizer, context: str, length: int) -> None:
    """With the document nothing is cut, whatever the length; alone, what is cut costs recall."""
    chance = np.random.default_rng(3)
    pairs = [("peter blackburn", "B-PER I-PER"), ("eu", "B-ORG"), ("rejects", "O"), ("oslo", "O")]
    examples = []
    for number in range(40):
        picked = [pairs[one] for one in chance.integers(0, 4, chance.integers(1, 9))]
        text, tags = (" ".join(part) for part in zip(*picked, strict=True))
        examples.append(sentence(text, tags, number // 7))
    task = ENTITIES.model_copy(update={"context": context, "length": length})
    counts = ExampleCounts()
    found = encode_examples(examples, words, HEAD, task, counts)
    assert max(len(ids) for [(ids, _)] in found.sequences) <= length
    scores = compute_metrics(answer(found, HEAD), found, examples, HEAD, task)
    if context == "document" or length == 64:
        assert scores == {"f1": 1.0, "accuracy": 1.0}
        assert counts.num_truncated == 0
    else:
        assert counts.num_truncated > 0
        assert scores["f1"] < 1.0


def test_a_window_has_its_document_around_it(words: Tokenizer) -> None:
    """Every input is as full as its document allows, and never holds another document's pieces."""
    examples = [sentence("eu", "B-ORG", 0) for _ in range(30)]
    examples += [sentence("oslo", "O", 1) for _ in range(3)]
    task = ENTITIES.model_copy(update={"context": "document", "length": 12})
    found = encode_examples(examples, words, HEAD, task, ExampleCounts())
    texts = [words.ids_to_tokens(ids)[1:-1] for [(ids, _)] in found.sequences]
    assert [len(text) for text in texts] == [10] * 6 + [3]
    assert all(len(set(text)) == 1 for text in texts)
    assert found.token_indices is not None
    # In the middle of a document what is asked stands in the middle of its input.
    assert found.token_indices[2] == [3, 4, 5, 6, 7]
    assert sum(map(len, found.token_indices)) == 33


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_a_document_without_pieces_is_outside(words: Tokenizer, context: str) -> None:
    """It has an input of nothing, where nothing is asked, and its tags count in the score."""
    task = ENTITIES.model_copy(update={"context": context})
    examples = [sentence("\u200b \u200b", "O B-PER", 1)]
    found = encode_examples(examples, words, HEAD, task, ExampleCounts())
    assert [words.ids_to_tokens(ids) for [(ids, _)] in found.sequences] == [["[CLS]", "[SEP]"]]
    assert found.token_indices == [[]]
    rows = [np.empty((0, HEAD.num_outputs), np.float32)]
    assert compute_metrics(rows, found, examples, HEAD, task) == {"f1": 0.0, "accuracy": 0.5}


def test_long_documents_take_linear_time(words: Tokenizer) -> None:
    """16 times the words take less than 60 times the CPU time; quadratic code would take 256.

    CPU time, since other processes on the machine do not change it.
    """
    task = ENTITIES.model_copy(update={"context": "document", "length": 16})
    split_task = ENTITIES.model_copy(update={"length": 16})

    def cpu_seconds(num_words: int) -> float:
        document = sentence(" ".join(["peter"] * num_words), " ".join(["O"] * num_words))
        durations = []
        for _ in range(3):
            start = time.process_time()
            encode_examples([document], words, HEAD, task, ExampleCounts())
            windows = encode_examples([document], words, HEAD, split_task, ExampleCounts())
            list(
                to_unit_tags(
                    [document], windows.family_data, ["O"] * len(windows.family_data[0].asked)
                )
            )
            durations.append(time.process_time() - start)
        return min(durations)

    assert cpu_seconds(16_000) < 60 * cpu_seconds(1000)


def test_report_of_tags_and_entities(words: Tokenizer) -> None:
    """Entities are scored by type, plain tags by tag with confusions."""
    example = sentence("Peter rejects Oslo", "B-PER O B-LOC")
    head = HeadConfig("tags", ("O", "B-PER", "B-LOC"))
    found = encode_examples([example], words, head, ENTITIES, ExampleCounts())
    rows = [np.eye(3, dtype=np.float32)[[1, 0, 1]]]
    tags = compute_class_report(rows, found, [example], head)
    assert tags["confusion"] == {"O": {"O": 1}, "B-PER": {"B-PER": 1}, "B-LOC": {"B-PER": 1}}
    entities = compute_class_report(rows, found, [example], HeadConfig("entities", head.labels))
    assert {name: own["recall"] for name, own in entities["classes"].items()} == {
        "LOC": 0.0,
        "PER": 1.0,
    }
    assert "confusion" not in entities


@pytest.mark.filterwarnings("ignore")
def test_character_scores_are_those_of_klue(words: Tokenizer) -> None:
    """The macro F1 of all tags with zero_division=1, and the scores of one type of entities."""
    from sklearn.metrics import f1_score

    labels = ("O", "B-LC", "I-LC", "B-PS", "I-PS")
    head = HeadConfig("entities", labels)
    units = tuple((place, place + 1) for place in range(6))
    tags = ("B-LC", "I-LC", "O", "O", "O", "B-LC")
    example = TaggedSentence("서울에서 살", units, tags, 0, "f")
    names = ["char_macro_f1", "recall:LC", "f1:PS"]
    task = CHARACTERS.model_copy(update={"metrics": names})
    found = encode_examples([example], words, head, task, ExampleCounts())
    chance = np.random.default_rng(0)
    for _ in range(20):
        rows = [
            chance.random((len(places), 5)).astype(np.float32)
            for places in found.token_indices or ()
        ]
        chosen = [labels[place] for place in np.concatenate(rows).argmax(-1)]
        (predicted,) = to_unit_tags([example], found.family_data, chosen)
        scores = compute_metrics(rows, found, [example], head, task)
        expected = f1_score(tags, predicted, labels=labels, average="macro", zero_division=1)
        assert scores["char_macro_f1"] == pytest.approx(float(expected))
        assert (
            scores["recall:LC"]
            == compute_class_report(rows, found, [example], head)["classes"]["LC"]["recall"]
        )
        assert list(scores) == names


def test_characters_of_one_piece_share_an_entity(words: Tokenizer) -> None:
    """The first character's tag is asked for; the others, and blanks inside, go on with it."""
    text = "서울에서 살."
    tags = ("B-LC", "I-LC", "I-LC", "I-LC", "I-LC", "I-LC", "O")
    example = TaggedSentence(text, tuple((i, i + 1) for i in range(len(text))), tags, 0, "f")
    head = HeadConfig("entities", ("O", "B-LC", "I-LC"))
    found = encode_examples([example], words, head, CHARACTERS, ExampleCounts())
    assert found.targets is not None
    assert found.targets[0].tolist() == [1, 2, 2, 0]
    assert (
        compute_metrics(answer(found, head), found, [example], head, CHARACTERS)["accuracy"] == 1.0
    )
    # If the word after the blank is outside, so is the blank.
    rows = [np.eye(3, dtype=np.float32)[[1, 2, 0, 0]]]
    assert compute_metrics(rows, found, [example], head, CHARACTERS)["accuracy"] == pytest.approx(
        5 / 7
    )


def test_one_tag_alone_is_an_error() -> None:
    """Nothing could be learnt."""
    with pytest.raises(TaskError, match="every tag is 'O'"):
        collect_labels([sentence("eu", "O")], "f")


def test_conll_2003_is_read_whole(labelled: Path) -> None:
    """Every sentence and entity of the published counts (Tjong Kim Sang and De Meulder 2003)."""
    facts = PUBLIC_TASKS["conll2003"].resolve_settings(labelled / "conll2003")
    task = TaskSettings.parse({"name": "conll2003", **facts}, "the task")
    files = {"train": task.train, **task.heldout}
    for name, many, entities in (
        ("train", 14041, 23499),
        ("dev", 3250, 5942),
        ("test", 3453, 5648),
    ):
        found, counts = read_examples(Path(files[name]), task)
        assert counts.num_used == counts.num_read == many
        begins = sum(tag.startswith("B-") for one in found for tag in one.tags or ())
        assert begins == entities
