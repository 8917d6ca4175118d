"""Tests of the time and memory measurements of the output softmax."""

import pytest

from bertsmith.errors import BertsmithError
from bertsmith.lab import softmax


def test_memory_excludes_the_calling_process() -> None:
    """With all logits at once, memory is a few times the size of the logits; in chunks, it is less.

    The logits have the size num_predictions x vocab_size.
    """
    # A measurement in this process would include these 400 MiB.
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
    # The memory was still allocated during the measurements.
    assert len(allocated) == 400 * 2**20


def test_failed_measurement_is_reported() -> None:
    """The error contains the vocabulary size if the process fails, here for a negative size."""
    with pytest.raises(BertsmithError, match="measuring the softmax failed at a vocabulary of -1:"):
        softmax.measure_in_subprocess("full", -1, width=16, num_predictions=4, num_repeats=1)
