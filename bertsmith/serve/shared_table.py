"""Tables of counters by name, in memory or in a file that several processes share."""

import fcntl
import hashlib
import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

#: A value, and the time of its last change in seconds of the monotonic clock.
Entry = tuple[float, float]
#: Takes the entry of a name, None for a new name, and returns the new entry.
UpdateEntry = Callable[[Entry | None], Entry]


class CounterTable(Protocol):
    """Table of entries by name; thread-safe. The oldest entries are lost if there are too many."""

    def update(self, name: str, function: UpdateEntry) -> Entry:
        """Replace the entry of a name by what ``function`` returns, and return it."""


class LocalTable:
    """A ``CounterTable`` of one process."""

    def __init__(self, max_entries: int = 10_000) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        #: Entries by name, oldest change first.
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def update(self, name: str, function: UpdateEntry) -> Entry:
        """Replace the entry of a name by what ``function`` returns, and return it."""
        with self._lock:
            entry = self._entries[name] = function(self._entries.get(name))
            self._entries.move_to_end(name)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            return entry


class SharedTable:
    """A ``CounterTable`` in a file that several processes map into their memory.

    The monotonic clock has the same time in all processes of a machine.
    """

    #: Hash of the name, value and time.
    _SLOT: Final = struct.Struct("=16sdd")
    #: Number of slots in which the entry of a name can be.
    _NUM_PROBES: Final = 8

    def __init__(self, path: Path, num_slots: int = 16_384) -> None:
        """Open the file, or create it.

        Args:
            path: the file, of which every process passes the same ``num_slots``.
            num_slots: maximum number of entries.
        """
        self._num_slots = num_slots
        self._lock = threading.Lock()
        size = num_slots * self._SLOT.size
        # The lock of the file belongs to this descriptor, and ends if the process is killed.
        self._file = path.open("a+b")
        os.ftruncate(self._file.fileno(), size)
        self._memory = mmap.mmap(self._file.fileno(), size)

    def update(self, name: str, function: UpdateEntry) -> Entry:
        """Replace the entry of a name by what ``function`` returns, and return it."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                offset, entry = self._find_slot(digest)
                entry = function(entry)
                self._SLOT.pack_into(self._memory, offset, digest, *entry)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return entry

    def _find_slot(self, digest: bytes) -> tuple[int, Entry | None]:
        """Return the offset and the entry of a name, or of an empty or the oldest slot and None."""
        first = int.from_bytes(digest[:8], "little")
        oldest_offset, oldest_time = 0, float("inf")
        for number in range(first, first + self._NUM_PROBES):
            offset = number % self._num_slots * self._SLOT.size
            slot_digest, value, changed_at = self._SLOT.unpack_from(self._memory, offset)
            if slot_digest == digest:
                return offset, (value, changed_at)
            if not any(slot_digest):
                changed_at = float("-inf")
            if changed_at < oldest_time:
                oldest_offset, oldest_time = offset, changed_at
        return oldest_offset, None
