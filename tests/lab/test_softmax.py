"""Time and memory measurements of the output softmax."""

import pytest

from bertsmith.errors import BertsmithError
from bertsmith.lab import softmax


def test_measured_memory_does_not_include_the_calling_process() -> None:
    """All logits at once take several times P x V floats; chunks take less than P x V floats."""
    allocated = bytearray(400 * 2**20)
    vocab_size, num_predictions = 60_000, 400
    logits_bytes = 4 * vocab_size * num_predictions
    full, chunked = (
        softmax.measure_in_subprocess(name, vocab_size, 16, num_predictions, 1)
        for name in softmax.IMPLEMENTATIONS
    )
    assert 2 * logits_bytes < full["bytes"] < 6 * logits_bytes
    assert chunked["bytes"] < logits_bytes
    assert min(full["seconds"], chunked["seconds"]) > 0
    assert len(allocated) == 400 * 2**20


def test_failed_measurement_is_reported() -> None:
    """If the measuring process fails, the error names the vocabulary size."""
    with pytest.raises(BertsmithError, match="measuring the softmax failed at a vocabulary of -1:"):
        softmax.measure_in_subprocess("full", -1, 16, 4, 1)
