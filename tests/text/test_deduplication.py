"""What was seen is known again, in little memory.

These tests never look at what the texts are.
"""

from bertsmith.text.deduplication import SeenTexts


def test_seen_agrees_with_a_set() -> None:
    """Over 50,000 texts with repetitions, and over several growths, it says what a set says."""
    seen, known = SeenTexts(), set()
    for number in range(50_000):
        text = str(number * 7919 % 30_011)
        assert seen.add(text) is (text not in known)
        known.add(text)
    assert len(seen) == len(known) == 30_011


def test_a_text_costs_at_most_22_bytes() -> None:
    """The table is at most three quarters full and at least three eighths, of 8-byte slots."""
    seen = SeenTexts()
    for number in range(100_000):
        seen.add(str(number))
        if number > 4096:
            assert 8 * len(seen._slots) / len(seen) < 22
