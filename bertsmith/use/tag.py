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
from bertsmith.use.inputs import MAX_CHUNK_CHARACTERS, chunked
from bertsmith.use.model_setup import resolve_task_model
from bertsmith.use.predict import compute_probabilities
from bertsmith.use.word_boundaries import is_mark_or_joiner

#: Maximum number of texts encoded together, so that sequences of similar length share a batch.
_CHUNK_SIZE = 512
#: Maximum number of sentences of a document that are processed together.
_MAX_DOCUMENT_SENTENCES = 4096
#: Matches a word as in treebanks: a punctuation mark is a word, except inside of another word
#: ("U.S", "don't", "1996-12"). URLs, email addresses, @names and #topics are single words. An
#: email address starts only after a character that cannot be a part of one. Otherwise, the search
#: takes quadratic time for texts such as "a+a+a+a".
_WORD_PATTERN = re.compile(
    r"""(?:https?://|www\.)[^\s<>"\ue000]*[\w/]
    |(?<![\w.+-])[\w.+-]*\w@\w[\w-]*(?:\.\w[\w-]*)+
    |@\w+(?:[.-]\w+)*
    |\#[^\W\d]\w*
    |\w+(?:[.,'\u2019&/:-]\w+)*
    |\ue000\ue001*
    |[^\w\s]""",
    re.VERBOSE,
)
#: Private-use characters that replace a character that is a word by itself, and its marks.
_SINGLE, _SINGLE_MARK = "\ue000", "\ue001"
#: Characters of scripts without spaces between words: Han, Hiragana and Katakana.
_SINGLE_PATTERN = re.compile(
    "[\u3005-\u3007\u3041-\u3096\u309b-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


@dataclass(frozen=True)
class Span:
    """A labeled span of a text.

    Attributes:
        text: Text of the span.
        start: Index of the span's first character in the text.
        end: Index after the span's last character in the text.
        label: The predicted label.
        probability: Mean probability of the predicted tags of the words (or characters) in the
            span that have tokens; 0 if none has.
    """

    text: str
    start: int
    end: int
    label: str
    probability: float


@dataclass(frozen=True)
class TaggedText:
    """A text with predicted tags.

    Attributes:
        text: The text.
        spans: The entities in the text, or each of its words if the model does not tag entities.
    """

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class TaggedUnits:
    """The predicted tags of a sentence's units. The units are its words or its characters.

    Attributes:
        tags: The tag of each unit.
        probabilities: The probability of each tag; None for a unit without tokens, such as a
            control character.
    """

    tags: tuple[str, ...]
    probabilities: tuple[float | None, ...]


def tag(
    model: FineTunedBundle | Path | str, texts: Sequence[str], *, fast: bool = False
) -> list[TaggedText]:
    """Tag texts with a fine-tuned model. Long texts are not truncated.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        texts: The texts.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        The entities or the tags of each text, in input order.

    Raises:
        ModelError: The model is not a tagger.
        InputError: A text is empty.
    """
    bundle = resolve_task_model(model, "entities", "tags", fast=fast)
    return list(iter_tagged_texts(bundle, texts))


def iter_tagged_texts(
    model: FineTunedBundle | Path | str,
    texts: Iterable[str],
    compute: ComputeOutputs = compute_outputs,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[TaggedText]:
    """Yield the tagged texts of ``tag`` for any number of texts, reading them in chunks.

    Args:
        model: As for ``tag``.
        texts: The texts. Error messages contain the number of the text, from 1.
        compute: Computes the outputs of the model.
        chunk_size: Maximum number of texts encoded together.
    """
    bundle = resolve_task_model(model, "entities", "tags")
    # With document context, long texts are split into windows instead of being truncated.
    task = get_task_settings(bundle, {"context": "document"})
    sentences = _to_sentences(texts, task)
    for chunk in chunked(sentences, chunk_size, lambda sentence: len(sentence.text)):
        yield from _tag_texts(bundle, task, chunk, compute)


def tag_sentences(
    bundle: FineTunedBundle,
    sentences: Iterable[TaggedSentence],
    *,
    task: TaskSettings | None = None,
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[TaggedUnits]:
    """Yield the tags of sentences that are already split into units.

    Long sentences are not truncated. If the model was fine-tuned with document context, it also
    reads the surrounding sentences of the document.

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
    """Yield chunks that end at document boundaries, except within very long documents."""
    chunk: list[TaggedSentence] = []
    num_characters = 0
    for sentence in sentences:
        is_new_document = bool(chunk) and chunk[-1].document != sentence.document
        is_full = len(chunk) >= _CHUNK_SIZE or num_characters >= MAX_CHUNK_CHARACTERS
        if (is_new_document and is_full) or len(chunk) >= _MAX_DOCUMENT_SENTENCES:
            yield chunk
            chunk, num_characters = [], 0
        chunk.append(sentence)
        num_characters += len(sentence.text)
    if chunk:
        yield chunk


def _to_sentences(texts: Iterable[str], task: TaskSettings) -> Iterator[TaggedSentence]:
    """Yield each text as a sentence that is split into units."""
    for number, text in enumerate(texts, 1):
        location = f"text {number:,}"
        units = _split_into_units(require_text(text, location), task)
        yield TaggedSentence(text, units, None, number, location)


def require_text(text: str, location: str) -> str:
    """Return the text unchanged; raise InputError if it is empty.

    Args:
        text: The text.
        location: Prefix of the error message, such as "text 3".
    """
    if not text.strip():
        raise InputError(f"{location} is empty; expected at least one word")
    return text


def _split_into_units(text: str, task: TaskSettings) -> tuple[tuple[int, int], ...]:
    """Return the range [start, end) of the characters of each unit."""
    if task.tag_level == "character":
        return tuple((index, index + 1) for index in range(len(text)))
    return tuple(match.span() for match in _WORD_PATTERN.finditer(_mark_words(text)))


def _mark_words(text: str) -> str:
    """Replace characters so that ``_WORD_PATTERN`` finds the words; the length stays the same.

    Han, Hiragana and Katakana characters become ``_SINGLE``. Combining marks and joiners after a
    letter or digit become a letter, because ``re`` does not count them as parts of a word, such as
    the vowel signs of Hindi or an accent in decomposed form.
    """
    if text.isascii():
        return text
    characters = list(_SINGLE_PATTERN.sub(_SINGLE, text))
    for index, character in enumerate(text):
        if not index or not is_mark_or_joiner(character):
            continue
        previous = characters[index - 1]
        if previous in (_SINGLE, _SINGLE_MARK):
            characters[index] = _SINGLE_MARK
        elif previous.isalnum() or previous == "_":
            characters[index] = "a"
    return "".join(characters)


def _tag_texts(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[TaggedText]:
    """Yield the tagged texts of a chunk."""
    for example, tags, probabilities in _predict_tags(bundle, task, examples, compute):
        spans = _to_spans(example, tags, probabilities, bundle.head.kind)
        yield TaggedText(example.text, tuple(spans))


def _predict_tags(
    bundle: FineTunedBundle,
    task: TaskSettings,
    examples: list[TaggedSentence],
    compute: ComputeOutputs,
) -> Iterator[tuple[TaggedSentence, list[str], list[float]]]:
    """Yield each sentence with the tags of its units, and the probabilities of these tags.

    A unit without tokens has the probability NaN.
    """
    inputs = encode_examples(examples, bundle.tokenizer, bundle.head, task, ExampleCounts())
    logits = np.concatenate(compute(bundle.model, inputs)).astype(np.float64)
    probabilities = compute_probabilities(logits, bundle.head.kind)
    labels = bundle.head.labels
    predicted = probabilities.argmax(-1)
    token_tags = [labels[label_index] for label_index in predicted]
    token_probabilities = probabilities[np.arange(len(probabilities)), predicted]
    # Index of the sentence's first token among the predicted tokens of all sentences.
    first_token = 0
    alignments: list[TokenAlignment] = inputs.decoding_data
    unit_tags = to_unit_tags(examples, alignments, token_tags, bundle.head.kind)
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
    """Yield the entities if the model tags entities, else each unit with its tag.

    Units without tokens, whose probability is NaN, do not count in the mean of a span.
    """
    if kind == "entities":
        labeled_ranges = [
            (entity.start, entity.end, entity.label) for entity in extract_entities(tags)
        ]
    else:
        labeled_ranges = [(index, index + 1, tag) for index, tag in enumerate(tags)]
    for first_unit, end_unit, label in labeled_ranges:
        start, _ = example.unit_offsets[first_unit]
        _, end = example.unit_offsets[end_unit - 1]
        span_probabilities = [
            value for value in probabilities[first_unit:end_unit] if not math.isnan(value)
        ]
        probability = float(np.mean(span_probabilities)) if span_probabilities else 0.0
        yield Span(example.text[start:end], start, end, label, probability)
