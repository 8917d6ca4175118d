"""Names in words for the labels of public data sets."""

import pytest

from bertsmith.tasks.label_names import get_label_names, get_training_file


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/data/glue/SST-2/train.tsv", ("negative", "positive")),
        ("C:\\glue\\CoLA\\train.tsv", ("unacceptable", "acceptable")),
        ("nsmc/train.txt.gz", ("negative", "positive")),
        ("/home/sst2/mrpc/train.tsv", ("different meaning", "same meaning")),
        ("QQP/train.tsv", ("different questions", "same question")),
        ("wnli.tsv", ("does not follow", "follows")),
        ("data/sst-2.csv.gz", ("negative", "positive")),
    ],
)
def test_data_set_in_the_path_names_the_labels(path: str, names: tuple[str, str]) -> None:
    """The last part of the path with the name of a data set decides."""
    assert get_label_names("single", ("0", "1"), path) == {"0": names[0], "1": names[1]}


def test_unknown_labels_have_no_names() -> None:
    """Labels of other data, and labels that are words, keep their text."""
    assert get_label_names("single", ("0", "1"), "/data/reviews.csv") == {}
    assert get_label_names("single", ("0", "1"), "/data/colander/train.csv") == {}
    assert get_label_names("single", ("0", "1"), "classify/coca-cola-reviews.csv") == {}
    assert get_label_names("single", ("0", "1"), "/coca cola/train.csv") == {}
    assert get_label_names("single", ("0", "1"), None) == {}
    assert get_label_names("single", ("0", "1", "2"), "SST-2/train.tsv") == {}
    assert get_label_names("single", ("bad", "X"), None) == {}
    assert get_label_names("regression", (), "STS-B/train.tsv") == {}


def test_underscores_become_spaces() -> None:
    """The labels of RTE and QNLI are shown as words."""
    names = get_label_names("single", ("entailment", "not_entailment"), None)
    assert names == {"not_entailment": "not entailment"}


def test_entity_types_and_parts_of_speech_have_names() -> None:
    """The types of CoNLL-2003 and KLUE-NER, and the tags of Universal Dependencies."""
    labels = ("O", "B-PER", "I-PER", "B-LOC", "B-FOOD")
    assert get_label_names("entities", labels, None) == {"LOC": "place", "PER": "person"}
    assert get_label_names("entities", ("O", "B-PS", "B-QT"), None)["PS"] == "person"
    assert get_label_names("tags", ("NOUN", "X"), None) == {"NOUN": "noun", "X": "other"}
    assert get_label_names("tags", ("NOUN", "OTHER"), None) == {}


def test_training_file_is_read_from_the_provenance() -> None:
    """A model without provenance has none; the name of the task tells the data set."""
    info = {"provenance": {"task": {"name": "sst-2", "train_file": "train.tsv"}}}
    assert get_training_file(info) == "sst-2/train.tsv"
    names = get_label_names("single", ("0", "1"), get_training_file(info))
    assert names == {"0": "negative", "1": "positive"}
    assert get_training_file({}) is None
    assert get_training_file({"provenance": {}}) is None
    assert get_training_file({"provenance": {"task": {"train_file": None}}}) is None
