"""The split of examples into training and held-out examples."""

from pathlib import Path

import pytest

from bertsmith.errors import RunError
from bertsmith.tasks.embedding_data import EmbeddingExamples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.training_data import hold_out_examples
from tests.tasks.test_embedding_data import read, write_json_lines

NUM_POSITIVES = 4


def make_examples(tmp_path: Path, num_anchors: int) -> EmbeddingExamples:
    """Return pairs of anchors with four positives each."""
    rows = [
        {"anchor": f"query {anchor}", "positive": f"answer {anchor} {number}"}
        for anchor in range(num_anchors)
        for number in range(NUM_POSITIVES)
    ]
    return read(write_json_lines(tmp_path / "pairs.jsonl", rows))


@pytest.mark.parametrize(
    ("fraction", "limit", "num_held_out"),
    [(0.1, 1000, 3), (0.5, 10, 2), (0.5, 8, 2), (0.5, 1, 1), (0.001, 1000, 1), (0.99, 1000, 29)],
)
def test_limit_counts_examples(
    tmp_path: Path, fraction: float, limit: int, num_held_out: int
) -> None:
    """Anchors are held out with all their examples, up to the limit of examples, at least one."""
    examples = make_examples(tmp_path, 30)
    settings = EmbeddingSettings(validation_fraction=fraction, max_validation_examples=limit)
    train, heldout = hold_out_examples(examples, settings)
    assert len(heldout) == NUM_POSITIVES * num_held_out
    assert len(train) == len(examples) - len(heldout)
    assert not set(train.anchors.tolist()) & set(heldout.anchors.tolist())


def test_only_a_single_anchor_is_an_error(tmp_path: Path) -> None:
    """A large fraction leaves an anchor to train on; a single anchor cannot be split."""
    settings = EmbeddingSettings(train_files=["pairs.jsonl"], validation_fraction=0.9)
    train, heldout = hold_out_examples(make_examples(tmp_path, 2), settings)
    assert len(train) == len(heldout) == NUM_POSITIVES
    with pytest.raises(RunError, match="all examples have the same first text"):
        hold_out_examples(make_examples(tmp_path, 1), settings)
