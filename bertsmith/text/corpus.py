"""Reads the documents of a corpus, one after another, from text in any supported format."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bertsmith.errors import CorpusError
from bertsmith.plurals import count_noun
from bertsmith.settings import Settings
from bertsmith.text.deduplication import SeenTexts
from bertsmith.text.raw_text import ErrorHandler, RawDocument
from bertsmith.text.readers import read_source
from bertsmith.text.sources import Source, find_sources

__all__ = [
    "CorpusOptions",
    "CorpusReport",
    "Document",
    "Source",
    "find_sources",
    "read_documents",
]

#: Maximum number of skipped errors that a report lists. Further errors are only counted.
MAX_EXAMPLES = 20

Format = Literal["auto", "sentences", "prose", "markdown", "jsonl", "wikiextractor", "parquet"]


@dataclass(frozen=True)
class Document:
    """A document of a corpus.

    Attributes:
        text: Text with one paragraph per line, or one sentence per line if ``presplit``.
        source: Name of the document's source.
        number: Number of the document in its source, from 0.
        presplit: Whether each line is a sentence.
    """

    text: str
    source: str
    number: int
    presplit: bool = False


class CorpusOptions(Settings):
    """How a corpus is read.

    Attributes:
        format: "auto" detects the format from names and content. "jsonl", "wikiextractor" and
            "parquet" are file formats. "sentences" (one sentence per line, blank lines between
            documents), "prose" and "markdown" are layouts of plain text, and of the text in JSON
            Lines and Parquet.
        field: Name of the text field in JSON Lines and Parquet.
        on_error: "stop" raises the first error. "skip" skips and counts the documents, lines or
            files with an error.
        deduplicate: Whether exact repetitions of documents, of paragraphs, or of both are left
            out. Documents with one sentence per line have no paragraphs.
    """

    format: Format = "auto"
    field: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    deduplicate: Literal["none", "documents", "paragraphs", "both"] = "none"


@dataclass
class CorpusReport:
    """Counts of what was read and what was left out.

    Attributes:
        documents: Documents returned.
        characters: Unicode code points in the returned documents.
        repeated_documents: Documents left out as repetitions.
        repeated_paragraphs: Paragraphs left out as repetitions.
        empty_documents: Documents left out because they have no text.
        formats: Number of sources by detected format.
        skipped: Number of skipped errors by reason.
        examples: Messages of the first skipped errors.
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
        """Count a skipped error."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)

    def add(self, other: "CorpusReport") -> None:
        """Add the counts of another report, for example that of another worker."""
        for name in COUNT_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for totals, counts in ((self.formats, other.formats), (self.skipped, other.skipped)):
            for key, count in counts.items():
                totals[key] = totals.get(key, 0) + count
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]

    def require_documents(self) -> None:
        """Raise CorpusError if no document was read; the message has the counts of this report."""
        if not self.documents:
            details = "; ".join(map(str.strip, self.lines()[1:])) or "the sources hold no text"
            raise CorpusError(f"no document was found: {details}; give files with text")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as human-readable lines."""
        lines = [
            f"{count_noun(self.documents, 'document')}, {count_noun(self.characters, 'character')}"
        ]
        omissions = (
            (self.empty_documents, "document without text", "documents without text"),
            (self.repeated_documents, "repeated document", "repeated documents"),
            (self.repeated_paragraphs, "repeated paragraph", "repeated paragraphs"),
        )
        lines += [
            f"left out {count_noun(count, singular, plural)}"
            for count, singular, plural in omissions
            if count
        ]
        lines += [f"skipped {count:,}: {reason}" for reason, count in self.skipped.items()]
        return lines + [f"  {example}" for example in self.examples]


#: The fields of a CorpusReport that are plain numbers.
COUNT_FIELDS = (
    "documents",
    "characters",
    "repeated_documents",
    "repeated_paragraphs",
    "empty_documents",
)


def read_documents(
    sources: Iterable[Source],
    options: CorpusOptions | None = None,
    report: CorpusReport | None = None,
) -> Iterator[Document]:
    """Yield the documents of the sources, in order.

    Repetitions are only detected within one call, so the whole corpus must be read at once to
    deduplicate it.

    Args:
        sources: Sources to read.
        options: How to read the sources; None for the defaults.
        report: Report that counts what is read and left out.

    Raises:
        CorpusError: A source cannot be read, and ``on_error`` is "stop". The message names the
            file and the line or byte.
    """
    options = CorpusOptions() if options is None else options
    report = CorpusReport() if report is None else report
    deduplicator = _Deduplicator(options, report)
    for source in sources:
        errors = ErrorHandler(report.count_skipped, skip=options.on_error == "skip")
        with closing(read_source(source, options.format, options.field, errors)) as documents:
            yield from _process_documents(source, documents, deduplicator, report)


def _process_documents(
    source: Source,
    raw_documents: Iterator[RawDocument],
    deduplicator: "_Deduplicator",
    report: CorpusReport,
) -> Iterator[Document]:
    """Number the documents of a source, leave out empty and repeated ones, and count them."""
    for number, raw_document in enumerate(raw_documents):
        if number == 0:
            report.formats[raw_document.format] = report.formats.get(raw_document.format, 0) + 1
        text = raw_document.text.strip()
        if not text:
            report.empty_documents += 1
            continue
        text = deduplicator.remove_repetitions(text, presplit=raw_document.presplit)
        if not text:
            continue
        report.documents += 1
        report.characters += len(text)
        yield Document(text, source.name, number, raw_document.presplit)


class _Deduplicator:
    """Removes repeated documents and paragraphs, according to the options."""

    def __init__(self, options: CorpusOptions, report: CorpusReport) -> None:
        scope = options.deduplicate
        self._documents = SeenTexts() if scope in {"documents", "both"} else None
        self._paragraphs = SeenTexts() if scope in {"paragraphs", "both"} else None
        self._report = report

    def remove_repetitions(self, text: str, *, presplit: bool) -> str:
        """Return the text of a document without repetitions; "" if all of the text is repeated.

        Args:
            text: Text of the document.
            presplit: Whether each line is a sentence instead of a paragraph.
        """
        if self._documents is not None and not self._documents.add(text):
            self._report.repeated_documents += 1
            return ""
        # A sentence such as "Yes." may occur in many documents.
        if self._paragraphs is None or presplit:
            return text
        new_lines = []
        for line in text.split("\n"):
            if not line.strip() or self._paragraphs.add(line.strip()):
                new_lines.append(line)
            else:
                self._report.repeated_paragraphs += 1
        new_text = "\n".join(new_lines).strip()
        if not new_text:
            self._report.repeated_documents += 1
        return new_text
