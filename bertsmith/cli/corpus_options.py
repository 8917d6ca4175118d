"""The options that every verb which reads text has in common.

It never knows what the text is read for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bertsmith.cli.console import TerminalProgress
    from bertsmith.text.corpus import CorpusOptions, CorpusReport, Source

Corpus = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS...",
        help="Text: files, folders, globs, or - for standard input. .txt, .md, .jsonl, "
        "WikiExtractor output or .parquet; each also packed by gzip, xz, bzip2 or zstd.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="auto; sentences (a sentence a line, a blank line between documents), prose or "
        "markdown for how text is laid out; jsonl, wikiextractor or parquet for what a file is.",
    ),
]
Field = Annotated[str, typer.Option("--field", help="Where the text is in JSON lines and Parquet.")]
OnError = Annotated[
    str, typer.Option("--on-error", help="stop at text that cannot be read, or skip and count it.")
]
Deduplicate = Annotated[
    str,
    typer.Option(
        "--deduplicate",
        help="Leave out exact repetitions: none, documents, paragraphs, or both.",
    ),
]


def _language(code: str) -> str:
    from bertsmith.text.sentences import check_language

    return check_language(code)


Language = Annotated[
    str,
    typer.Option(
        "--language", help="The language's ISO 639-1 code, for sentence borders.",
        callback=_language,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Put the result on stdout as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]


def parse_corpus_options(form: str, field: str, on_error: str, deduplicate: str) -> "CorpusOptions":
    """Check the options and return them as settings; SettingsError names a wrong one."""
    from bertsmith.text.corpus import CorpusOptions

    values = {"format": form, "field": field, "on_error": on_error, "deduplicate": deduplicate}
    return CorpusOptions.parse(values, "options")


def find_sources(corpus: list[str]) -> "list[Source]":
    """Return the sources that the arguments name; say which files were passed over."""
    from bertsmith.cli.console import log
    from bertsmith.text.corpus import find_sources as sources

    ignored: list[str] = []
    result = sources(corpus, ignored)
    if ignored:
        more = f" and {len(ignored) - 1:,} more" if len(ignored) > 1 else ""
        log(
            f"note: passed over {ignored[0]}{more}: by their names no text (name them to read them)"
        )
    return result


@contextmanager
def terminal_progress() -> "Iterator[TerminalProgress]":
    """Yield progress bars that end with the block, well or not."""
    from bertsmith.cli.console import TerminalProgress

    shown = TerminalProgress()
    try:
        yield shown
    finally:
        shown.finish()


def log_report(report: "CorpusReport") -> None:
    """Say what was read and what was left out."""
    from bertsmith.cli.console import log

    for line in report.lines():
        log(line)


def check_overwrite(path: Path, force: bool) -> None:
    """Raise CorpusError if a file stands at ``path`` and may not be replaced."""
    from bertsmith.errors import CorpusError

    if path.is_dir():
        raise CorpusError(f"{path}: a folder is there; expected the name of a file to write")
    if path.exists() and not force:
        raise CorpusError(f"{path}: a file is there already; choose another name or add --force")
