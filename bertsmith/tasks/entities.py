"""Entities as runs of tags, and how well two taggings agree on them.

It never knows a model. The rules are those of the CoNLL-2000 shared task's evaluation (Tjong Kim
Sang and Buchholz 2000), which also read the schemes with an end (E) and a single (S) tag.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bertsmith.tasks.inputs import BadExampleError

OUTSIDE = "O"
#: The prefixes of all schemes in those of IOBES; L and U are names for E and S in BILOU.
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}


@dataclass(frozen=True, order=True)
class Entity:
    """The units [start, end) of a sentence, and what they name."""

    start: int
    end: int
    label: str


def _parts(tag: str) -> tuple[str, str]:
    """Return prefix and type of a tag; BadExampleError if it is none."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, name = tag.partition("-")
    if not dash or not name or prefix not in _PREFIXES:
        raise BadExampleError(
            "a tag that is no entity's",
            f": {tag!r}; expected O, B-…, I-…; for plain tags --kind tags",
        )
    return _PREFIXES[prefix], name


def strange(labels: Sequence[str]) -> list[str]:
    """Return those labels that are no entity's tags."""
    found = []
    for label in labels:
        try:
            _parts(label)
        except BadExampleError:
            found.append(label)
    return found


def entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a sentence's tags, in any of the schemes IOB1, BIO2, IOBES, BILOU.

    Where tags break their scheme, an entity begins wherever the one before cannot go on.
    """
    start, open_name, before = 0, "", OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, name = _parts(tag)
        goes_on = open_name == name and prefix in "IE" and before in "BI"
        if open_name and not goes_on:
            yield Entity(start, place, open_name)
        if name and not (open_name and goes_on):
            start = place
        open_name, before = name, prefix


def bio2(tags: Sequence[str]) -> list[str]:
    """Return the same entities in BIO2: B- where one begins, I- inside. Reads any scheme."""
    result = [OUTSIDE] * len(tags)
    for found in entities(tags):
        result[found.start] = f"B-{found.label}"
        result[found.start + 1 : found.end] = [f"I-{found.label}"] * (found.end - found.start - 1)
    return result


def entity_scores(
    predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return precision, recall and F1 over the entities of all sentences, and the macro F1.

    An entity counts as found if its borders and its type are right. The macro F1 is the mean over
    the types that occur on either side. Nothing found, or nothing to find, scores 0.
    """
    said: Counter[str] = Counter()
    true: Counter[str] = Counter()
    both: Counter[str] = Counter()
    for one, other in zip(predicted, right, strict=True):
        found, wanted = set(entities(one)), set(entities(other))
        said.update(entity.label for entity in found)
        true.update(entity.label for entity in wanted)
        both.update(entity.label for entity in found & wanted)
    names = said.keys() | true.keys()
    each = [_f1(both[name], said[name], true[name]) for name in names]
    hits, all_said, all_true = both.total(), said.total(), true.total()
    return {
        "f1": _f1(hits, all_said, all_true),
        "precision": hits / all_said if all_said else 0.0,
        "recall": hits / all_true if all_true else 0.0,
        "macro_f1": sum(each) / len(each) if each else 0.0,
    }


def _f1(hits: int, said: int, true: int) -> float:
    return 2 * hits / (said + true) if said + true else 0.0
