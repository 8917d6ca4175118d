"""What a fine-tuned model says of many sequences, however its batches are computed."""

import numpy as np
import pytest
import torch

from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.task_models import (
    BertForSequenceClassification,
    BertForTokenClassification,
    TaskModel,
)
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import compute_outputs

CONFIG = ModelConfig(vocab_size=99, layers=2, width=24, heads=2, feed_forward=48, max_positions=64)


def models() -> dict[str, TaskModel]:
    """Return one of each way to read the encoder, with random weights."""
    torch.manual_seed(5)
    settings = FeatureSettings(layers="last", width=16)
    return {
        "sequence": BertForSequenceClassification(CONFIG, 3).eval(),
        "token": BertForTokenClassification(CONFIG, 3).eval(),
        "features": BertWithBiLSTM(CONFIG, 3, settings, is_sequence_level=False).eval(),
    }


@pytest.mark.parametrize("name", ["sequence", "token", "features"])
def test_batches_at_once_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four threads as on one; places keep their sequences."""
    # Tokens that fit into a few of the short batches.
    monkeypatch.setattr("bertsmith.tasks.outputs.usual_tokens", lambda *_: 128)
    draw, model = np.random.default_rng(3), models()[name]
    sizes = draw.integers(3, 60, 90)
    sequences = [[(draw.integers(5, 99, size).tolist(), [0] * int(size))] for size in sizes]
    places = None if name == "sequence" else [
        sorted(draw.choice(size, 3, replace=False).tolist()) for size in sizes
    ]  # fmt: skip
    inputs = ModelInputs(sequences, [""] * len(sizes), [False] * len(sizes), token_indices=places)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(compute_outputs(model, inputs))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert one.shape == ((1, 3) if places is None else (3, 3))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    # Units differ: an answer at another's place would show.
    assert np.ptp(np.stack(found[0]), 0).min() > 1e-3
