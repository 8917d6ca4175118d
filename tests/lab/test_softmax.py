"""Time and memory measurements of the output softmax."""

import pytest

from bertsmith.errors import BertsmithError
from bertsmith.lab import softmax


def test_memory_excludes_the_calling_process() -> None:
    """All logits at once take several times P x V floats. Chunks take less than P x V floats."""
    # Memory of this process that a measurement in the same process would count.
    allocated = bytearray(400 * 2**20)
    vocab_size, num_predictions = 60_000, 400
    logits_bytes = 4 * vocab_size * num_predictions
    full, chunked = (
        softmax.measure_in_subprocess(
            name, vocab_size, width=16, num_predictions=num_predictions, num_repeats=1
        )
        for name in ("full", "chunked")
    )
    assert 2 * logits_bytes < full["bytes"] < 6 * logits_bytes
    assert chunked["bytes"] < logits_bytes
    assert min(full["seconds"], chunked["seconds"]) > 0
    assert len(allocated) == 400 * 2**20


def test_failed_measurement_is_reported() -> None:
    """The error contains the vocabulary size if the process fails, here for a negative size."""
    with pytest.raises(BertsmithError, match="measuring the softmax failed at a vocabulary of -1:"):
        softmax.measure_in_subprocess("full", -1, width=16, num_predictions=4, num_repeats=1)
