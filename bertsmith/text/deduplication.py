"""Remembers which texts were seen, in 16 bytes or less a text, to leave out exact repetitions.

It never knows whether a text is a document or a paragraph.
"""

from array import array
from hashlib import blake2b
from typing import Final

#: Slots at the start. A power of two, so that a hash is brought into range by a mask.
SMALLEST: Final = 1 << 12


class SeenTexts:
    """A set of 64-bit hashes by open addressing in one flat array.

    At most three quarters full, so 10.7 to 21.3 bytes a text. Two different texts among n are
    taken for equal with probability below n² / 2⁶⁵: one in 4,000 for a hundred million texts.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * SMALLEST))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Remember ``text``; return whether it was new."""
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        # Zero marks an empty slot.
        value = int.from_bytes(digest, "little") or 1
        slot = self._slot(value)
        if self._slots[slot] == value:
            return False
        self._slots[slot] = value
        self._count += 1
        if 4 * self._count > 3 * len(self._slots):
            self._grow()
        return True

    def _slot(self, value: int) -> int:
        """Return where ``value`` stands, or the empty slot where it would."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] and slots[slot] != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old = self._slots
        self._slots = array("Q", bytes(16 * len(old)))
        for value in old:
            if value:
                self._slots[self._slot(value)] = value
