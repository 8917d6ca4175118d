"""``bertsmith corpus``: look at text, bring it into one form, gather some.

It never knows the forms of text.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from bertsmith.cli import corpus_options
from bertsmith.cli.app import app
from bertsmith.cli.hints import quote_path

if TYPE_CHECKING:
    from bertsmith.cli.console import TerminalProgress
    from bertsmith.text.corpus import Document
    from bertsmith.text.docstrings import ModuleProse

group = typer.Typer(
    name="corpus",
    help="Look at text, bring it into one form, or gather some that every machine has.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(group)

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The file to write: .jsonl, or .txt for a sentence a line; packed if it ends in .gz, "
        ".xz, .bz2 or .zst. Without it, JSON lines on stdout.",
    ),
]


@group.command()
def show(
    corpus: corpus_options.Corpus,
    documents: Annotated[
        int, typer.Option("--documents", "-n", min=0, help="How many to show.")
    ] = 3,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    language: corpus_options.Language = "en",
) -> None:
    """Show the first documents as they are read: a sentence a line."""
    from bertsmith.cli.console import print_line
    from bertsmith.text.corpus import read_documents
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(form, field, on_error, "none")
    for document in islice(read_documents(corpus_options.find_sources(corpus), options), documents):
        print_line(f"== {document.source}, document {document.number}")
        for sentence in split_sentences(document.text, language, document.presplit):
            print_line(sentence)
        print_line("")


@group.command()
def stats(
    corpus: corpus_options.Corpus,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    language: corpus_options.Language = "en",
    as_json: corpus_options.Json = False,
) -> None:
    """Count documents, sentences, words and characters, and tell what could not be read."""
    from bertsmith.cli.console import print_json, print_line
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(form, field, on_error, deduplicate)
    found = corpus_options.find_sources(corpus)
    report = CorpusReport()
    sentences = words = longest = 0
    with corpus_options.terminal_progress() as bars:
        bars.start("Reading", None, "characters")
        for document in read_documents(found, options, report):
            for sentence in split_sentences(document.text, language, document.presplit):
                sentences += 1
                words += len(sentence.split())
            longest = max(longest, len(document.text))
            bars.advance(len(document.text))
    report.require_documents()
    if as_json:
        more = {"sources": len(found), "sentences": sentences, "words": words}
        print_json(more | {"longest_document": longest} | report.to_json())
        return
    for line in report.lines():
        print_line(line)
    print_line(f"{sentences:,} sentences, {words:,} words between blanks")
    print_line(f"longest document: {longest:,} characters")
    forms = ", ".join(f"{count:,} {name}" for name, count in report.formats.items())
    print_line(f"read as: {forms} (of {len(found):,} sources)")


@group.command()
def convert(
    corpus: corpus_options.Corpus,
    out: Out = None,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    language: corpus_options.Language = "en",
    force: corpus_options.Force = False,
) -> None:
    """Bring text in any form into JSON lines, or into a sentence a line."""
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.export import write_json_lines, write_sentences
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(form, field, on_error, deduplicate)
    report = CorpusReport()
    with _output(out, force) as (file, written), corpus_options.terminal_progress() as bars:
        documents = read_documents(corpus_options.find_sources(corpus), options, report)
        bars.start("Converting", None, "documents")
        counted = _counted(documents, bars)
        if written == "sentences":
            write_sentences(
                file, (split_sentences(one.text, language, one.presplit) for one in counted)
            )
        else:
            write_json_lines(
                file,
                ({"id": f"{one.source}:{one.number}", "text": one.text} for one in counted),
            )
        report.require_documents()
    corpus_options.log_report(report)
    _next(out)


@group.command()
def docstrings(
    out: Out = None,
    processes: Annotated[
        int | None,
        typer.Option(help="How many to read with; as many as cores by default."),
    ] = None,
    force: corpus_options.Force = False,
) -> None:
    """Gather real English: the documentation of Python's library and the installed packages.

    A module is a document. Code, tables, examples and markup are left out; no package is run.
    """
    from bertsmith.cli.console import log
    from bertsmith.text.docstrings import read_documentation
    from bertsmith.text.export import module_to_document, write_json_lines, write_sentences

    counts = [0, 0, 0]

    def told(modules: "Iterator[ModuleProse]") -> "Iterator[ModuleProse]":
        for module in modules:
            sentences = [sentence for part in module.paragraphs for sentence in part]
            counts[0] += 1
            counts[1] += len(sentences)
            counts[2] += sum(map(len, sentences))
            yield module

    with _output(out, force) as (file, written), corpus_options.terminal_progress() as bars:
        modules = told(read_documentation(None, processes or os.cpu_count() or 1, bars))
        if written == "sentences":
            write_sentences(file, (chain(*module.paragraphs) for module in modules))
        else:
            write_json_lines(file, (module_to_document(module) for module in modules))
    log(f"{counts[0]:,} modules, {counts[1]:,} sentences, {counts[2]:,} characters")
    _next(out)


@contextmanager
def _output(out: Path | None, force: bool) -> Iterator[tuple[IO[str], str]]:
    """Open the file to write, or stdout; also tell in what form to write."""
    from bertsmith.text.export import choose_output_format, open_atomic

    if out is None:
        yield sys.stdout, "jsonl"
        sys.stdout.flush()
        return
    corpus_options.check_overwrite(out, force)
    form = choose_output_format(out)
    with open_atomic(out) as file:
        yield file, form


def _counted(documents: "Iterator[Document]", bars: "TerminalProgress") -> "Iterator[Document]":
    for document in documents:
        yield document
        bars.advance(1)


def _next(out: Path | None) -> None:
    from bertsmith.cli.console import log

    if out is not None:
        log(f"wrote {out}")
        log(f"next: bertsmith vocab {quote_path(out)} --out TOKENIZER")
