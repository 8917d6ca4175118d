"""Entities out of tags, and their F1, beside seqeval."""

import random

import pytest
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from bertsmith.tasks.entities import (
    Entity,
    compute_entity_scores,
    compute_type_scores,
    extract_entities,
    to_bio2,
)
from bertsmith.tasks.inputs import BadExampleError

TAGS = ["O", *(f"{prefix}-{name}" for prefix in "BIES" for name in ("PER", "LOC"))]


def draw(chance: random.Random, tags: list[str]) -> list[list[str]]:
    """Return some sentences of random tags, most of which break their scheme."""
    return [chance.choices(tags, k=chance.randint(1, 12)) for _ in range(chance.randint(1, 5))]


@pytest.mark.parametrize("tags", [TAGS, TAGS[:5]], ids=["IOBES", "BIO"])
def test_the_same_entities_as_seqeval(tags: list[str]) -> None:
    """On 2,000 random sentences, nearly all of them broken: the same runs and types."""
    chance = random.Random(1)
    for _ in range(2000):
        own = chance.choices(tags, k=chance.randint(1, 12))
        wanted = sorted((first, last + 1, name) for name, first, last in get_entities(own))
        assert sorted((one.start, one.end, one.label) for one in extract_entities(own)) == wanted, (
            own
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tags", [TAGS, TAGS[:5], ["O", "B-PER"], ["O"]])
def test_the_same_scores_as_seqeval(tags: list[str]) -> None:
    """Precision, recall, F1 and macro F1 on random taggings, empty ones among them."""
    chance = random.Random(2)
    for _ in range(300):
        right = draw(chance, tags)
        said = [chance.choices(tags, k=len(own)) if chance.random() < 0.7 else own for own in right]
        found = compute_entity_scores(said, right)
        assert found["f1"] == pytest.approx(float(f1_score(right, said)))
        assert found["precision"] == pytest.approx(float(precision_score(right, said)))
        assert found["recall"] == pytest.approx(float(recall_score(right, said)))
        if any(one != "O" for own in [*right, *said] for one in own):
            macro = float(f1_score(right, said, average="macro"))
            assert found["macro_f1"] == pytest.approx(macro)
            by_type = classification_report(right, said, output_dict=True, zero_division=0)
            for name, scores in compute_type_scores(said, right).items():
                expected = by_type[name]
                assert scores["support"] == expected["support"]
                for key, value in (("precision", "precision"), ("recall", "recall"),
                                   ("f1", "f1-score")):  # fmt: skip
                    assert scores[key] == pytest.approx(float(expected[value]))


def test_schemes_are_read_as_one() -> None:
    """IOB1, BIO2, IOBES and BILOU of the same two neighbours and a single give the same BIO2."""
    wanted = ["B-X", "I-X", "B-X", "O", "B-Y"]
    assert to_bio2(["I-X", "I-X", "B-X", "O", "I-Y"]) == wanted
    assert to_bio2(wanted) == wanted
    assert to_bio2(["B-X", "E-X", "S-X", "O", "S-Y"]) == wanted
    assert to_bio2(["B-X", "L-X", "U-X", "O", "U-Y"]) == wanted
    assert list(extract_entities(wanted)) == [
        Entity(0, 2, "X"),
        Entity(2, 3, "X"),
        Entity(4, 5, "Y"),
    ]


@pytest.mark.parametrize("tag", ["PER", "B-", "X", "X-PER", ""])
def test_what_is_no_tag_is_told(tag: str) -> None:
    """It is named, with what is expected."""
    with pytest.raises(BadExampleError, match=r"no entity's: .*expected O, B-"):
        list(extract_entities(["O", tag]))


def test_bare_prefixes_are_one_type_without_a_name() -> None:
    """B and I alone, as in data with one kind of entity; scores count them like any other."""
    assert list(extract_entities(["B", "I", "O", "B", "B"])) == [
        Entity(0, 2, "_"),
        Entity(3, 4, "_"),
        Entity(4, 5, "_"),
    ]
    assert to_bio2(["I", "I", "O", "S"]) == ["B", "I", "O", "B"]
    assert compute_entity_scores([["B", "I"]], [["B", "O"]])["f1"] == 0.0
    assert compute_entity_scores([["B", "I"]], [["B", "I"]])["f1"] == 1.0
