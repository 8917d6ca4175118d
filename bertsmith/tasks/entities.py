"""Extracting entities from tags, and scoring predicted entities.

Entities follow the evaluation script of the CoNLL-2000 shared task (Tjong Kim Sang and Buchholz
2000), which also supports schemes with end (E) and single (S) tags.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.metrics import compute_class_scores

OUTSIDE_TAG = "O"
#: The entity type of tags without a type, such as a bare B or I, as in seqeval.
UNNAMED_TYPE = "_"
#: Prefix in any scheme -> prefix in IOBES. BILOU has L and U instead of E and S.
_IOBES_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}


@dataclass(frozen=True, order=True)
class Entity:
    """An entity of type ``label``: the units (words or characters) [start, end) of a sentence."""

    start: int
    end: int
    label: str


def _split_tag(tag: str) -> tuple[str, str | None]:
    """Return the IOBES prefix and the entity type of a tag.

    The type is None for the tag O, and ``UNNAMED_TYPE`` for a prefix without a type.

    Raises:
        BadExampleError: The tag is not an entity tag.
    """
    if tag == OUTSIDE_TAG:
        return OUTSIDE_TAG, None
    prefix, dash, entity_type = tag.partition("-")
    lacks_type = dash and not entity_type
    if lacks_type or prefix not in _IOBES_PREFIXES:
        advice = "for plain tags use --kind tags"
        if tag.isdecimal():
            advice = "replace class numbers by the names of the tags"
        raise BadExampleError(
            "a tag that is not an entity tag",
            f": {tag!r}; expected O, B-…, I-…, or O, B, I; {advice}",
        )
    return _IOBES_PREFIXES[prefix], entity_type or UNNAMED_TYPE


def find_non_entity_tags(labels: Sequence[str]) -> list[str]:
    """Return the labels that are not entity tags."""
    invalid = []
    for label in labels:
        try:
            _split_tag(label)
        except BadExampleError:
            invalid.append(label)
    return invalid


def extract_entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a tagged sentence in any of the schemes IOB1, BIO2, IOBES and BILOU.

    Where tags violate their scheme, a tag that cannot continue the previous entity starts a new
    entity.
    """
    start, previous_prefix = 0, OUTSIDE_TAG
    current_type: str | None = None
    for index, tag in enumerate([*tags, OUTSIDE_TAG]):
        prefix, entity_type = _split_tag(tag)
        is_continuation = current_type == entity_type and prefix in "IE" and previous_prefix in "BI"
        if current_type is not None and not is_continuation:
            yield Entity(start, index, current_type)
        if entity_type is not None and not is_continuation:
            start = index
        current_type, previous_prefix = entity_type, prefix


def to_bio2(tags: Sequence[str]) -> list[str]:
    """Convert tags of any scheme to BIO2: B- for the first unit of an entity, I- for the others."""
    bio2_tags = [OUTSIDE_TAG] * len(tags)
    for entity in extract_entities(tags):
        bio2_tags[entity.start] = _join_tag("B", entity.label)
        for index in range(entity.start + 1, entity.end):
            bio2_tags[index] = _join_tag("I", entity.label)
    return bio2_tags


def has_end_or_single_tags(tags: Sequence[str]) -> bool:
    """Return whether entity tags contain prefixes that only IOBES or BILOU has."""
    return any(_split_tag(tag)[0] in ("E", "S") for tag in tags)


def list_bio2_tags(label: str) -> tuple[str, ...]:
    """Return the BIO2 tags of the units of an entity whose type is that of ``label``."""
    _, entity_type = _split_tag(label)
    if entity_type is None:
        return (OUTSIDE_TAG,)
    return _join_tag("B", entity_type), _join_tag("I", entity_type)


def to_inside_tag(tag: str) -> str:
    """Return the I- tag of the same entity type; other tags are returned unchanged."""
    return f"I{tag[1:]}" if tag[:2] in ("B-", "I-") or tag in ("B", "I") else tag


def _join_tag(prefix: str, entity_type: str) -> str:
    return prefix if entity_type == UNNAMED_TYPE else f"{prefix}-{entity_type}"


def compute_entity_scores(
    predicted: Sequence[Sequence[str]],
    true: Sequence[Sequence[str]],
) -> dict[str, float]:
    """Return precision, recall, F1 and macro F1 over the entities of all sentences.

    A predicted entity is correct if its boundaries and its type are correct. Macro F1 is the mean
    over the entity types that occur in either argument. All scores are 0 if there are no entities.

    Args:
        predicted: Predicted tags of each sentence.
        true: True tags of each sentence.
    """
    correct_counts, predicted_counts, true_counts = _count_entities(predicted, true)
    overall = compute_class_scores(
        correct_counts.total(),
        predicted_counts.total(),
        true_counts.total(),
    )
    type_scores = _compute_type_scores(correct_counts, predicted_counts, true_counts)
    f1_by_type = [scores["f1"] for scores in type_scores.values()]
    return {
        "f1": overall["f1"],
        "precision": overall["precision"],
        "recall": overall["recall"],
        "macro_f1": sum(f1_by_type) / len(f1_by_type) if f1_by_type else 0.0,
    }


def compute_type_scores(
    predicted: Sequence[Sequence[str]],
    true: Sequence[Sequence[str]],
) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support of each entity type in either argument."""
    return _compute_type_scores(*_count_entities(predicted, true))


def _compute_type_scores(
    correct_counts: Counter[str], predicted_counts: Counter[str], true_counts: Counter[str]
) -> dict[str, dict[str, float]]:
    """Return the scores of each entity type from the results of ``_count_entities``."""
    return {
        name: compute_class_scores(correct_counts[name], predicted_counts[name], true_counts[name])
        for name in sorted(predicted_counts.keys() | true_counts.keys())
    }


def _count_entities(
    predicted: Sequence[Sequence[str]],
    true: Sequence[Sequence[str]],
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the numbers of correct, predicted and true entities of each type."""
    correct_counts: Counter[str] = Counter()
    predicted_counts: Counter[str] = Counter()
    true_counts: Counter[str] = Counter()
    for predicted_tags, true_tags in zip(predicted, true, strict=True):
        predicted_entities = set(extract_entities(predicted_tags))
        true_entities = set(extract_entities(true_tags))
        predicted_counts.update(entity.label for entity in predicted_entities)
        true_counts.update(entity.label for entity in true_entities)
        correct_counts.update(entity.label for entity in predicted_entities & true_entities)
    return correct_counts, predicted_counts, true_counts
