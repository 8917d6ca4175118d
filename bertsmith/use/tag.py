"""Ask a fine-tuned model for the entities of a text, or for a tag for each of its words.

It never knows where the texts come from.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.entities import extract_entities
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tagging import TokenAlignment, encode_examples, to_unit_tags
from bertsmith.use.masked_lm import chunked, resolve_task_model

#: Texts worked on at once: enough that like lengths meet.
_WINDOW = 512
#: The most sentences of one document that are worked on at once.
_LONGEST_DOCUMENT = 4096
#: Words as treebanks part them: marks stand alone, save inside a word ("U.S", "don't", "1996-12").
#: Addresses, @names and #topics are one word each, as in data from the web.
_WORDS = re.compile(
    r"""(?:https?://|www\.)[^\s<>"]*[\w/]
    |[\w.+-]*\w@\w[\w-]*(?:\.\w[\w-]*)+
    |@\w+(?:[.-]\w+)*
    |\#[^\W\d]\w*
    |\w+(?:[.,'\u2019&/:-]\w+)*
    |[^\w\s]""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Span:
    """The characters [start, end) of a text and what the model says of them.

    probability: that of the label, the mean over the words (or characters) of the span.
    """

    text: str
    start: int
    end: int
    label: str
    probability: float


@dataclass(frozen=True)
class TaggedText:
    """A text, and the entities in it; or, of a model of plain tags, each word with its tag."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class TaggedUnits:
    """The tag of each unit of a sentence, and its probability; None where no token stands for it.

    A sentence's units are its words, or its characters.
    """

    tags: tuple[str, ...]
    probabilities: tuple[float | None, ...]


def tag(model: FineTunedBundle | Path | str, texts: Sequence[str]) -> list[TaggedText]:
    """Return the entities, or the tags, of each text, in their order. Nothing is cut off.

    Raises ModelError for a model that does not tag, QuestionError for an empty text.
    """
    return list(iter_tagged_texts(model, texts))


def iter_tagged_texts(
    model: FineTunedBundle | Path | str,
    texts: Iterable[str],
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[TaggedText]:
    """Yield what ``tag`` returns, for input without end. An error names the text's number."""
    bundle = resolve_task_model(model, "entities", "tags")
    # Long texts come in windows, so that no word goes without a tag.
    task = get_task_settings(bundle, {"context": "document"})
    for window in chunked(_sentences(texts, task), _WINDOW):
        yield from _tagged(bundle, task, window, compute)


def tag_sentences(
    bundle: FineTunedBundle,
    sentences: Iterable[TaggedSentence],
    *,
    task: TaskSettings | None = None,
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[TaggedUnits]:
    """Yield the tags of sentences that are split into units. Nothing is cut off.

    A model that was fine-tuned on sentences amid their document sees that around them, up to 4,096
    sentences of it. Raises ModelError for a model that does not tag.
    """
    bundle = resolve_task_model(bundle, "entities", "tags")
    task = task or get_task_settings(bundle)
    if task.context == "sentence":
        sentences = (replace(one, document=number) for number, one in enumerate(sentences))
    task = task.model_copy(update={"context": "document"})
    for window in _document_windows(sentences):
        for _, tags, shares in _predicted(bundle, task, window, compute):
            known = (None if math.isnan(share) else share for share in shares)
            yield TaggedUnits(tuple(tags), tuple(known))


def _document_windows(sentences: Iterable[TaggedSentence]) -> Iterator[list[TaggedSentence]]:
    """Yield whole documents, several at a time where they are short."""
    window: list[TaggedSentence] = []
    for sentence in sentences:
        is_new = bool(window) and window[-1].document != sentence.document
        if (is_new and len(window) >= _WINDOW) or len(window) >= _LONGEST_DOCUMENT:
            yield window
            window = []
        window.append(sentence)
    if window:
        yield window


def _sentences(texts: Iterable[str], task: TaskSettings) -> Iterator[TaggedSentence]:
    for number, text in enumerate(texts, 1):
        where = f"text {number:,}"
        yield TaggedSentence(require_text(text, where), _units(text, task), None, number, where)


def require_text(text: str, where: str) -> str:
    """Return the text itself; QuestionError, which names ``where``, if it has no words."""
    if not text.strip():
        raise InputError(f"{where} is empty; expected at least one word")
    return text


def _units(text: str, task: TaskSettings) -> tuple[tuple[int, int], ...]:
    if task.unit == "character":
        return tuple((place, place + 1) for place in range(len(text)))
    return tuple(found.span() for found in _WORDS.finditer(text))


def _tagged(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[TaggedText]:
    for example, tags, shares in _predicted(bundle, task, examples, compute):
        yield TaggedText(example.text, tuple(_spans(example, tags, shares, bundle.head.kind)))


def _predicted(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[tuple[TaggedSentence, list[str], list[float]]]:
    """Yield each sentence with the tag of each unit and its probability, NaN without a token."""
    inputs = encode_examples(examples, bundle.tokenizer, bundle.head, task, ExampleCounts())
    logits = np.concatenate(compute(bundle.model, inputs)).astype(np.float64)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    labels = bundle.head.labels
    likely = shares.argmax(-1)
    chosen = [labels[place] for place in likely]
    best = shares[np.arange(len(shares)), likely]
    first = 0
    mapped: list[TokenAlignment] = inputs.family_data
    for example, own, tags in zip(
        examples, mapped, to_unit_tags(examples, mapped, chosen), strict=True
    ):
        sure = [
            float(best[first + slot]) if slot >= 0 else float("nan")
            for slot in own.unit_predictions
        ]
        first += len(own.predicted_tokens)
        yield example, tags, sure


def _spans(
    example: TaggedSentence, tags: Sequence[str], sure: Sequence[float], kind: str
) -> Iterator[Span]:
    """Yield entities; or each word with its tag."""
    runs = (
        [(one.start, one.end, one.label) for one in extract_entities(tags)]
        if kind == "entities"
        else [(place, place + 1, tag) for place, tag in enumerate(tags)]
    )
    for first, last, label in runs:
        start, end = example.units[first][0], example.units[last - 1][1]
        known = [share for share in sure[first:last] if not math.isnan(share)]
        share = float(np.mean(known)) if known else 0.0
        yield Span(example.text[start:end], start, end, label, share)
