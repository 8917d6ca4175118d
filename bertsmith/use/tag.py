"""Find the entities of a text, or a tag for each word, with a fine-tuned model."""

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

#: Texts encoded together: enough to batch sequences of similar length.
_CHUNK_SIZE = 512
#: Maximum number of sentences of one document processed together.
_MAX_DOCUMENT_SENTENCES = 4096
#: Words as in treebanks: punctuation is separate, except inside a word ("U.S", "don't",
#: "1996-12"). Addresses, @names and #topics are single words, as in data from the web.
_WORD_PATTERN = re.compile(
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
    """A labeled span of a text.

    Attributes:
        text: Text of the span.
        start: Index of the first character.
        end: Index after the last character.
        label: The predicted label.
        probability: Mean probability of the label over the words (or characters) of the span.
    """

    text: str
    start: int
    end: int
    label: str
    probability: float


@dataclass(frozen=True)
class TaggedText:
    """A text with its entities, or with the tag of each word if the tags are not entities."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class TaggedUnits:
    """The tags of a sentence's units, which are its words or its characters.

    Attributes:
        tags: The tag of each unit.
        probabilities: The probability of each tag; None if the tokenizer removes the whole unit.
    """

    tags: tuple[str, ...]
    probabilities: tuple[float | None, ...]


def tag(model: FineTunedBundle | Path | str, texts: Sequence[str]) -> list[TaggedText]:
    """Tag texts with a fine-tuned model. Long texts are not truncated.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        texts: The texts.

    Returns:
        The entities or the tags of each text, in input order.

    Raises:
        ModelError: The model is not a tagger.
        InputError: A text is empty.
    """
    return list(iter_tagged_texts(model, texts))


def iter_tagged_texts(
    model: FineTunedBundle | Path | str,
    texts: Iterable[str],
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[TaggedText]:
    """Like ``tag``, for an iterable of any length. Errors name the number of the text."""
    bundle = resolve_task_model(model, "entities", "tags")
    # With this setting long texts are split into windows instead of being truncated.
    task = get_task_settings(bundle, {"context": "document"})
    for chunk in chunked(_to_sentences(texts, task), _CHUNK_SIZE):
        yield from _tag_texts(bundle, task, chunk, compute)


def tag_sentences(
    bundle: FineTunedBundle,
    sentences: Iterable[TaggedSentence],
    *,
    task: TaskSettings | None = None,
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[TaggedUnits]:
    """Yield the tags of sentences that are split into units. Long sentences are not truncated.

    A model fine-tuned with document context sees the surrounding sentences of the document, up to
    4,096 sentences.

    Raises:
        ModelError: The model is not a tagger.
    """
    bundle = resolve_task_model(bundle, "entities", "tags")
    task = task or get_task_settings(bundle)
    if task.context == "sentence":
        sentences = (
            replace(sentence, document=number) for number, sentence in enumerate(sentences)
        )
    task = task.model_copy(update={"context": "document"})
    for chunk in _chunk_by_document(sentences):
        for _, tags, probabilities in _predict_tags(bundle, task, chunk, compute):
            optional_probabilities = (
                None if math.isnan(probability) else probability for probability in probabilities
            )
            yield TaggedUnits(tuple(tags), tuple(optional_probabilities))


def _chunk_by_document(sentences: Iterable[TaggedSentence]) -> Iterator[list[TaggedSentence]]:
    """Yield chunks that end at document boundaries; short documents share a chunk."""
    chunk: list[TaggedSentence] = []
    for sentence in sentences:
        is_new_document = bool(chunk) and chunk[-1].document != sentence.document
        size = len(chunk)
        if (is_new_document and size >= _CHUNK_SIZE) or size >= _MAX_DOCUMENT_SENTENCES:
            yield chunk
            chunk = []
        chunk.append(sentence)
    if chunk:
        yield chunk


def _to_sentences(texts: Iterable[str], task: TaskSettings) -> Iterator[TaggedSentence]:
    for number, text in enumerate(texts, 1):
        location = f"text {number:,}"
        units = _split_into_units(require_text(text, location), task)
        yield TaggedSentence(text, units, None, number, location)


def require_text(text: str, location: str) -> str:
    """Return the text unchanged; raise InputError, which names ``location``, if it is empty."""
    if not text.strip():
        raise InputError(f"{location} is empty; expected at least one word")
    return text


def _split_into_units(text: str, task: TaskSettings) -> tuple[tuple[int, int], ...]:
    """Return the characters [start, end) of each unit."""
    if task.tag_level == "character":
        return tuple((index, index + 1) for index in range(len(text)))
    return tuple(match.span() for match in _WORD_PATTERN.finditer(text))


def _tag_texts(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[TaggedText]:
    for example, tags, probabilities in _predict_tags(bundle, task, examples, compute):
        spans = _to_spans(example, tags, probabilities, bundle.head.kind)
        yield TaggedText(example.text, tuple(spans))


def _predict_tags(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[tuple[TaggedSentence, list[str], list[float]]]:
    """Yield (sentence, tag of each unit, probability of each tag); NaN for units without tokens."""
    inputs = encode_examples(examples, bundle.tokenizer, bundle.head, task, ExampleCounts())
    logits = np.concatenate(compute(bundle.model, inputs)).astype(np.float64)
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    labels = bundle.head.labels
    predicted = probabilities.argmax(-1)
    token_tags = [labels[label_index] for label_index in predicted]
    token_probabilities = probabilities[np.arange(len(probabilities)), predicted]
    first_token = 0
    alignments: list[TokenAlignment] = inputs.decoding_data
    unit_tags = to_unit_tags(examples, alignments, token_tags)
    for example, alignment, tags in zip(examples, alignments, unit_tags, strict=True):
        unit_probabilities = [
            float(token_probabilities[first_token + index]) if index >= 0 else float("nan")
            for index in alignment.unit_prediction_indices
        ]
        first_token += len(alignment.predicted_token_indices)
        yield example, tags, unit_probabilities


def _to_spans(
    example: TaggedSentence, tags: Sequence[str], probabilities: Sequence[float], kind: str
) -> Iterator[Span]:
    """Yield the entities, or each word with its tag."""
    unit_ranges = (
        [(entity.start, entity.end, entity.label) for entity in extract_entities(tags)]
        if kind == "entities"
        else [(index, index + 1, tag) for index, tag in enumerate(tags)]
    )
    for first, last, label in unit_ranges:
        start, end = example.unit_offsets[first][0], example.unit_offsets[last - 1][1]
        defined = [value for value in probabilities[first:last] if not math.isnan(value)]
        probability = float(np.mean(defined)) if defined else 0.0
        yield Span(example.text[start:end], start, end, label, probability)
