"""Names in words for the labels of public data sets, such as "positive" for the 1 of SST-2."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bertsmith.bundle.metadata import get_recorded_task

#: Names of the labels "0" and "1", by the name of the data set in the path of the training file.
_BINARY_NAMES: Final = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("different meaning", "same meaning"),
    "qqp": ("different questions", "same question"),
    "wnli": ("does not follow", "follows"),
    "nsmc": ("negative", "positive"),
}
#: Names of entity types: CoNLL-2003, KLUE-NER and OntoNotes.
_ENTITY_NAMES: Final = {
    "PER": "person", "PERSON": "person", "PS": "person",
    "LOC": "place", "LC": "place", "GPE": "place",
    "ORG": "organization", "OG": "organization", "NORP": "group",
    "MISC": "other name", "DT": "date", "DATE": "date", "TI": "time", "TIME": "time",
    "QT": "quantity", "QUANTITY": "quantity",
}  # fmt: skip
#: Names of parts of speech: Universal Dependencies.
_PART_OF_SPEECH_NAMES: Final = {
    "ADJ": "adjective", "ADP": "adposition", "ADV": "adverb", "AUX": "auxiliary",
    "CCONJ": "coordinating conjunction", "DET": "determiner", "INTJ": "interjection",
    "NOUN": "noun", "NUM": "number", "PART": "particle", "PRON": "pronoun",
    "PROPN": "proper noun", "PUNCT": "punctuation", "SCONJ": "subordinating conjunction",
    "SYM": "symbol", "VERB": "verb", "X": "other",
}  # fmt: skip


def get_label_names(kind: str, labels: Sequence[str], training_file: str | None) -> dict[str, str]:
    """Return the names of the labels, or entity types, whose meaning is known.

    Args:
        kind: the kind of the model's head, such as "single" or "entities".
        labels: the labels of the model. The prefixes "B-" and "I-" of entity types are removed.
        training_file: path of the training data, whose folder or file often has the name of the
            data set; None if it is unknown.
    """
    if set(labels) == {"0", "1"}:
        names = _find_binary_names(training_file or "")
        return dict(zip(("0", "1"), names, strict=True)) if names else {}
    if kind == "entities":
        types = {label[2:] for label in labels if label[:2] in ("B-", "I-")}
        return {label: _ENTITY_NAMES[label] for label in sorted(types & _ENTITY_NAMES.keys())}
    # Tags of another set can equal one of these by chance.
    if kind == "tags" and set(labels) <= _PART_OF_SPEECH_NAMES.keys():
        return {label: _PART_OF_SPEECH_NAMES[label] for label in labels}
    return {label: label.replace("_", " ") for label in labels if "_" in label.strip("_")}


def get_training_file(info: Mapping[str, Any]) -> str | None:
    """Return the training file that a model's bertsmith.json names, in a folder named as its task.

    None if it names no file. The folder tells the data set of a public task.
    """
    task = get_recorded_task(info)
    path = task.get("train_file")
    return f"{task.get('name', '')}/{path}" if isinstance(path, str) else None


def _find_binary_names(path: str) -> tuple[str, str] | None:
    """Return the names of the labels of the data set that a path names; None if it names none.

    The last folder, or the file without its suffixes, that equals the name of a data set decides. A
    name inside of a longer one, such as coca-cola-reviews.csv, does not count.
    """
    *folders, file = re.split(r"[/\\]", path.lower())
    for part in (file.partition(".")[0], *reversed(folders)):
        name = "sst2" if part in ("sst-2", "sst_2") else part
        if name in _BINARY_NAMES:
            return _BINARY_NAMES[name]
    return None
