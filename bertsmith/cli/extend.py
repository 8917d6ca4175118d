"""``bertsmith vocab extend``: add words of a domain to a model's vocabulary.

It never knows which words a vocabulary can take, nor how a model grows.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli import corpus_options, model_options
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.cli.models import find_model
from bertsmith.cli.vocab import group

if TYPE_CHECKING:
    from bertsmith.text.vocabulary_extension import FitComparison, VocabularyExtension, WordCheck
    from bertsmith.text.wordpiece import Tokenizer
    from bertsmith.text.words import WordCounts

#: Words named in a note; --json has all.
_NAMED = 10


@group.command()
def extend(
    model: model_options.Model,
    out: Annotated[Path, typer.Option("--out", help="The model directory to write.")],
    words: Annotated[
        str | None,
        typer.Option("--words", help="A file with a word a line, or - for standard input."),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--from-corpus",
            metavar="PATH",
            help="Text to take the most frequent words from that are cut into pieces now; again "
            "for more paths.",
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="How many words of the corpus.", min=1)] = 1000,
    form: corpus_options.Format = "auto",
    field: corpus_options.Field = "text",
    on_error: corpus_options.OnError = "stop",
    deduplicate: corpus_options.Deduplicate = "none",
    as_json: corpus_options.Json = False,
) -> None:
    """Add words to a model's vocabulary, so that it can go on with pre-training on their domain.

    Ids stay what they were; a new word starts as the mean of the pieces that it was cut into.
    From then on a longer word that begins with a new one is cut behind it. Text is prepared anew
    for the new model: a store that was made before is refused.
    """
    from bertsmith.errors import SettingsError
    from bertsmith.files import check_new_directory
    from bertsmith.text import vocabulary_extension

    if (words is None) == (not corpus):
        raise SettingsError("give the words to add: either --words FILE or --from-corpus PATH")
    check_new_directory(out)
    model_options.check_readable(words)
    model = find_model(model)
    from bertsmith import bundle
    from bertsmith.bundle.extend import extend_vocabulary as grown

    old = bundle.load_model(model)
    report: dict[str, Any] = {"model": str(old.path), "out": str(out)}
    gain = None
    if words is not None:
        wishes = vocabulary_extension.check_words(old.tokenizer, model_options.read_lines(words))
        report |= wishes.to_json()
        _tell_wishes(wishes)
        new = vocabulary_extension.extend_vocabulary(old.tokenizer, wishes.accepted)
    else:
        reading = corpus_options.parse_corpus_options(form, field, on_error, deduplicate)
        counted = _counted(old.tokenizer, corpus or [], reading)
        new = vocabulary_extension.extend_vocabulary(
            old.tokenizer, vocabulary_extension.find_frequent_words(old.tokenizer, counted, count)
        )
        gain = vocabulary_extension.compare_fit(old.tokenizer, new.tokenizer, counted)
        report |= {"words": new.words} | gain.to_json()
    source = words if words is not None else ", ".join(corpus or [])
    bundle.save_model(out, grown(old, new, source))
    if as_json:
        print_json(report | {"first": new.first_id, "pieces": new.piece_ids})
    _tell(new, gain, out, corpus or [], fine_tuned=isinstance(old, bundle.FineTunedBundle))


def _counted(tokenizer: "Tokenizer", corpus: list[str], options: Any) -> "WordCounts":
    """Count the words of a corpus. Sentences are not looked for: no word crosses their borders."""
    from bertsmith.text.corpus import CorpusReport, read_documents
    from bertsmith.text.words import WordCounts

    counted, report = WordCounts(tokenizer), CorpusReport()
    with corpus_options.terminal_progress() as bars:
        bars.start("Counting words", None, "characters")
        for document in read_documents(corpus_options.find_sources(corpus), options, report):
            counted.add(document.text)
            bars.advance(len(document.text))
    report.require_documents()
    corpus_options.log_report(report)
    return counted


def _tell_wishes(wishes: "WordCheck") -> None:
    if wishes.existing:
        log(f"note: {len(wishes.existing):,} there already: {_some(wishes.existing)}")
    if wishes.normalized:
        both = [f"{written} as {word}" for written, word in wishes.normalized.items()]
        log(f"note: {len(both):,} taken as the tokenizer writes them: {_some(both)}")
    if wishes.rejected:
        log(f"note: {len(wishes.rejected):,} refused:")
        for word, why in list(wishes.rejected.items())[:_NAMED]:
            log(f"  {word}: {why}")
        if len(wishes.rejected) > _NAMED:
            log(f"  and {len(wishes.rejected) - _NAMED:,} more (--json names all)")


def _tell(
    new: "VocabularyExtension",
    gain: "FitComparison | None",
    out: Path,
    corpus: list[str],
    *,
    fine_tuned: bool,
) -> None:
    unknown = sum(pieces == (new.tokenizer.unk_id,) for pieces in new.piece_ids)
    if unknown:
        log(f"note: {unknown:,} of the words were unknown until now; they start from [UNK]")
    last = new.first_id + len(new.words) - 1
    log(f"added {len(new.words):,}, ids {new.first_id:,} to {last:,}: {_some(new.words)}")
    if gain is not None:
        if gain.num_dropped:
            log(f"note: {gain.num_dropped:,} occurrences of rare words are not in these figures")
        for name, fit in (("before", gain.before), ("now", gain.after)):
            log(
                f"{name}: {fit.pieces_per_word:.3f} pieces a word, {fit.single_piece_share:.2%} of the "
                f"words known whole, {fit.unknown_share:.4%} unknown"
            )
    log(f"wrote {out}")
    if fine_tuned:
        log(f"next: bertsmith finetune TASK --model {quote_path(out)} --data FILE --out RUN")
        return
    texts = " ".join(map(quote_path, corpus)) or "CORPUS..."
    log(f"next: bertsmith prepare {texts} --tokenizer {quote_path(out)} --out STORE")
    log(f"then: bertsmith pretrain --from {quote_path(out)} --data STORE --out RUN")


def _some(words: "list[str] | tuple[str, ...]") -> str:
    more = f" and {len(words) - _NAMED:,} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
