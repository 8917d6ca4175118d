"""``bertsmith prepare``: tokenize text into a token store."""

import os
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli import corpus_options
from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path


@app.command(
    epilog=format_examples(
        "bertsmith prepare my-text/ --tokenizer my-tokenizer --out my-store",
        "bertsmith prepare wiki.jsonl.gz --tokenizer google-bert/bert-base-uncased \\\n"
        "      --held-out 0.05 --out wiki-store",
    )
)
def prepare(
    corpus: corpus_options.Corpus,
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="A folder written by `bertsmith vocab`, a vocab.txt, a model directory, a run "
            "directory, the name of a reference model, or a Hugging Face Hub id."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The token store (a folder) to write.")],
    language: Annotated[
        str | None,
        typer.Option(
            help="ISO 639-1 code of the language, used to split sentences. Default: ko if most "
            "words of the vocabulary are Korean, otherwise en.",
            callback=corpus_options.check_optional_language,
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Share of the tokens in the validation split. Default: 1%, up to 5% for a small "
            "corpus.",
            min=0,
            max=0.99,
        ),
    ] = None,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    workers: Annotated[
        int | None,
        typer.Option(help="Maximum number of processes. Default: one per core.", min=1),
    ] = None,
    as_json: corpus_options.Json = False,
) -> None:
    """Tokenize text into a token store for pre-training.

    The store contains the token ids and the boundaries of sentences and documents. Masks and
    sentence pairs are sampled later, during training. An interrupted command continues where it
    stopped if it is run again.
    """
    # Inherited by the worker processes. They already use all cores, so each uses one thread.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from bertsmith.data import prepare as preparation
    from bertsmith.data.plan import PrepareOptions
    from bertsmith.text.sentences import guess_language
    from bertsmith.text.wordpiece import Tokenizer

    reading_options = corpus_options.parse_corpus_options(text_format, field, on_error, deduplicate)
    loaded_tokenizer = Tokenizer.load(_locate_tokenizer(tokenizer))
    options = PrepareOptions(
        language=language or guess_language(loaded_tokenizer.vocab),
        held_out=held_out,
        corpus=reading_options,
    )
    with corpus_options.terminal_progress() as progress:
        sources = corpus_options.find_sources(corpus)
        manifest = preparation.prepare(sources, loaded_tokenizer, out, options, progress, workers)
    for line in preparation.summarize_store(manifest):
        log(line)
    log(f"wrote {out}")
    # Pre-training needs held-out text.
    if manifest.splits["heldout"].documents:
        log(f"next: bertsmith pretrain --data {quote_path(out)} --out RUN")
    if as_json:
        print_json(manifest.model_dump(mode="json"))


def _locate_tokenizer(tokenizer: Path) -> Path:
    """Return the folder of the tokenizer files; for a run or a name, the folder of its model."""
    from bertsmith.text.tokenizer_files import find_vocabulary_file

    if find_vocabulary_file(tokenizer) is not None:
        return tokenizer
    from bertsmith.bundle.directory import locate_tokenizer

    return locate_tokenizer(tokenizer)
