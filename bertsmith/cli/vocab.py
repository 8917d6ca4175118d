"""``bertsmith vocab``: learn a WordPiece vocabulary from text, and the group of what else is done.

It never knows how one is learnt.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from bertsmith.cli import corpus_options
from bertsmith.cli.app import app
from bertsmith.cli.hints import quote_path

if TYPE_CHECKING:
    from bertsmith.text.vocabulary import LearnedVocabulary

#: The command that is meant where none is named.
_LEARN = "learn"


class _LearnUnlessNamed(TyperGroup):
    """``vocab CORPUS...`` is ``vocab learn CORPUS...``; a file named so is ``./extend``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name before arguments that begin with none."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_LEARN, *args]
        return super().parse_args(ctx, args)


group = typer.Typer(
    name="vocab",
    cls=_LearnUnlessNamed,
    help="Learn a WordPiece vocabulary from text, or add words to a model's.\n\n"
    "bertsmith vocab CORPUS... --out TOKENIZER is short for bertsmith vocab learn.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(group)


@group.command(_LEARN)
def learn(
    corpus: corpus_options.Corpus,
    out: Annotated[Path, typer.Option("--out", help="The folder to write the tokenizer to.")],
    size: Annotated[
        int, typer.Option(help="How many words, above 109 (161 with --cased).")
    ] = 30522,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capital letters.")] = False,
    strip_accents: Annotated[
        bool, typer.Option("--strip-accents", help="Take accents off (Hangul stays whole).")
    ] = False,
    split_chinese: Annotated[
        bool,
        typer.Option(
            "--split-chinese/--no-split-chinese", help="Make each Chinese character a word."
        ),
    ] = True,
    segment: Annotated[
        str | None, typer.Option("--segment", help="Part words beforehand: kiwi, for Korean.")
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(help="How often two pieces must meet to be joined.")
    ] = 2,
    coverage: Annotated[
        float, typer.Option(help="The share of characters that the vocabulary shall know.")
    ] = 0.9999,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    force: corpus_options.Force = False,
    as_json: corpus_options.Json = False,
) -> None:
    """Learn a WordPiece vocabulary from text, and tell how well it fits text held out.

    The same text gives the same vocabulary, byte for byte. ASCII digits, letters and punctuation
    are always in it.
    """
    from bertsmith.cli.console import print_json
    from bertsmith.files import atomic_directory
    from bertsmith.text import vocabulary
    from bertsmith.text.vocabulary import VocabularyOptions

    _refuse_existing(out, force)
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
    reading = corpus_options.parse_corpus_options(form, field, on_error, deduplicate)
    with corpus_options.terminal_progress() as bars:
        learnt = vocabulary.learn_vocabulary(
            corpus_options.find_sources(corpus), reading, options, bars
        )
    with atomic_directory(out) as folder:
        learnt.tokenizer.save(folder)
    if as_json:
        print_json(learnt.to_json() | {"out": str(out)})
    _tell(learnt, size, out, corpus)


def _refuse_existing(out: Path, force: bool) -> None:
    """Raise TokenizerError if something is at ``out`` that is not to be replaced."""
    from bertsmith.errors import TokenizerError
    from bertsmith.text.tokenizer_files import (
        BERTSMITH_FILE,
        TOKENIZER_CONFIG_FILE,
        TOKENIZER_FILE,
        VOCAB_FILE,
    )

    if out.exists() and not out.is_dir():
        raise TokenizerError(f"{out}: a file is there; expected the name of a folder to write")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if others := names - {TOKENIZER_CONFIG_FILE, BERTSMITH_FILE, TOKENIZER_FILE, VOCAB_FILE}:
        raise TokenizerError(
            f"{out}: this folder holds other files ({', '.join(sorted(others)[:3])}); "
            "choose a new folder"
        )
    if names and not force:
        raise TokenizerError(
            f"{out}: a tokenizer is there already; choose another folder or add --force"
        )


def _tell(learnt: "LearnedVocabulary", size: int, out: Path, corpus: list[str]) -> None:
    from bertsmith.cli.console import log

    corpus_options.log_report(learnt.corpus)
    words = learnt.tokenizer.vocab_size
    if words < size:
        log(f"note: the text was enough for {words:,} words only, not the {size:,} asked for")
    log("on held-out text:" if learnt.held_out else "on the text itself (too few documents):")
    for line in learnt.quality.lines():
        log(f"  {line}")
    log(f"wrote {out} ({words:,} words)")
    texts = "CORPUS..." if "-" in corpus else " ".join(map(quote_path, corpus))
    log(f"next: bertsmith prepare {texts} --tokenizer {quote_path(out)} --out STORE")
