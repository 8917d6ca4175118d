"""Options and helpers shared by the commands that read a text corpus."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.console import TerminalProgress, log
from bertsmith.cli.hints import quote_path
from bertsmith.errors import CorpusError

if TYPE_CHECKING:
    from bertsmith.text.corpus import CorpusOptions, CorpusReport, Source

Corpus = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS",
        help="Text: files, folders, globs, or - for standard input. Formats: .txt, .md, .jsonl, "
        ".parquet and WikiExtractor output, optionally compressed with gzip, xz, bzip2 or zstd.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="Input format: sentences (one per line, a blank line between documents), prose, "
        "markdown, jsonl, wikiextractor or parquet; auto detects it.",
    ),
]
Field = Annotated[
    str, typer.Option("--field", help="Name of the text field in JSON lines and Parquet.")
]
OnError = Annotated[
    str,
    typer.Option(
        "--on-error", help="What to do about unreadable text: stop, or skip it and count it."
    ),
]
Deduplicate = Annotated[
    str,
    typer.Option(
        "--deduplicate",
        help="Remove exact duplicates: none, documents, paragraphs, or both.",
    ),
]


def check_optional_language(code: str | None) -> str | None:
    """Return the code of a language, or None if the option is not given."""
    from bertsmith.text.sentences import check_language

    return None if code is None else check_language(code)


Language = Annotated[
    str,
    typer.Option(
        "--language",
        help="ISO 639-1 code of the language, used to split sentences.",
        callback=check_optional_language,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]


def parse_corpus_options(
    text_format: str, field: str, on_error: str, deduplicate: str
) -> "CorpusOptions":
    """Return the corpus options as settings. Raises SettingsError for an invalid value."""
    from bertsmith.text.corpus import CorpusOptions

    values = {
        "format": text_format,
        "field": field,
        "on_error": on_error,
        "deduplicate": deduplicate,
    }
    return CorpusOptions.parse(values, "options")


def find_sources(corpus: list[str]) -> "list[Source]":
    """Return the sources that the CORPUS arguments name; log which files are ignored."""
    from bertsmith.text import sources

    ignored_files: list[str] = []
    corpus_sources = sources.find_sources(corpus, ignored_files)
    if ignored_files:
        num_others = len(ignored_files) - 1
        others = f" and {num_others:,} more" if num_others else ""
        log(
            f"note: ignored {ignored_files[0]}{others}: unknown file name suffix, broken link, "
            "or an output of bertsmith; to read it, pass its name as an argument"
        )
    return corpus_sources


def format_corpus(corpus: list[str], options: "CorpusOptions | None") -> str:
    """Return the CORPUS arguments and the options to read them, for a suggested command.

    Args:
        corpus: Arguments; empty if they are not known.
        options: How the corpus was read; None for the defaults.
    """
    # Standard input cannot be read again.
    sources = " ".join(map(quote_path, corpus)) if corpus and "-" not in corpus else "CORPUS..."
    changes = {} if options is None else options.model_dump(exclude_defaults=True)
    return sources + "".join(
        f" --{name.replace('_', '-')} {quote_path(value)}" for name, value in changes.items()
    )


@contextmanager
def terminal_progress() -> Iterator[TerminalProgress]:
    """Yield a progress bar and finish it at the end of the block, also after an error."""
    progress = TerminalProgress()
    try:
        yield progress
    finally:
        progress.finish()


def log_report(report: "CorpusReport") -> None:
    """Log how much text was read and skipped."""
    for line in report.lines():
        log(line)


def check_overwrite(path: Path, force: bool) -> None:
    """Raise CorpusError if ``path`` is a folder, or a file that ``force`` does not replace."""
    if path.is_dir():
        raise CorpusError(f"{path}: this is a folder; expected the name of a file to write")
    if path.exists() and not force:
        raise CorpusError(f"{path}: file exists; choose another name or add --force")
