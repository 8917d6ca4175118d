"""Evaluation of entity models whose labels are not BIO2."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import TaskError
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tagging import compute_metrics, encode_examples, read_examples, to_unit_tags
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

TASK = TaskSettings(
    kind="entities", text_column="0", label_column="1", max_seqlen=32, metrics=["f1", "accuracy"]
)
SCHEMES = [
    ("B-LOC I-LOC I-PER O", "peter I-PER\nblack I-PER\n\noslo I-LOC\neu B-LOC\n"),
    ("O S-LOC B-PER I-PER E-PER", "peter B-PER\nblack E-PER\n\noslo S-LOC\neu S-LOC\n"),
    ("O U-LOC B-PER I-PER L-PER", "peter B-PER\nblack L-PER\n\noslo U-LOC\neu U-LOC\n"),
]


@pytest.mark.parametrize(("labels", "text"), SCHEMES)
def test_correct_predictions_score_one_in_all_schemes(
    tmp_path: Path, labels: str, text: str
) -> None:
    """Predictions that equal the tags of the file have the accuracy 1 in IOB1, IOBES and BILOU."""
    vocabulary = (*SPECIAL_TOKENS, "peter", "black", "oslo", "eu")
    head = HeadConfig("entities", tuple(labels.split()))
    (tmp_path / "a.txt").write_text(text)
    examples, counts = read_examples(tmp_path / "a.txt", TASK, labels=head.labels)
    tokenizer = Tokenizer(TokenizerSpec(vocab=vocabulary))
    inputs = encode_examples(examples, tokenizer, head, TASK, counts)
    classes = [head.labels.index(line.split()[1]) for line in text.splitlines() if line]
    outputs = list(np.eye(len(head.labels), dtype=np.float32)[classes].reshape(2, 2, -1))
    assert compute_metrics(outputs, inputs, examples, head, TASK) == {"f1": 1.0, "accuracy": 1.0}


@pytest.mark.parametrize("labels", [labels for labels, _ in SCHEMES])
def test_only_tags_of_other_entity_types_are_unknown(tmp_path: Path, labels: str) -> None:
    """A file may use any scheme, and an error names the tag as it is in the file."""
    (tmp_path / "a.txt").write_text("oslo I-LOC\neu I-LOC\n\nblack S-PER\n\npeter E-ORG\n")
    with pytest.raises(TaskError, match="line 6: an unknown label: 'E-ORG'; known labels are"):
        read_examples(tmp_path / "a.txt", TASK, labels=labels.split())


@pytest.mark.parametrize(
    ("kind", "token_tags", "unit_tags"),
    [
        ("entities", "S-LOC O", "B-LOC I-LOC I-LOC I-LOC O O"),
        ("entities", "U-LOC U-LOC", "B-LOC I-LOC I-LOC I-LOC O B-LOC"),
        ("entities", "B-LOC E-LOC", "B-LOC I-LOC I-LOC I-LOC I-LOC I-LOC"),
        ("entities", "E-LOC L-LOC", "B-LOC I-LOC I-LOC I-LOC O B-LOC"),
        ("entities", "I-LOC I-LOC", "I-LOC I-LOC I-LOC I-LOC I-LOC I-LOC"),
        ("tags", "B B", "B B B B B B"),
        ("tags", "B-X S-Y", "B-X B-X B-X B-X O S-Y"),
    ],
)
def test_units_of_a_token_are_one_entity(kind: TaskKind, token_tags: str, unit_tags: str) -> None:
    """The 4 characters of a token are one entity in each scheme, or have the same plain tag.

    The unit without a token, a space, continues an entity or tag that does not end before it.
    """
    tokenizer = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "2024", "y")))
    units = tuple((index, index + 1) for index in range(6))
    examples = [TaggedSentence("2024 y", units, None, 0, "f")] * 2
    head = HeadConfig(kind, tuple(dict.fromkeys(token_tags.split())))
    task = TASK.model_copy(update={"kind": kind, "tag_level": "character"})
    inputs = encode_examples(examples, tokenizer, head, task, ExampleCounts())
    tags = list(to_unit_tags(examples, inputs.decoding_data, token_tags.split() * 2, kind))
    assert tags == [unit_tags.split()] * 2
