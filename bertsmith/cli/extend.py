"""``bertsmith vocab extend``: add words of a domain to a model's vocabulary."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli import corpus_options, model_options
from bertsmith.cli.app import format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.cli.vocab import group
from bertsmith.errors import SettingsError
from bertsmith.files import check_new_directory
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.text.corpus import CorpusOptions
    from bertsmith.text.vocabulary_extension import FitComparison, VocabularyExtension, WordCheck
    from bertsmith.text.wordpiece import Tokenizer
    from bertsmith.text.words import WordCounts

#: Maximum number of words in a message; --json contains all.
_MAX_LISTED = 10
_DEFAULT_COUNT = 1000


@group.command(
    epilog=format_examples(
        "bertsmith vocab extend my-run --words terms.txt --out my-model",
        "bertsmith vocab extend my-run --from-corpus papers/ --out my-model",
    )
)
def extend(
    model: model_options.Model,
    out: Annotated[Path, typer.Option("--out", help="The model directory to write.")],
    words: Annotated[
        str | None,
        typer.Option("--words", help="A file with one word per line, or - for standard input."),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--from-corpus",
            metavar="PATH",
            help="Add the most frequent words of this text that are now split into pieces; may be "
            "repeated.",
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(help="Number of words to add with --from-corpus.", min=1)
    ] = _DEFAULT_COUNT,
    text_format: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    as_json: corpus_options.Json = False,
) -> None:
    """Add words to a model's vocabulary before further pre-training.

    Existing token ids do not change. The embedding of a new word is initialized to the mean of its
    pieces' embeddings. The new tokenizer splits longer words after a new word that they start with:
    after iron is added, the first piece of ironware is iron. Text must be prepared again for the
    new model, which rejects stores that were prepared for the old model.
    """
    from bertsmith.text import vocabulary_extension

    if (words is None) == (not corpus):
        options = "neither" if words is None else "both"
        raise SettingsError(
            f"expected either --words FILE or --from-corpus PATH, found {options}; use one of them"
        )
    if words is not None:
        options_of_corpus = {
            "--count": count != _DEFAULT_COUNT, "--format": text_format != "auto",
            "--field": field != "text", "--on-error": on_error != "stop",
            "--deduplicate": deduplicate != "none",
        }  # fmt: skip
        model_options.check_unused_options(
            {name: is_changed or None for name, is_changed in options_of_corpus.items()},
            "this option only has an effect with --from-corpus; omit it",
        )
    check_new_directory(out)
    model_options.check_readable(words)
    model = model_options.find_model(model)
    from bertsmith import bundle
    from bertsmith.bundle.extend import extend_vocabulary
    from bertsmith.interop.sentence_transformers.pooling import describe_dropped_modules

    original = bundle.load_model(model)
    report: dict[str, Any] = {"model": str(original.path), "out": str(out)}
    fit = reading_options = None
    if words is not None:
        check = vocabulary_extension.check_words(
            original.tokenizer, model_options.read_lines(words)
        )
        report |= check.to_json()
        _log_word_check(check)
        extension = vocabulary_extension.extend_vocabulary(original.tokenizer, check.accepted)
    else:
        reading_options = corpus_options.parse_corpus_options(
            text_format, field, on_error, deduplicate
        )
        word_counts = _count_words(original.tokenizer, corpus or [], reading_options)
        extension = vocabulary_extension.extend_vocabulary(
            original.tokenizer,
            vocabulary_extension.find_frequent_words(original.tokenizer, word_counts, count),
        )
        fit = vocabulary_extension.compare_fit(original.tokenizer, extension.tokenizer, word_counts)
        report |= {"words": extension.words} | fit.to_json()
    # Without folders, because bertsmith.json is published with the model.
    source = ", ".join(Path(name).resolve().name for name in (corpus or [words or ""]))
    bundle.save_model(out, extend_vocabulary(original, extension, source))
    notes = original.notes() + describe_dropped_modules(original.path)
    notes += _describe_unknown_words(extension)
    for note in notes:
        log(f"note: {note}")
    if as_json:
        report |= {"first_id": extension.first_id, "piece_ids": extension.piece_ids}
        print_json(report | {"notes": notes})
    is_fine_tuned = isinstance(original, bundle.FineTunedBundle)
    sources = corpus_options.format_corpus(corpus or [], reading_options)
    _log_extension(extension, fit, out, sources, is_fine_tuned=is_fine_tuned)


def _count_words(
    tokenizer: "Tokenizer", corpus: list[str], options: "CorpusOptions"
) -> "WordCounts":
    """Count the words of a corpus; log how much text was read."""
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.words import WordCounts

    word_counts = WordCounts(tokenizer)
    report = CorpusReport()
    with corpus_options.terminal_progress() as progress:
        progress.start("Counting words", None, "characters")
        for document in read_documents(corpus_options.find_sources(corpus), options, report):
            word_counts.add(document.text)
            progress.advance(len(document.text))
    report.require_documents()
    corpus_options.log_report(report)
    return word_counts


def _log_word_check(check: "WordCheck") -> None:
    """Log which words are already in the vocabulary, normalized or rejected."""
    if check.existing:
        words = _list_words(check.existing)
        log(f"note: {len(check.existing):,} already in the vocabulary: {words}")
    if check.normalized:
        normalized = [f"{written} as {word}" for written, word in check.normalized.items()]
        log(f"note: {len(normalized):,} normalized by the tokenizer: {_list_words(normalized)}")
    if check.rejected:
        log(f"note: {len(check.rejected):,} rejected:")
        for word, reason in list(check.rejected.items())[:_MAX_LISTED]:
            log(f"  {word}: {reason}")
        if len(check.rejected) > _MAX_LISTED:
            log(f"  and {len(check.rejected) - _MAX_LISTED:,} more (--json lists all)")


def _describe_unknown_words(extension: "VocabularyExtension") -> list[str]:
    """Return a note about new words that the old vocabulary cannot represent, if there are any."""
    num_unknown = sum(pieces == (extension.tokenizer.unk_id,) for pieces in extension.piece_ids)
    if not num_unknown:
        return []
    note = (
        f"{num_unknown:,} of the words were tokenized as [UNK]; their embeddings are initialized "
        "to the embedding of [UNK]"
    )
    return [note]


def _log_extension(
    extension: "VocabularyExtension",
    fit: "FitComparison | None",
    out: Path,
    sources: str,
    *,
    is_fine_tuned: bool,
) -> None:
    """Log the added words, how the fit to the corpus changes, and the next commands.

    Args:
        extension: The extended vocabulary.
        fit: How it fits the corpus, if the words come from a corpus.
        out: The new model.
        sources: The corpus, as it is written on the command line.
        is_fine_tuned: Whether the model is fine-tuned.
    """
    last_id = extension.first_id + len(extension.words) - 1
    log(
        f"added {count_noun(len(extension.words), 'word')}, ids {extension.first_id:,} to "
        f"{last_id:,}: {_list_words(extension.words)}"
    )
    if fit is not None:
        if fit.num_dropped:
            log(
                f"note: {count_noun(fit.num_dropped, 'occurrence')} of rare words are not "
                "included below"
            )
        for label, quality in (("before", fit.before), ("after", fit.after)):
            log(
                f"{label}: {quality.pieces_per_word:.3f} pieces per word, "
                f"{quality.single_piece_share:.2%} of the words are in the vocabulary, "
                f"{quality.unknown_share:.4%} are [UNK]"
            )
    log(f"wrote {out}")
    if is_fine_tuned:
        log(f"next: bertsmith finetune TASK --model {quote_path(out)} --data FILE --out RUN")
        return
    log(f"next: bertsmith prepare {sources} --tokenizer {quote_path(out)} --out STORE")
    log(f"then: bertsmith pretrain --from {quote_path(out)} --data STORE --out RUN")


def _list_words(words: "list[str] | tuple[str, ...]") -> str:
    """Return the first ``_MAX_LISTED`` words, and the number of the others, as text."""
    others = f" and {len(words) - _MAX_LISTED:,} more" if len(words) > _MAX_LISTED else ""
    return ", ".join(words[:_MAX_LISTED]) + others
