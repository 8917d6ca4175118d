"""Detecting and splitting the columns of CoNLL and CoNLL-U files."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.errors import TaskError
from bertsmith.tasks.inputs import BadExampleError

_SPACES_OR_TABS = re.compile("[ \\t]+")


@dataclass(frozen=True)
class LineRules:
    """The functions that recognize lines without a word in a file format.

    Attributes:
        is_document_start: Returns whether a line starts a document.
        may_be_comment: Returns whether a line may be a comment. Such lines are not used to detect
            the columns.
    """

    is_document_start: Callable[[str], bool]
    may_be_comment: Callable[[str], bool]


@dataclass(frozen=True)
class ColumnFormat:
    """How the lines of a file are split into columns.

    Attributes:
        has_tabs: Whether tabs separate the columns, otherwise spaces.
        num_columns: Number of columns.
        first_location: File and line of the first line with this many columns, for messages.
    """

    has_tabs: bool
    num_columns: int
    first_location: str

    @classmethod
    def detect(
        cls,
        sample: Sequence[str],
        line_rules: LineRules,
        word_column: int,
        tag_column: int | None,
        path: Path,
    ) -> "ColumnFormat | None":
        """Return the most frequent format of the sampled lines, None if they contain no word.

        The most frequent format is used, rather than that of the first line, because any line may
        be damaged.

        Args:
            sample: The first lines of the file.
            line_rules: The functions that recognize lines without a word.
            word_column: Index of the column of words.
            tag_column: Index of the column of tags, None for unlabeled data.
            path: The file, for error messages.

        Raises:
            TaskError: A required column is missing, or words and tags share a column.
        """
        word_lines: dict[int, str] = {}
        for line_number, line_with_end in enumerate(sample, 1):
            line = line_with_end.rstrip("\r\n")
            if line_rules.is_document_start(line) or line_rules.may_be_comment(line):
                continue
            if line.strip():
                word_lines[line_number] = line
        if not word_lines:
            return None
        has_tabs = 2 * sum("\t" in line for line in word_lines.values()) > len(word_lines)
        column_counts = {
            line_number: len(split_columns(line, has_tabs=has_tabs))
            for line_number, line in word_lines.items()
        }
        num_columns = Counter(column_counts.values()).most_common(1)[0][0]
        first_line_number = next(
            line_number for line_number, count in column_counts.items() if count == num_columns
        )
        location = f"{path}, line {first_line_number:,}"
        for column in (word_column, tag_column):
            if column is not None and not -num_columns <= column < num_columns:
                raise TaskError(
                    f"{location}: a line of {num_columns} columns, but column {column} is "
                    "expected; columns are numbered from 0, and task.text_column and "
                    "task.label_column select them",
                )
        if tag_column is not None and word_column % num_columns == tag_column % num_columns:
            raise TaskError(
                f"{location}: words and tags would both be column {word_column % num_columns} of "
                f"{num_columns}; expected a word and its tag, separated by spaces or tabs (select "
                "other columns with task.text_column and task.label_column)",
            )
        return cls(has_tabs, num_columns, location)

    def split_line(self, line: str) -> list[str] | None:
        """Return the columns of a line, None if their number differs from ``num_columns``."""
        cells = split_columns(line, has_tabs=self.has_tabs)
        return cells if len(cells) == self.num_columns else None

    def build_error(self, line: str, location: str) -> BadExampleError:
        """Return the error for a line whose number of columns differs from ``num_columns``."""
        separator = "tabs" if self.has_tabs else "spaces"
        num_columns = len(split_columns(line, has_tabs=self.has_tabs))
        detail = (
            f": {num_columns} separated by {separator}; {self.first_location} has "
            f"{self.num_columns}"
        )
        return BadExampleError("a line with a different number of columns", detail, location)


def split_columns(line: str, *, has_tabs: bool) -> list[str]:
    """Split a line at tabs or, without ``has_tabs``, at runs of spaces and tabs."""
    if has_tabs:
        return line.split("\t")
    # ``str.split`` would also split at non-breaking spaces within a word.
    return line.split() if line.isascii() else _SPACES_OR_TABS.split(line.strip(" \t"))
