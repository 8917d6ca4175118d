"""Reads documents, one after another, from text in any of the usual forms.

It never knows what becomes of the documents, and never holds more than one of them.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bertsmith.errors import CorpusError
from bertsmith.settings import Settings
from bertsmith.text.deduplication import SeenTexts
from bertsmith.text.raw_text import ErrorHandler, RawDocument
from bertsmith.text.readers import read_source
from bertsmith.text.sources import Source, find_sources

__all__ = ["CorpusOptions", "CorpusReport", "Document", "Source", "find_sources", "read_documents"]

#: Places named for people; more are only counted.
MAX_EXAMPLES = 20

Format = Literal["auto", "sentences", "prose", "markdown", "jsonl", "wikiextractor", "parquet"]


@dataclass(frozen=True)
class Document:
    """A document: its paragraphs on lines, or its sentences on lines if ``presplit``.

    ``source`` is the name of its source; ``number`` counts the source's documents from 0.
    """

    text: str
    source: str
    number: int
    presplit: bool = False


class CorpusOptions(Settings):
    """How a corpus is read.

    ``format``: "auto" tells it from names and content; "jsonl", "wikiextractor" and "parquet" say
    what a file is; "sentences" (a sentence a line, a blank line between documents), "prose" and
    "markdown" say how the text is laid out, also inside JSON lines and Parquet.
    ``field``: the name of the text in JSON lines and Parquet.
    ``on_error``: stop at the first fault, or skip the document or file, count it and go on.
    ``deduplicate``: leave out exact repetitions of documents, of paragraphs, or of both.
    """

    format: Format = "auto"
    field: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    deduplicate: Literal["none", "documents", "paragraphs", "both"] = "none"


@dataclass
class CorpusReport:
    """What was read and what was left out; reports of several workers can be added up.

    ``characters`` counts Unicode code points of the documents given out; ``formats`` sources by
    what they turned out to be; ``skipped`` faults by reason; ``examples`` the first places.
    """

    documents: int = 0
    characters: int = 0
    repeated_documents: int = 0
    repeated_paragraphs: int = 0
    empty_documents: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def count_skipped(self, reason: str, example: str) -> None:
        """Count a fault that was passed over."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)

    def add(self, other: "CorpusReport") -> None:
        """Add the counts of ``other`` to this report."""
        for name in COUNT_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.formats, other.formats), (self.skipped, other.skipped)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]

    def require_documents(self) -> None:
        """Raise CorpusError if nothing was read, saying what was met instead."""
        if not self.documents:
            met = "; ".join(self.lines()[1:]) or "the sources hold no text"
            raise CorpusError(f"no document was found: {met}")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report for people, a fact a line; faults with their first places."""
        lines = [f"{self.documents:,} documents, {self.characters:,} characters"]
        counted = (
            (self.empty_documents, "documents without text left out"),
            (self.repeated_documents, "repeated documents left out"),
            (self.repeated_paragraphs, "repeated paragraphs left out"),
        )
        lines += [f"{count:,} {what}" for count, what in counted if count]
        lines += [f"skipped {count:,}: {reason}" for reason, count in self.skipped.items()]
        return lines + [f"  {example}" for example in self.examples]


#: The plain counts of a Report.
COUNT_FIELDS = (
    "documents",
    "characters",
    "repeated_documents",
    "repeated_paragraphs",
    "empty_documents",
)


def read_documents(
    found: Iterable[Source],
    options: CorpusOptions | None = None,
    report: CorpusReport | None = None,
) -> Iterator[Document]:
    """Yield the documents of the sources in order, as a stream; what was met goes to ``report``.

    A document without text is counted and left out. Repetitions are told within this one call:
    to leave them out of a whole corpus, read it in one process. Raises CorpusError, which names
    the file and the line or byte, for whatever cannot be read (unless ``on_error`` is "skip").
    """
    options = CorpusOptions() if options is None else options
    report = CorpusReport() if report is None else report
    unrepeated = _Unrepeated(options, report)
    for source in found:
        faults = ErrorHandler(options.on_error == "skip", report.count_skipped)
        with closing(read_source(source, options.format, options.field, faults)) as stream:
            yield from _documents(source, stream, unrepeated, report)


def _documents(
    source: Source, stream: Iterator[RawDocument], unrepeated: "_Unrepeated", report: CorpusReport
) -> Iterator[Document]:
    for number, raw in enumerate(stream):
        if number == 0:
            report.formats[raw.format] = report.formats.get(raw.format, 0) + 1
        text = raw.text.strip()
        if not text:
            report.empty_documents += 1
            continue
        text = unrepeated.keep(text)
        if not text:
            continue
        report.documents += 1
        report.characters += len(text)
        yield Document(text, source.name, number, raw.presplit)


class _Unrepeated:
    """Leaves out what was seen before, as the options ask."""

    def __init__(self, options: CorpusOptions, report: CorpusReport) -> None:
        wanted = options.deduplicate
        self._documents = SeenTexts() if wanted in {"documents", "both"} else None
        self._paragraphs = SeenTexts() if wanted in {"paragraphs", "both"} else None
        self._report = report

    def keep(self, text: str) -> str:
        """Return what of ``text`` is new; "" when nothing is."""
        if self._documents is not None and not self._documents.add(text):
            self._report.repeated_documents += 1
            return ""
        if self._paragraphs is None:
            return text
        kept = []
        for line in text.split("\n"):
            if not line.strip() or self._paragraphs.add(line.strip()):
                kept.append(line)
            else:
                self._report.repeated_paragraphs += 1
        result = "\n".join(kept).strip()
        if not result:
            self._report.repeated_documents += 1
        return result
