"""Entities as runs of tags, and how well two taggings agree on them.

It never knows a model. The rules are those of the CoNLL-2000 shared task's evaluation (Tjong Kim
Sang and Buchholz 2000), which also read the schemes with an end (E) and a single (S) tag.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.metrics import scores_from_counts

OUTSIDE_TAG = "O"
#: The type of bare prefixes, B and I alone, as seqeval names it.
UNNAMED = "_"
#: The prefixes of all schemes in those of IOBES; L and U are names for E and S in BILOU.
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}


@dataclass(frozen=True, order=True)
class Entity:
    """The units [start, end) of a sentence, and what they name."""

    start: int
    end: int
    label: str


def _parts(tag: str) -> tuple[str, str | None]:
    """Return prefix and type of a tag; BadExampleError if it is none.

    The type is None outside, and ``UNNAMED`` of a bare prefix.
    """
    if tag == OUTSIDE_TAG:
        return OUTSIDE_TAG, None
    prefix, dash, name = tag.partition("-")
    if bool(dash) != bool(name) or prefix not in _PREFIXES:
        raise BadExampleError(
            "a tag that is no entity's",
            f": {tag!r}; expected O, B-…, I-…, or O, B, I; for plain tags --kind tags",
        )
    return _PREFIXES[prefix], name or UNNAMED


def find_invalid_tags(labels: Sequence[str]) -> list[str]:
    """Return those labels that are no entity's tags."""
    found = []
    for label in labels:
        try:
            _parts(label)
        except BadExampleError:
            found.append(label)
    return found


def extract_entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a sentence's tags, in any of the schemes IOB1, BIO2, IOBES, BILOU.

    Where tags break their scheme, an entity begins wherever the one before cannot go on.
    """
    start, before = 0, OUTSIDE_TAG
    open_name: str | None = None
    for place, tag in enumerate([*tags, OUTSIDE_TAG]):
        prefix, name = _parts(tag)
        goes_on = open_name == name and prefix in "IE" and before in "BI"
        if open_name is not None and not goes_on:
            yield Entity(start, place, open_name)
        if name is not None and not goes_on:
            start = place
        open_name, before = name, prefix


def to_bio2(tags: Sequence[str]) -> list[str]:
    """Return the same entities in BIO2: B- where one begins, I- inside. Reads any scheme."""
    result = [OUTSIDE_TAG] * len(tags)
    for found in extract_entities(tags):
        result[found.start] = _joined("B", found.label)
        inside = [_joined("I", found.label)] * (found.end - found.start - 1)
        result[found.start + 1 : found.end] = inside
    return result


def to_inside_tag(tag: str) -> str:
    """Return the tag with which an entity goes on; a tag that is no entity's stays as it is."""
    return f"I{tag[1:]}" if tag[:2] in ("B-", "I-") or tag in ("B", "I") else tag


def _joined(prefix: str, name: str) -> str:
    return prefix if name == UNNAMED else f"{prefix}-{name}"


def compute_entity_scores(
    predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return precision, recall and F1 over the entities of all sentences, and the macro F1.

    An entity counts as found if its borders and its type are right. The macro F1 is the mean over
    the types that occur on either side. Nothing found, or nothing to find, scores 0.
    """
    correct, found, true = _count_entities(predicted, right)
    overall = scores_from_counts(correct.total(), found.total(), true.total())
    by_type = [scores["f1"] for scores in compute_type_scores(predicted, right).values()]
    return {
        **{name: overall[name] for name in ("f1", "precision", "recall")},
        "macro_f1": sum(by_type) / len(by_type) if by_type else 0.0,
    }


def compute_type_scores(
    predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support of each entity type that occurs on either side."""
    correct, found, true = _count_entities(predicted, right)
    return {
        name: scores_from_counts(correct[name], found[name], true[name])
        for name in sorted(found.keys() | true.keys())
    }


def _count_entities(
    predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count by type the entities on both sides, those predicted, and those that are right."""
    correct: Counter[str] = Counter()
    found: Counter[str] = Counter()
    true: Counter[str] = Counter()
    for predicted_tags, right_tags in zip(predicted, right, strict=True):
        left, other = set(extract_entities(predicted_tags)), set(extract_entities(right_tags))
        found.update(entity.label for entity in left)
        true.update(entity.label for entity in other)
        correct.update(entity.label for entity in left & other)
    return correct, found, true
