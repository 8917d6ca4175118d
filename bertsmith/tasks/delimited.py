"""Splitting CSV and TSV text into records, with detection of the delimiter."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bertsmith.errors import SettingsError, TaskError

TAB = "\t"
#: Maximum number of characters per cell. The default of ``csv``, 2**17, is too small for documents.
_MAX_CELL_SIZE = 2**27
#: Number of lines used to detect the delimiter and the number of columns.
_SAMPLE_LINES = 200
#: Delimiters of .csv files other than the comma.
_OTHER_DELIMITERS = (";", TAB, "|")
#: A delimiter other than the comma must split at least this share of the sampled records into the
#: same number of cells.
_MIN_CONSISTENT_SHARE = 0.9
_DELIMITER_NAMES = {"tab": TAB, "\\t": TAB, "comma": ",", "semicolon": ";"}


@dataclass(frozen=True)
class Dialect:
    """Format of the records of a table.

    Attributes:
        delimiter: One character.
        has_quotes: Whether cells may be quoted; otherwise quotation marks are ordinary characters.
        newline: Line ending.
    """

    delimiter: str
    has_quotes: bool
    newline: str = "\n"


def parse_delimiter(text: str) -> str:
    """Return the delimiter that a user gave as a character or by name.

    Raises:
        SettingsError: The text is neither a known name nor a single character.
    """
    delimiter = _DELIMITER_NAMES.get(text, text)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise SettingsError(
            f"delimiter: expected one character, or tab, got {text!r}; give it in quotation "
            "marks, such as --delimiter ';'",
        )
    return delimiter


def detect_dialect(
    lines: Iterator[str],
    *,
    is_tsv: bool,
    delimiter: str | None,
    has_header: bool,
) -> tuple[Dialect, int | None, Iterator[str]]:
    """Detect the delimiter, line endings and number of columns of a table.

    Args:
        lines: Lines of the table with their line endings.
        is_tsv: Whether cells are separated by tabs and not quoted, as in GLUE's files.
        delimiter: Delimiter of CSV, None to detect it. The comma is used unless only another
            character splits the records into the same number of cells.
        has_header: Whether the first record names the columns.

    Returns:
        The dialect; the number of columns, None with a header; and all lines, including those that
        were read for the detection. The number of columns is that of most records, because the
        first record may be damaged.
    """
    csv.field_size_limit(_MAX_CELL_SIZE)
    sample = list(islice(lines, _SAMPLE_LINES))
    newline = "\r\n" if sample and sample[0].endswith("\r\n") else "\n"
    if delimiter is not None:
        dialect = Dialect(delimiter, not (is_tsv and delimiter == TAB), newline)
    elif is_tsv:
        dialect = Dialect(TAB, has_quotes=False, newline=newline)
    else:
        detected = _detect_delimiter(sample, has_header=has_header)
        dialect = Dialect(detected, has_quotes=True, newline=newline)
    counts = Counter(_count_cells(sample, dialect))
    num_columns = counts.most_common(1)[0][0] if counts and not has_header else None
    return dialect, num_columns, chain(sample, lines)


def _detect_delimiter(sample: Sequence[str], *, has_header: bool) -> str:
    """Return the delimiter that splits the most records into the same number of cells.

    With a header, the comma is preferred to other delimiters if it splits most records like the
    header. A column name in a table with semicolons can contain a comma.
    """
    shares = {}
    for delimiter in (",", *_OTHER_DELIMITERS):
        counts = _count_cells(sample, Dialect(delimiter, has_quotes=True))
        if not counts:
            return ","
        expected = counts[0] if has_header else Counter(counts).most_common(1)[0][0]
        if expected > 1:
            shares[delimiter] = counts.count(expected) / len(counts)
    if has_header and shares.get(",", 0) >= _MIN_CONSISTENT_SHARE:
        return ","
    best = max(shares, key=lambda delimiter: shares[delimiter], default=",")
    return best if shares.get(best, 0) >= _MIN_CONSISTENT_SHARE else ","


def _count_cells(sample: Sequence[str], dialect: Dialect) -> list[int]:
    """Return the number of cells of each sampled record that is not empty."""
    counts: list[int] = []
    reader = _create_reader(iter(sample), dialect, strict=False)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return counts
        except csv.Error:
            continue
        if cells:
            counts.append(len(cells))


def _create_reader(lines: Iterator[str], dialect: Dialect, *, strict: bool) -> Any:
    """Create a ``csv.reader``; if ``strict``, it raises csv.Error for invalid quotation marks."""
    if not dialect.has_quotes:
        return csv.reader(lines, delimiter=dialect.delimiter, quoting=csv.QUOTE_NONE)
    return csv.reader(lines, delimiter=dialect.delimiter, strict=strict)


def read_records(
    lines: Iterator[str],
    dialect: Dialect,
    path: Path,
    *,
    has_header: bool,
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the number of the last line and the cells of each record.

    The cells of an invalid record are None.

    Raises:
        TaskError: The header is invalid, or an invalid record spans several lines.
    """
    # Without strict mode, an unclosed quotation mark would include all following lines in a cell.
    reader = _create_reader(lines, dialect, strict=True)
    expects_header = has_header
    while True:
        first_line = reader.line_num + 1
        cells = None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if expects_header or reader.line_num > first_line:
                raise TaskError(
                    f"{path}, line {first_line:,}: the row that begins here cannot be split into "
                    f"cells (line {reader.line_num:,}: {error}); a cell that begins with a "
                    "quotation mark must end with one, and marks inside it must be doubled",
                ) from None
        if cells:
            # The header is the first record that is not blank.
            expects_header = False
        yield reader.line_num, cells
