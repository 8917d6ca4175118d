"""Computing the outputs of fine-tuned models in batches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.task_models import (
    BertForSequenceClassification,
    BertForTokenClassification,
    TaskModel,
)
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import compute_outputs

CONFIG = ModelConfig(vocab_size=99, layers=2, width=24, heads=2, feed_forward=48, max_positions=64)


def build_model(name: str) -> TaskModel:
    """Build a random model in eval mode."""
    torch.manual_seed(5)
    if name == "sequence":
        return BertForSequenceClassification(CONFIG, 3).eval()
    if name == "token":
        return BertForTokenClassification(CONFIG, 3).eval()
    features = BiLSTMSettings(layers="last", width=16)
    return BertWithBiLSTM(CONFIG, 3, features, is_sequence_level=False).eval()


@pytest.mark.parametrize("name", ["sequence", "token", "features"])
def test_outputs_do_not_depend_on_number_of_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and four threads give equal outputs, in the order of the inputs."""
    # With 128 tokens per batch there are many batches.
    monkeypatch.setattr("bertsmith.tasks.outputs.choose_batch_tokens", lambda *_: 128)
    rng = np.random.default_rng(3)
    model = build_model(name)
    lengths = rng.integers(3, 60, 90)
    sequences = [[(rng.integers(5, 99, length).tolist(), [0] * int(length))] for length in lengths]
    token_indices: list[Sequence[int]] | None = None
    if name != "sequence":
        token_indices = [
            sorted(rng.choice(length, 3, replace=False).tolist()) for length in lengths
        ]
    num_units = len(lengths)
    inputs = ModelInputs(
        sequences, [""] * num_units, [False] * num_units, token_indices=token_indices
    )
    old_num_threads = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            outputs.append(compute_outputs(model, inputs))
    finally:
        torch.set_num_threads(old_num_threads)
    # A unit has one row of three outputs for the sequence, or for each of three tokens.
    num_rows = 1 if token_indices is None else 3
    for single_thread_output, output in zip(*outputs, strict=True):
        assert single_thread_output.shape == (num_rows, 3)
        np.testing.assert_allclose(single_thread_output, output, rtol=0, atol=1e-6)
    # The outputs of units differ, so a wrong order would be detected.
    assert np.ptp(np.stack(outputs[0]), 0).min() > 1e-3
