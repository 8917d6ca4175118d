"""Entities and their scores, compared with seqeval."""

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

BIO_TAGS = ["O", "B-PER", "B-LOC", "I-PER", "I-LOC"]
IOBES_TAGS = [*BIO_TAGS, "E-PER", "E-LOC", "S-PER", "S-LOC"]


def draw_sentences(rng: random.Random, tags: list[str]) -> list[list[str]]:
    """Return 1 to 5 sentences of random tags, most of which violate their scheme."""
    return [rng.choices(tags, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 5))]


@pytest.mark.parametrize("tags", [IOBES_TAGS, BIO_TAGS], ids=["IOBES", "BIO"])
def test_entities_equal_seqeval(tags: list[str]) -> None:
    """Boundaries and types agree on 2,000 random sentences, most of which are invalid."""
    rng = random.Random(1)
    for _ in range(2000):
        sentence = rng.choices(tags, k=rng.randint(1, 12))
        expected = sorted((first, last + 1, name) for name, first, last in get_entities(sentence))
        entities = extract_entities(sentence)
        triples = sorted((entity.start, entity.end, entity.label) for entity in entities)
        assert triples == expected, sentence


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tags", [IOBES_TAGS, BIO_TAGS, ["O", "B-PER"], ["O"]])
def test_scores_equal_seqeval(tags: list[str]) -> None:
    """Precision, recall, F1 and macro F1 agree on random tags, also if all tags are O."""
    rng = random.Random(2)
    for _ in range(300):
        true = draw_sentences(rng, tags)
        predicted = [
            rng.choices(tags, k=len(sentence)) if rng.random() < 0.7 else sentence
            for sentence in true
        ]
        scores = compute_entity_scores(predicted, true)
        assert scores["f1"] == pytest.approx(float(f1_score(true, predicted)))
        assert scores["precision"] == pytest.approx(float(precision_score(true, predicted)))
        assert scores["recall"] == pytest.approx(float(recall_score(true, predicted)))
        if any(tag != "O" for sentence in [*true, *predicted] for tag in sentence):
            macro_f1 = float(f1_score(true, predicted, average="macro"))
            assert scores["macro_f1"] == pytest.approx(macro_f1)
            report = classification_report(true, predicted, output_dict=True, zero_division=0)
            for name, type_scores in compute_type_scores(predicted, true).items():
                expected = report[name]
                assert type_scores["support"] == expected["support"]
                assert type_scores["precision"] == pytest.approx(float(expected["precision"]))
                assert type_scores["recall"] == pytest.approx(float(expected["recall"]))
                assert type_scores["f1"] == pytest.approx(float(expected["f1-score"]))


def test_all_schemes_convert_to_the_same_bio2() -> None:
    """IOB1, BIO2, IOBES and BILOU tags of the same entities give the same BIO2 tags."""
    bio2 = ["B-X", "I-X", "B-X", "O", "B-Y"]
    assert to_bio2(["I-X", "I-X", "B-X", "O", "I-Y"]) == bio2
    assert to_bio2(bio2) == bio2
    assert to_bio2(["B-X", "E-X", "S-X", "O", "S-Y"]) == bio2
    assert to_bio2(["B-X", "L-X", "U-X", "O", "U-Y"]) == bio2
    assert list(extract_entities(bio2)) == [
        Entity(0, 2, "X"),
        Entity(2, 3, "X"),
        Entity(4, 5, "Y"),
    ]


@pytest.mark.parametrize("tag", ["PER", "B-", "X", "X-PER", ""])
def test_invalid_tag_is_rejected(tag: str) -> None:
    """The message names the tag and the valid forms."""
    with pytest.raises(BadExampleError, match=r"not an entity tag: .*expected O, B-"):
        list(extract_entities(["O", tag]))


def test_class_numbers_are_not_entity_tags() -> None:
    """For the class numbers of a Hugging Face dataset, the message asks for the names."""
    with pytest.raises(BadExampleError, match=r"'3'; .*; replace class numbers by the names"):
        list(extract_entities(["O", "3"]))


def test_bare_prefixes_form_one_unnamed_type() -> None:
    """B and I without a type are scored like an entity type; data may have only one type."""
    assert list(extract_entities(["B", "I", "O", "B", "B"])) == [
        Entity(0, 2, "_"),
        Entity(3, 4, "_"),
        Entity(4, 5, "_"),
    ]
    assert to_bio2(["I", "I", "O", "S"]) == ["B", "I", "O", "B"]
    assert compute_entity_scores([["B", "I"]], [["B", "O"]])["f1"] == 0.0
    assert compute_entity_scores([["B", "I"]], [["B", "I"]])["f1"] == 1.0
