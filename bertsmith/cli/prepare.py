"""``bertsmith prepare``: from text to a token store.

It never knows how text is read or stored, only how to ask for it and what to say afterwards.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli import corpus_options
from bertsmith.cli.app import app
from bertsmith.cli.hints import quote_path


@app.command()
def prepare(
    corpus: corpus_options.Corpus,
    tokenizer: Annotated[
        Path,
        typer.Option(help="What `bertsmith vocab` wrote, a vocab.txt, a model, a RUN or a hub id."),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the store.")],
    language: corpus_options.Language = "en",
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Share of the tokens held out; by default 1 %, and up to 5 % of a small corpus.",
            min=0,
            max=0.99,
        ),
    ] = None,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    workers: Annotated[
        int | None, typer.Option(help="Processes at most; by default one a core.", min=1)
    ] = None,
    as_json: corpus_options.Json = False,
) -> None:
    """Turn text into a token store, once; training draws from it for ever.

    The same command again goes on where a stopped one left off.
    """
    # The workers inherit it: one process a core is threads enough.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from bertsmith.cli.console import log, print_json
    from bertsmith.data import prepare as data
    from bertsmith.data.plan import PrepareOptions
    from bertsmith.text.wordpiece import Tokenizer

    reading = corpus_options.parse_corpus_options(form, field, on_error, deduplicate)
    options = PrepareOptions(language=language, held_out=held_out, corpus=reading)
    words = Tokenizer.load(_place(tokenizer))
    with corpus_options.terminal_progress() as bars:
        manifest = data.prepare(
            corpus_options.find_sources(corpus), words, out, options, bars, workers
        )
    for line in data.summarize_store(manifest):
        log(line)
    log(f"wrote {out}")
    if manifest.splits["heldout"].documents:
        log(f"next: bertsmith pretrain --data {quote_path(out)} --out RUN")
    if as_json:
        print_json(manifest.model_dump(mode="json"))


def _place(tokenizer: Path) -> Path:
    """Return where a tokenizer's files stand; of a RUN or a hub id, in its model."""
    from bertsmith.text.tokenizer_files import find_vocabulary_file

    if find_vocabulary_file(tokenizer) is not None:
        return tokenizer
    from bertsmith.bundle.directory import locate_tokenizer

    return locate_tokenizer(tokenizer)
