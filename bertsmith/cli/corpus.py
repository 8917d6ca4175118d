"""``bertsmith corpus``: show, count, convert or collect text."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from bertsmith.cli import corpus_options
from bertsmith.cli.app import CommandGroup, app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.hints import quote_path
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.text.corpus import Document
    from bertsmith.text.docstrings import ModuleProse

group = typer.Typer(
    name="corpus",
    cls=CommandGroup,
    help="Show, count, convert or collect text.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=format_examples(
        "bertsmith corpus stats my-text/",
        "bertsmith corpus show my-text/ --documents 1",
        "bertsmith corpus convert wiki.parquet --out wiki.jsonl.gz",
    ),
)
app.add_typer(group)

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The file to write: .jsonl, or .txt for one sentence per line; compressed if its name "
        "ends in .gz, .xz, .bz2 or .zst. Without --out, JSON lines are printed.",
    ),
]


@group.command(
    epilog=format_examples(
        "bertsmith corpus show my-text/",
        "bertsmith corpus show wiki.parquet --field text --documents 1",
    )
)
def show(
    corpus: corpus_options.Corpus,
    documents: Annotated[
        int, typer.Option("--documents", "-n", min=0, help="Number of documents to show.")
    ] = 3,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    language: corpus_options.Language = "en",
) -> None:
    """Show the first documents, one sentence per line."""
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(text_format, field, on_error, "none")
    sources = corpus_options.find_sources(corpus)
    report = CorpusReport()
    for document in islice(read_documents(sources, options, report), documents):
        print_line(f"== {document.source}, document {document.number}")
        for sentence in split_sentences(document.text, language, document.presplit):
            print_line(sentence)
        print_line("")
    if documents:
        report.require_documents()
    if report.skipped:
        corpus_options.log_report(report)


@group.command(
    epilog=format_examples(
        "bertsmith corpus stats my-text/",
        "bertsmith corpus stats my-text/ --deduplicate both --json",
    )
)
def stats(
    corpus: corpus_options.Corpus,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    language: corpus_options.Language = "en",
    as_json: corpus_options.Json = False,
) -> None:
    """Count documents, sentences, words and characters.

    Words are separated by whitespace. Also shows how much text is duplicate or unreadable.
    """
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(text_format, field, on_error, deduplicate)
    sources = corpus_options.find_sources(corpus)
    report = CorpusReport()
    num_sentences = num_words = max_document_length = 0
    with corpus_options.terminal_progress() as progress:
        progress.start("Reading", None, "characters")
        for document in read_documents(sources, options, report):
            for sentence in split_sentences(document.text, language, document.presplit):
                num_sentences += 1
                num_words += len(sentence.split())
            max_document_length = max(max_document_length, len(document.text))
            progress.advance(len(document.text))
    report.require_documents()
    if as_json:
        counts = {"sources": len(sources), "sentences": num_sentences, "words": num_words}
        print_json(counts | {"longest_document": max_document_length} | report.to_json())
        return
    for line in report.lines():
        print_line(line)
    print_line(
        f"{count_noun(num_sentences, 'sentence')}, "
        f"{count_noun(num_words, 'whitespace-separated word')}"
    )
    print_line(f"longest document: {count_noun(max_document_length, 'character')}")
    formats = ", ".join(f"{count:,} {name}" for name, count in report.formats.items())
    print_line(f"formats: {formats} (of {count_noun(len(sources), 'source')})")


@group.command(
    epilog=format_examples(
        "bertsmith corpus convert my-text/ --out corpus.jsonl",
        "bertsmith corpus convert wiki.parquet --deduplicate both --out wiki.txt.zst",
    )
)
def convert(
    corpus: corpus_options.Corpus,
    out: Out = None,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    language: corpus_options.Language = "en",
    force: corpus_options.Force = False,
) -> None:
    """Convert text to JSON lines, or to one sentence per line."""
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.export import write_json_lines, write_sentences
    from bertsmith.text.sentences import split_sentences

    options = corpus_options.parse_corpus_options(text_format, field, on_error, deduplicate)
    report = CorpusReport()
    with (
        _open_output(out, force) as (file, out_format),
        corpus_options.terminal_progress() as progress,
    ):
        documents = read_documents(corpus_options.find_sources(corpus), options, report)
        progress.start("Converting", None, "documents")
        documents = _advance_per_document(documents, progress)
        if out_format == "sentences":
            sentences_of_documents = (
                split_sentences(document.text, language, document.presplit)
                for document in documents
            )
            write_sentences(file, sentences_of_documents)
        else:
            json_documents = (
                {"id": f"{document.source}:{document.number}", "text": document.text}
                for document in documents
            )
            write_json_lines(file, json_documents)
        report.require_documents()
    corpus_options.log_report(report)
    _log_next_command(out)


@group.command(
    epilog=format_examples(
        "bertsmith corpus docstrings --out corpus.jsonl",
        "bertsmith corpus docstrings --out corpus.txt.gz --processes 2",
    )
)
def docstrings(
    out: Out = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes. Default: one per core.", min=1)
    ] = None,
    force: corpus_options.Force = False,
) -> None:
    """Collect English text from docstrings of installed packages.

    Each module of the standard library and the installed packages is a document. Code, tables,
    examples and markup are removed. No package is imported.
    """
    from bertsmith.text.docstrings import read_documentation
    from bertsmith.text.export import module_to_document, write_json_lines, write_sentences

    num_modules = num_sentences = num_characters = 0

    def count_modules(modules: "Iterator[ModuleProse]") -> "Iterator[ModuleProse]":
        """Yield the modules and count their sentences and characters."""
        nonlocal num_modules, num_sentences, num_characters
        for module in modules:
            sentences = [sentence for paragraph in module.paragraphs for sentence in paragraph]
            num_modules += 1
            num_sentences += len(sentences)
            num_characters += sum(map(len, sentences))
            yield module

    with (
        _open_output(out, force) as (file, out_format),
        corpus_options.terminal_progress() as progress,
    ):
        num_processes = processes or os.cpu_count() or 1
        modules = count_modules(read_documentation(None, num_processes, progress))
        if out_format == "sentences":
            write_sentences(file, (chain(*module.paragraphs) for module in modules))
        else:
            write_json_lines(file, (module_to_document(module) for module in modules))
    log(
        f"{count_noun(num_modules, 'module')}, {count_noun(num_sentences, 'sentence')}, "
        f"{count_noun(num_characters, 'character')}"
    )
    _log_next_command(out)


@contextmanager
def _open_output(out: Path | None, force: bool) -> Iterator[tuple[IO[str], str]]:
    """Yield the output file and its format; stdout and JSON lines if ``out`` is None.

    Raises CorpusError if ``out`` must not be overwritten.
    """
    from bertsmith.text.export import choose_output_format, open_atomic

    if out is None:
        yield sys.stdout, "jsonl"
        sys.stdout.flush()
        return
    corpus_options.check_overwrite(out, force)
    out_format = choose_output_format(out)
    with open_atomic(out) as file:
        yield file, out_format


def _advance_per_document(
    documents: "Iterator[Document]", progress: TerminalProgress
) -> "Iterator[Document]":
    """Yield the documents and advance the progress bar by one for each."""
    for document in documents:
        yield document
        progress.advance(1)


def _log_next_command(out: Path | None) -> None:
    """Log the path of the output file and a command that reads it, unless ``out`` is None."""
    from bertsmith.text.export import choose_output_format

    if out is None:
        return
    log(f"wrote {out}")
    # Documents of a single sentence would be detected as the paragraphs of a document of prose.
    options = " --format sentences" if choose_output_format(out) == "sentences" else ""
    log(f"next: bertsmith vocab {quote_path(out)}{options} --out TOKENIZER")
