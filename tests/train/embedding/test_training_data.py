"""The split of examples into training and held-out examples."""

from pathlib import Path

import pytest

from bertsmith.errors import RunError
from bertsmith.interop.sentence_transformers import PoolingConfig
from bertsmith.tasks.embedding_data import EmbeddingExamples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.training_data import hold_out_examples, read_data
from tests.tasks.test_embedding_data import get_texts, read, tokenize, write_json_lines

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


def test_held_out_examples_have_no_training_texts(tmp_path: Path) -> None:
    """Held-out examples have the same texts as in the split, without those of other examples."""
    rows = [
        {"anchor": f"query {i}", "positive": f"answer {i}", "negatives": [f"wrong {i}", "query 1"]}
        for i in range(20)
        if i != 1
    ]
    file = write_json_lines(tmp_path / "triplets.jsonl", rows)
    settings = EmbeddingSettings(train_files=[str(file)], validation_fraction=0.1)
    pooling = PoolingConfig(prompts={"query": "q: "})
    heldout = read_data(settings, tokenize, pooling).heldout["heldout"].examples
    assert isinstance(heldout, EmbeddingExamples)
    _, expected = hold_out_examples(read(file), settings)
    texts, expected_texts = get_texts(heldout), get_texts(expected)
    assert len(texts) == len(heldout.list_used_texts()) == 7
    assert heldout.texts.identities.tolist() == list(range(7))
    for name in ("anchors", "positives", "negatives"):
        prefix = "q: " if name == "anchors" else ""
        assert [texts[i] for i in getattr(heldout, name)] == [
            prefix + expected_texts[i] for i in getattr(expected, name)
        ]
