"""CSV and TSV: records of a text, the delimiter, and the number of columns."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bertsmith.errors import SettingsError, TaskError

TAB = "\t"
#: Cells can be long texts; csv's own limit is 128 KB.
_LONGEST_CELL = 2**27
#: Lines that are looked at for the delimiter and the number of columns.
_SAMPLE_LINES = 200
#: What may stand in a .csv file instead of the comma.
_OTHERS = (";", TAB, "|")
#: The share of the sampled records that another delimiter must split into as many cells each.
_CONSISTENT = 0.9
_NAMES = {"tab": TAB, "\\t": TAB, "comma": ",", "semicolon": ";"}


@dataclass(frozen=True)
class Dialect:
    """How records are written. quoted: as CSV; else a quotation mark is a plain character."""

    delimiter: str
    has_quotes: bool
    newline: str = "\n"


def parse_delimiter(text: str) -> str:
    """Return the delimiter that a user names, one character. Raises SettingsError."""
    delimiter = _NAMES.get(text, text)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise SettingsError(
            f"delimiter: expected one character, or tab, got {text!r}; give it in quotation "
            "marks, such as --delimiter ';'"
        )
    return delimiter


def open_records(
    lines: Iterator[str], *, tsv: bool, delimiter: str | None, header: bool
) -> tuple[Dialect, int | None, Iterator[str]]:
    """Return the dialect of a table, its number of columns without a header, and all its lines.

    tsv: the delimiter is a tab and nothing is quoted, as in GLUE's files. delimiter: of CSV;
    None: detected, a comma unless only another character splits the records evenly. The number
    of columns is the commonest among the first records, so that a damaged first one has no say.
    """
    csv.field_size_limit(_LONGEST_CELL)
    sample = list(islice(lines, _SAMPLE_LINES))
    newline = "\r\n" if sample and sample[0].endswith("\r\n") else "\n"
    if delimiter is not None:
        dialect = Dialect(delimiter, not (tsv and delimiter == TAB), newline)
    elif tsv:
        dialect = Dialect(TAB, has_quotes=False, newline=newline)
    else:
        dialect = Dialect(_detect(sample, header=header), has_quotes=True, newline=newline)
    counts = Counter(_cell_counts(sample, dialect))
    columns = counts.most_common(1)[0][0] if counts and not header else None
    return dialect, columns, chain(sample, lines)


def _detect(sample: Sequence[str], *, header: bool) -> str:
    shares = {}
    for delimiter in (",", *_OTHERS):
        counts = _cell_counts(sample, Dialect(delimiter, has_quotes=True))
        if not counts:
            return ","
        expected = counts[0] if header else Counter(counts).most_common(1)[0][0]
        if expected > 1:
            shares[delimiter] = counts.count(expected) / len(counts)
    if header and "," in shares:
        return ","
    best = max(shares, key=lambda name: shares[name], default=",")
    return best if shares.get(best, 0) >= _CONSISTENT else ","


def _cell_counts(sample: Sequence[str], dialect: Dialect) -> list[int]:
    """Return the number of cells of each sampled record that is not empty."""
    counts: list[int] = []
    records = _reader(iter(sample), dialect, strict=False)
    while True:
        try:
            cells = next(records)
        except StopIteration:
            return counts
        except csv.Error:
            continue
        if cells:
            counts.append(len(cells))


def _reader(lines: Iterator[str], dialect: Dialect, *, strict: bool) -> Any:
    if not dialect.has_quotes:
        return csv.reader(lines, delimiter=dialect.delimiter, quoting=csv.QUOTE_NONE)
    # Strict: else a quotation mark that is never closed would swallow the rest of the file.
    return csv.reader(lines, delimiter=dialect.delimiter, strict=strict)


def read_records(
    lines: Iterator[str], dialect: Dialect, path: Path, *, header: bool
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the last line of each record, and its cells; None for one that cannot be split.

    Raises TaskError where more lines than one are lost to it, or the header is.
    """
    reader = _reader(lines, dialect, strict=True)
    is_header = header
    while True:
        first, cells = reader.line_num + 1, None
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if is_header or reader.line_num > first:
                raise TaskError(
                    f"{path}, line {first:,}: the row that begins here cannot be split into cells "
                    f"(line {reader.line_num:,}: {error}); a cell that begins with a quotation "
                    "mark ends with one, and one inside it is written twice"
                ) from None
        is_header = is_header and not cells
        yield reader.line_num, cells
