"""The set of seen texts: correctness and memory."""

from bertsmith.text.deduplication import SeenTexts


def test_seen_texts_equal_a_set() -> None:
    """For 50,000 texts with repetitions, over several resizes, the result is that of a set."""
    seen = SeenTexts()
    expected: set[str] = set()
    for number in range(50_000):
        text = str(number * 7919 % 30_011)
        assert seen.add(text) is (text not in expected)
        expected.add(text)
    assert len(seen) == len(expected) == 30_011


def test_memory_per_text_is_below_22_bytes() -> None:
    """The array of 8-byte slots is always more than three eighths full."""
    seen = SeenTexts()
    for number in range(100_000):
        seen.add(str(number))
        # The set starts with 4096 slots, which is more than it needs for few texts.
        if number > 4096:
            assert 8 * len(seen._slots) / len(seen) < 22
