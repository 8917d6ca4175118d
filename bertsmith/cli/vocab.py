"""``bertsmith vocab``: learn a WordPiece vocabulary, or extend a model's vocabulary."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli import corpus_options
from bertsmith.cli.app import GroupWithDefaultCommand, app, format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.errors import TokenizerError
from bertsmith.files import atomic_directory, check_directory_name

if TYPE_CHECKING:
    from bertsmith.text.vocabulary import LearnedVocabulary

group = typer.Typer(
    name="vocab",
    cls=GroupWithDefaultCommand,
    help="Learn a WordPiece vocabulary, or add words to a model's.\n\n"
    "`bertsmith vocab CORPUS... --out TOKENIZER` is short for `bertsmith vocab learn`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=format_examples(
        "bertsmith vocab my-text/ --size 16000 --out my-tokenizer",
        "bertsmith vocab extend my-run --words terms.txt --out my-model",
    ),
)
app.add_typer(group)


@group.command(
    "learn",
    epilog=format_examples(
        "bertsmith vocab my-text/ --size 16000 --out my-tokenizer",
        "bertsmith vocab corpus.jsonl.gz --cased --out my-tokenizer",
        "bertsmith vocab korean.txt --segment kiwi --cased --out my-tokenizer",
    ),
)
def learn(
    corpus: corpus_options.Corpus,
    out: Annotated[Path, typer.Option("--out", help="The tokenizer folder to write.")],
    size: Annotated[
        int,
        typer.Option(help="Vocabulary size; at least 110 entries, or 162 with --cased."),
    ] = 30522,
    cased: Annotated[
        bool, typer.Option("--cased", help="Keep capital letters. Default: lowercase.")
    ] = False,
    strip_accents: Annotated[
        bool, typer.Option("--strip-accents", help="Remove accents; Hangul is not changed.")
    ] = False,
    split_chinese: Annotated[
        bool,
        typer.Option(
            "--split-chinese/--no-split-chinese", help="Make each Chinese character a word."
        ),
    ] = True,
    segment: Annotated[
        str | None,
        typer.Option("--segment", help="Segment words into morphemes first: kiwi, for Korean."),
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(help="Minimum frequency of a pair of pieces to be merged.")
    ] = 2,
    coverage: Annotated[
        float, typer.Option(help="Share of the text's characters that the alphabet covers.")
    ] = 0.9999,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    force: corpus_options.Force = False,
    as_json: corpus_options.Json = False,
) -> None:
    """Learn a WordPiece vocabulary from text.

    Also reports how well the vocabulary fits held-out text. The same text always gives the same
    vocabulary. ASCII digits, letters and punctuation are always included.
    """
    from bertsmith.text import vocabulary
    from bertsmith.text.vocabulary import VocabularyOptions

    _check_overwrite(out, force)
    options = VocabularyOptions(
        size=size,
        cased=cased,
        strip_accents=strip_accents,
        split_chinese=split_chinese,
        segment=segment,
        threads=os.cpu_count() or 1,
        min_frequency=min_frequency,
        coverage=coverage,
    )
    reading_options = corpus_options.parse_corpus_options(text_format, field, on_error, deduplicate)
    with corpus_options.terminal_progress() as progress:
        learned = vocabulary.learn_vocabulary(
            corpus_options.find_sources(corpus), reading_options, options, progress
        )
    # Another process may have written a vocabulary in the meantime.
    _check_overwrite(out, force)
    with atomic_directory(out) as directory:
        learned.tokenizer.save(directory)
    if as_json:
        print_json(learned.to_json() | {"out": str(out)})
    sources = corpus_options.format_corpus(corpus, reading_options)
    _log_vocabulary(learned, size, out, sources)


def _check_overwrite(out: Path, force: bool) -> None:
    """Raise an error if ``out`` has no name, or exists and must not be overwritten."""
    from bertsmith.text.tokenizer_files import (
        BERTSMITH_FILE,
        TOKENIZER_CONFIG_FILE,
        TOKENIZER_FILE,
        VOCAB_FILE,
    )

    check_directory_name(out)
    if out.exists() and not out.is_dir():
        raise TokenizerError(f"{out}: this is a file; expected the name of a folder to write")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    # The files of a tokenizer may be overwritten.
    tokenizer_files = {BERTSMITH_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, VOCAB_FILE}
    if other_files := names - tokenizer_files:
        raise TokenizerError(
            f"{out}: this folder contains other files ({', '.join(sorted(other_files)[:3])}); "
            "choose a new folder"
        )
    if names and not force:
        raise TokenizerError(
            f"{out}: this folder contains a tokenizer; choose another folder or add --force"
        )


def _log_vocabulary(learned: "LearnedVocabulary", size: int, out: Path, sources: str) -> None:
    """Log how well the vocabulary fits the text, the output folder and the next command.

    Args:
        learned: The vocabulary.
        size: The size that the user asked for.
        out: The output folder.
        sources: The corpus, as it is written on the command line.
    """
    corpus_options.log_report(learned.corpus)
    vocab_size = learned.tokenizer.vocab_size
    if vocab_size < size:
        log(f"note: the text is too short for {size:,} entries; the vocabulary has {vocab_size:,}")
    log(
        "on held-out text:"
        if learned.has_held_out_sample
        else "on the training text (too few documents for held-out text):"
    )
    for line in learned.quality.lines():
        log(f"  {line}")
    log(f"wrote {out} ({vocab_size:,} entries)")
    log(f"next: bertsmith prepare {sources} --tokenizer {quote_path(out)} --out STORE")
