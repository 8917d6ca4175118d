"""The results file of a scale: one JSON record per line, appended as stages finish.

If the process is killed, at most the line being written is lost. If a stage has several records,
the last one is used. Several processes may append to the same file.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertsmith.compatibility.lab import downgrade_stage_name, upgrade_lab_record
from bertsmith.files import dump_json, lock_open_file, sync

RESULTS_FILE = "results.jsonl"
#: Version 0.1 wrote one file per result into this folder, next to the results file.
_LEGACY_FOLDER = "results"


class ResultsFile:
    """The records of a results file by stage name.

    Every access also reads the lines that other processes have appended.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        """Initialize without reading the file.

        Args:
            path: The file, which need not exist yet.
            log: Receives warnings about damaged lines.
        """
        self.path = path
        self._log = log
        self._records: dict[str, dict[str, Any]] = {}
        # The number of bytes and lines read so far, up to the end of the last complete line.
        self._offset = 0
        self._num_lines = 0
        self._reported: set[str] = set()

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the last record of a stage, None if there is none.

        Version 0.1 wrote one file per result. These files are read too.
        """
        self._refresh()
        return self._records.get(name) or self._read_legacy_record(name)

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Append a record and flush it to disk.

        Raises:
            OSError: The file cannot be written.
        """
        line = dump_json({"name": name, **record}) + "\n"
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            lock_open_file(file)
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    # The process that wrote the last line was killed. Its incomplete line must not
                    # be joined with the new one.
                    line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self.path.parent)

    def _refresh(self) -> None:
        """Read the complete lines that were appended since the last call."""
        try:
            with self.path.open("rb") as file:
                # While this process holds the lock, no other process is writing a line.
                lock_open_file(file, shared=True)
                if os.fstat(file.fileno()).st_size < self._offset:
                    # The file was replaced or truncated.
                    self._forget_records()
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._forget_records()
            return
        complete_lines = data[: data.rfind(b"\n") + 1]
        for line in complete_lines.splitlines():
            self._num_lines += 1
            self._add_line(line)
        self._offset += len(complete_lines)
        if len(complete_lines) < len(data):
            self._warn(f"{self.path}: the last line is incomplete; its stage runs again")

    def _forget_records(self) -> None:
        """Return to the state in which nothing has been read."""
        self._records = {}
        self._offset = 0
        self._num_lines = 0

    def _add_line(self, line: bytes) -> None:
        """Add the record of a line; warn if the line is damaged."""
        if not line.strip():
            return
        try:
            record = upgrade_lab_record(json.loads(line))
            self._records[record["name"]] = record
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            location = f"{self.path}, line {self._num_lines}"
            self._warn(f"{location}: this is not a result; its stage runs again")

    def _read_legacy_record(self, name: str) -> dict[str, Any] | None:
        """Return a stage's record from its own file, None if it is missing or damaged."""
        path = self.path.with_name(_LEGACY_FOLDER) / f"{downgrade_stage_name(name)}.json"
        try:
            record = upgrade_lab_record(json.loads(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, AttributeError):
            self._warn(f"{path}: this result is damaged; its stage runs again")
            return None
        self._warn(
            f"{path.parent}: reading results of version 0.1; new results go to {self.path.name}"
        )
        return record

    def _warn(self, message: str) -> None:
        """Log a message unless it has been logged before."""
        if message not in self._reported:
            self._reported.add(message)
            self._log(message)
