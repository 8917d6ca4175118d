"""What the softmax takes is measured whatever its caller has taken."""

import pytest

from bertsmith.errors import BertsmithError
from bertsmith.lab import softmax


def test_memory_is_that_of_the_logits_whoever_asks() -> None:
    """All logits at once take P x V numbers several times; in parts, far less than once."""
    held = bytearray(400 * 2**20)
    words, predictions = 60_000, 400
    logits = 4 * words * predictions
    whole, parts = (
        softmax.measure_in_subprocess(form, words, 16, predictions, 1)
        for form in softmax.IMPLEMENTATIONS
    )
    assert 2 * logits < whole["bytes"] < 6 * logits
    assert parts["bytes"] < logits
    assert min(whole["seconds"], parts["seconds"]) > 0
    assert len(held) == 400 * 2**20


def test_a_measurement_that_fails_is_told() -> None:
    """A process that cannot hold it ends, and so says the error."""
    with pytest.raises(BertsmithError, match="the softmax of -1 words could not be measured"):
        softmax.measure_in_subprocess("whole", -1, 16, 4, 1)
