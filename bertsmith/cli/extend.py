"""``bertsmith vocab extend``: add words of a domain to a model's vocabulary.

It never knows which words a vocabulary can take, nor how a model grows.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli import corpus_options, model_options
from bertsmith.cli.console import put_json, say
from bertsmith.cli.hints import quoted
from bertsmith.cli.models import find_model
from bertsmith.cli.vocab import group

if TYPE_CHECKING:
    from bertsmith.text.vocabulary_extension import Extension, Gain, Wishes
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
    from bertsmith.files import check_new
    from bertsmith.text import vocabulary_extension

    if (words is None) == (not corpus):
        raise SettingsError("give the words to add: either --words FILE or --from-corpus PATH")
    check_new(out)
    model_options.check_input(words)
    model = find_model(model)
    from bertsmith import bundle
    from bertsmith.bundle.extend import extend as grown

    old = bundle.load_either(model)
    report: dict[str, Any] = {"model": str(old.path), "out": str(out)}
    gain = None
    if words is not None:
        wishes = vocabulary_extension.wished(old.tokenizer, model_options.lines_of(words))
        report |= wishes.to_json()
        _tell_wishes(wishes)
        new = vocabulary_extension.extended(old.tokenizer, wishes.words)
    else:
        reading = corpus_options.corpus_options(form, field, on_error, deduplicate)
        counted = _counted(old.tokenizer, corpus or [], reading)
        new = vocabulary_extension.extended(
            old.tokenizer, vocabulary_extension.frequent(old.tokenizer, counted, count)
        )
        gain = vocabulary_extension.gain(old.tokenizer, new.tokenizer, counted)
        report |= {"words": new.words} | gain.to_json()
    source = words if words is not None else ", ".join(corpus or [])
    bundle.save_either(out, grown(old, new, source))
    if as_json:
        put_json(report | {"first": new.first, "pieces": new.pieces})
    _tell(new, gain, out, corpus or [], fine_tuned=isinstance(old, bundle.TaskBundle))


def _counted(tokenizer: "Tokenizer", corpus: list[str], options: Any) -> "WordCounts":
    """Count the words of a corpus. Sentences are not looked for: no word crosses their borders."""
    from bertsmith.text.corpus import Report, read
    from bertsmith.text.words import WordCounts

    counted, report = WordCounts(tokenizer), Report()
    with corpus_options.bars() as bars:
        bars.start("Counting words", None, "characters")
        for document in read(corpus_options.found(corpus), options, report):
            counted.add(document.text)
            bars.advance(len(document.text))
    report.require_documents()
    corpus_options.say_corpus(report)
    return counted


def _tell_wishes(wishes: "Wishes") -> None:
    if wishes.known:
        say(f"note: {len(wishes.known):,} there already: {_some(wishes.known)}")
    if wishes.changed:
        both = [f"{written} as {word}" for written, word in wishes.changed.items()]
        say(f"note: {len(both):,} taken as the tokenizer writes them: {_some(both)}")
    if wishes.refused:
        say(f"note: {len(wishes.refused):,} refused:")
        for word, why in list(wishes.refused.items())[:_NAMED]:
            say(f"  {word}: {why}")
        if len(wishes.refused) > _NAMED:
            say(f"  and {len(wishes.refused) - _NAMED:,} more (--json names all)")


def _tell(
    new: "Extension", gain: "Gain | None", out: Path, corpus: list[str], *, fine_tuned: bool
) -> None:
    unknown = sum(pieces == (new.tokenizer.unk_id,) for pieces in new.pieces)
    if unknown:
        say(f"note: {unknown:,} of the words were unknown until now; they start from [UNK]")
    last = new.first + len(new.words) - 1
    say(f"added {len(new.words):,}, ids {new.first:,} to {last:,}: {_some(new.words)}")
    if gain is not None:
        if gain.forgotten:
            say(f"note: {gain.forgotten:,} occurrences of rare words are not in these figures")
        for name, fit in (("before", gain.before), ("now", gain.after)):
            say(
                f"{name}: {fit.pieces_a_word:.3f} pieces a word, {fit.whole_share:.2%} of the "
                f"words known whole, {fit.unknown_share:.4%} unknown"
            )
    say(f"wrote {out}")
    if fine_tuned:
        say(f"next: bertsmith finetune TASK --model {quoted(out)} --data FILE --out RUN")
        return
    texts = " ".join(map(quoted, corpus)) or "CORPUS..."
    say(f"next: bertsmith prepare {texts} --tokenizer {quoted(out)} --out STORE")
    say(f"then: bertsmith pretrain --from {quoted(out)} --data STORE --out RUN")


def _some(words: "list[str] | tuple[str, ...]") -> str:
    more = f" and {len(words) - _NAMED:,} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
