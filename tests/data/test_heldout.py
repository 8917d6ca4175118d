"""Which documents are held out."""

import numpy as np
import pytest

from bertsmith.data.heldout import held_out_limit


def test_held_out_share() -> None:
    """The share is one of tokens, larger in small corpora; equal documents stay together."""
    chance = np.random.default_rng(0)
    hashes = chance.integers(0, 1 << 63, 10_000).astype(np.uint64) * np.uint64(2)
    tokens = chance.integers(1, 2000, 10_000)

    def share(count: int, wanted: float | None) -> float:
        below = hashes[:count] < np.uint64(held_out_limit(hashes[:count], tokens[:count], wanted))
        return float(tokens[:count][below].sum() / tokens[:count].sum())

    assert share(10_000, 0.2) == pytest.approx(0.2, abs=0.001)
    # Ten million tokens: 131,072 are more than 1 %; a hundred thousand: 5 %, less than 131,072.
    assert share(10_000, None) == pytest.approx((1 << 17) / tokens.sum(), abs=0.001)
    assert share(100, None) == pytest.approx(0.05, abs=0.02)
    assert share(10_000, 0.0) == 0.0
    assert held_out_limit(hashes[:3], tokens[:3], None) == 0
    for count in range(4, 12):
        below = hashes[:count] < np.uint64(held_out_limit(hashes[:count], tokens[:count], 0.9))
        assert 2 <= below.sum() <= count - 2
    twice = np.repeat(hashes[:2], 50)
    assert held_out_limit(twice, np.repeat(tokens[:2], 50), None) == 0
