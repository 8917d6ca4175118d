"""Token classification: a tag for each word or character of a sentence."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.conll import TaggedSentence, read_examples
from bertsmith.tasks.entities import (
    OUTSIDE_TAG,
    compute_entity_scores,
    compute_type_scores,
    has_end_or_single_tags,
    list_bio2_tags,
    to_bio2,
    to_inside_tag,
)
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.wordpiece import Tokenizer

__all__ = [
    "TaggingWindow",
    "TokenAlignment",
    "collect_labels",
    "compute_class_report",
    "compute_losses",
    "compute_metrics",
    "encode_examples",
    "list_metrics",
    "read_examples",
    "to_unit_tags",
]


@dataclass(frozen=True)
class TokenAlignment:
    """The tokens of a sentence, aligned with its units (words or characters).

    Attributes:
        ids: Token ids of the sentence.
        predicted_token_indices: Ascending indices of the tokens for which a tag is predicted: the
            first token of each word (section 5.3 of the paper), or the last one.
        unit_prediction_indices: For each unit, the index of its token in
            ``predicted_token_indices``, -1 if it has no token.
        is_first_unit: For each unit, whether it is the first unit of its token.
    """

    ids: list[int]
    predicted_token_indices: list[int]
    unit_prediction_indices: list[int]
    is_first_unit: list[bool]


@dataclass(frozen=True)
class TaggingWindow:
    """The tokens of one input, without [CLS] and [SEP].

    Attributes:
        ids: Token ids.
        token_indices: Indices of the tokens for which a tag is predicted.
        targets: The class of each of these tokens, empty for unlabeled data.
        location: File and line of the first sentence, for messages.
    """

    ids: list[int]
    token_indices: list[int]
    targets: list[int]
    location: str


def collect_labels(examples: Sequence[TaggedSentence], path: str) -> tuple[str, ...]:
    """Return the distinct tags, with "O" first. An I- tag is added for each B- tag.

    Raises:
        TaskError: There are fewer than two tags.
    """
    tags = {tag for example in examples for tag in example.tags or ()}
    if len(tags) < 2:
        problem = f"every tag is {min(tags)!r}" if tags else "there is no tag"
        raise TaskError(f"{path}: {problem}; expected at least two different tags")
    # A bare "B" begins an entity only if no tag has an entity type.
    begin_tags = {tag for tag in tags if tag.startswith("B-")}
    if tags <= {OUTSIDE_TAG, "B", "I"}:
        begin_tags |= tags & {"B"}
    tags |= set(map(to_inside_tag, begin_tags))
    # Sort by entity type, and B- before I-.
    return tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE_TAG, tag[2:], tag)))


def encode_examples(
    examples: Sequence[TaggedSentence],
    tokenizer: Tokenizer,
    head: HeadConfig,
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Encode sentences as inputs; see ``TaskFamily``.

    With sentence context, each input is [CLS] sentence [SEP], truncated at its end. With document
    context, the model predicts the tags of as many whole sentences as fit into half of the input.
    The other half is filled with the tokens around these sentences, and nothing is truncated.
    ``decoding_data`` has the ``TokenAlignment`` of each sentence.
    """
    assert task.max_seqlen is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    max_tokens = task.max_seqlen - 2  # [CLS] and [SEP]
    is_last = task.tagged_token == "last"
    alignments = [_align_tokens(example, tokenizer, is_last=is_last) for example in examples]
    is_truncated = None
    if task.context == "sentence":
        is_truncated = [len(alignment.ids) > max_tokens for alignment in alignments]
        counts.num_truncated += sum(is_truncated)
        alignments = [_truncate(alignment, max_tokens) for alignment in alignments]
    label_index = None
    if examples and all(example.tags is not None for example in examples):
        label_index = _index_labels(head)
    windows = list(_build_windows(examples, alignments, label_index, task, max_tokens))
    targets = None
    if label_index is not None:
        targets = [np.array(window.targets, np.int64) for window in windows]
    sequences = [
        ([tokenizer.cls_id, *window.ids, tokenizer.sep_id], [0] * (len(window.ids) + 2))
        for window in windows
    ]
    return ModelInputs(
        sequences=[[sequence] for sequence in sequences],
        locations=[window.location for window in windows],
        # A document can have more windows than sentences, none of which is truncated.
        is_truncated=is_truncated or [False] * len(windows),
        targets=targets,
        # Add 1 because each input starts with [CLS].
        token_indices=[[index + 1 for index in window.token_indices] for window in windows],
        decoding_data=alignments,
    )


def _index_labels(head: HeadConfig) -> dict[str, int]:
    """Return the class of each tag.

    Entities are tagged in BIO2. If the model has another scheme without one of these tags, the
    class of the tag is that of the first label of its entity type.
    """
    label_index = {label: index for index, label in enumerate(head.labels)}
    if head.kind == "entities":
        for index, label in enumerate(head.labels):
            for tag in list_bio2_tags(label):
                label_index.setdefault(tag, index)
    return label_index


def _align_tokens(
    example: TaggedSentence, tokenizer: Tokenizer, *, is_last: bool
) -> TokenAlignment:
    """Tokenize a sentence, and assign its first or last token (``is_last``) to each unit."""
    ids, offsets = tokenizer.encode_with_offsets(example.text)
    predicted_token_indices: list[int] = []
    unit_prediction_indices, is_first_unit = [], []
    token = 0
    for start, end in example.unit_offsets:
        while token < len(ids) and offsets[token][1] <= start:
            token += 1
        if token == len(ids) or offsets[token][0] >= end:
            unit_prediction_indices.append(-1)
            is_first_unit.append(True)
            continue
        while is_last and token + 1 < len(ids) and offsets[token + 1][0] < end:
            token += 1
        is_first = not predicted_token_indices or predicted_token_indices[-1] != token
        if is_first:
            predicted_token_indices.append(token)
        unit_prediction_indices.append(len(predicted_token_indices) - 1)
        is_first_unit.append(is_first)
    return TokenAlignment(ids, predicted_token_indices, unit_prediction_indices, is_first_unit)


def _truncate(alignment: TokenAlignment, max_tokens: int) -> TokenAlignment:
    """Truncate a sentence to ``max_tokens`` tokens; units of removed tokens have no token."""
    if len(alignment.ids) <= max_tokens:
        return alignment
    predicted_token_indices = [
        token for token in alignment.predicted_token_indices if token < max_tokens
    ]
    unit_prediction_indices = [
        index if index < len(predicted_token_indices) else -1
        for index in alignment.unit_prediction_indices
    ]
    ids = alignment.ids[:max_tokens]
    return TokenAlignment(
        ids, predicted_token_indices, unit_prediction_indices, alignment.is_first_unit
    )


def _get_targets(
    example: TaggedSentence,
    alignment: TokenAlignment,
    label_index: dict[str, int] | None,
) -> list[int]:
    """Return the class of the first unit of each predicted token, empty for unlabeled data."""
    if label_index is None or example.tags is None:
        return []
    units = zip(
        example.tags, alignment.unit_prediction_indices, alignment.is_first_unit, strict=True
    )
    return [label_index[tag] for tag, index, is_first in units if is_first and index >= 0]


def _build_windows(
    examples: Sequence[TaggedSentence],
    alignments: Sequence[TokenAlignment],
    label_index: dict[str, int] | None,
    task: TaskSettings,
    max_tokens: int,
) -> Iterator[TaggingWindow]:
    """Yield the window of each input, in the order of the text."""
    targets = [
        _get_targets(example, alignment, label_index)
        for example, alignment in zip(examples, alignments, strict=True)
    ]
    if task.context == "sentence":
        for example, alignment, sentence_targets in zip(examples, alignments, targets, strict=True):
            yield TaggingWindow(
                alignment.ids,
                alignment.predicted_token_indices,
                sentence_targets,
                example.location,
            )
        return
    # The sentences [start, end) are a document.
    start = 0
    while start < len(examples):
        end = start
        while end < len(examples) and examples[end].document == examples[start].document:
            end += 1
        yield from _build_document_windows(
            examples[start:end],
            alignments[start:end],
            targets[start:end],
            max_tokens,
        )
        start = end


def _build_document_windows(
    examples: Sequence[TaggedSentence],
    alignments: Sequence[TokenAlignment],
    targets: Sequence[list[int]],
    max_tokens: int,
) -> Iterator[TaggingWindow]:
    """Yield the windows of a document; a document without tokens has one empty window."""
    if not any(alignment.ids for alignment in alignments):
        yield TaggingWindow([], [], [], examples[0].location)
        return
    ids = [token_id for alignment in alignments for token_id in alignment.ids]
    # Index of the first token of each sentence, followed by the number of tokens.
    boundaries = np.cumsum([0, *(len(alignment.ids) for alignment in alignments)]).tolist()
    predicted_token_indices = [
        sentence_start + token
        for sentence_start, alignment in zip(boundaries[:-1], alignments, strict=True)
        for token in alignment.predicted_token_indices
    ]
    all_targets = [target for sentence_targets in targets for target in sentence_targets]
    max_tagged_tokens = max(max_tokens // 2, 1)
    start = 0
    num_predicted = 0
    while start < len(ids):
        # Predict the tags of the tokens [start, end): as many whole sentences as fit into half of
        # the window, or a part of a sentence if no whole sentence fits.
        end = boundaries[bisect_right(boundaries, start + max_tagged_tokens) - 1]
        if end <= start:
            end = min(start + max_tagged_tokens, len(ids))
        # Half of the other tokens precede ``start``, or more if too few tokens follow ``end``.
        num_left = (max_tokens - (end - start)) // 2
        num_left = max(num_left, max_tokens - (len(ids) - start))
        num_left = min(num_left, start)
        window_start = start - num_left
        next_num_predicted = bisect_left(predicted_token_indices, end)
        window_tokens = predicted_token_indices[num_predicted:next_num_predicted]
        first_sentence = min(bisect_right(boundaries, start), len(examples)) - 1
        yield TaggingWindow(
            ids[window_start : window_start + max_tokens],
            [token - window_start for token in window_tokens],
            all_targets[num_predicted:next_num_predicted],
            examples[first_sentence].location,
        )
        start = end
        num_predicted = next_num_predicted


def compute_losses(
    outputs: Tensor,
    batch: TaskMicroBatch,
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
) -> Tensor:
    """Return the cross-entropy of each of M predicted tags, float32 [M]; outputs are [M, C]."""
    return F.cross_entropy(outputs, batch.targets, reduction="none")


def to_unit_tags(
    examples: Sequence[TaggedSentence],
    alignments: Sequence[TokenAlignment],
    token_tags: Sequence[str],
    kind: str,
) -> Iterator[list[str]]:
    """Convert the tags of predicted tokens to the tags of all units; yield those of each sentence.

    If a token has several units, they continue the entity of its first unit, or have its plain tag.
    A unit without a token continues an entity if the units before and after it belong to that
    entity; otherwise its tag is O. Tags in IOBES or BILOU are converted to BIO2, because the end of
    an entity may be in the middle of a token's units.

    Args:
        examples: The sentences.
        alignments: The alignment of each sentence.
        token_tags: Tags of the predicted tokens of all sentences.
        kind: "entities" or "tags".
    """
    is_entities = kind == "entities"
    sentence_start = 0
    for example, alignment in zip(examples, alignments, strict=True):
        tags: list[str] = []
        sentence_end = sentence_start + len(alignment.predicted_token_indices)
        sentence_tags = token_tags[sentence_start:sentence_end]
        if is_entities and has_end_or_single_tags(sentence_tags):
            sentence_tags = to_bio2(sentence_tags)
        next_predictions = _find_next_predictions(alignment.unit_prediction_indices)
        for unit in range(len(example.unit_offsets)):
            index = alignment.unit_prediction_indices[unit]
            if index >= 0 and alignment.is_first_unit[unit]:
                tags.append(sentence_tags[index])
                continue
            previous_tag = tags[-1] if tags else OUTSIDE_TAG
            tag = to_inside_tag(previous_tag) if is_entities else previous_tag
            if index < 0:
                next_index = next_predictions[unit]
                next_tag = None if next_index < 0 else sentence_tags[next_index]
                if next_tag != tag:
                    tag = OUTSIDE_TAG
            tags.append(tag)
        sentence_start = sentence_end
        yield tags


def _find_next_predictions(unit_prediction_indices: Sequence[int]) -> list[int]:
    """Return, for each unit, the prediction index of the next unit with a token, -1 if none."""
    next_predictions = [-1] * len(unit_prediction_indices)
    next_index = -1
    for unit in reversed(range(len(unit_prediction_indices))):
        next_predictions[unit] = next_index
        if unit_prediction_indices[unit] >= 0:
            next_index = unit_prediction_indices[unit]
    return next_predictions


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
    task: TaskSettings,
) -> dict[str, float]:
    """Return the metrics over all units, including truncated units; see ``TaskFamily``.

    The accuracy of entity tags compares BIO2 tags, because models may have another scheme.
    """
    predicted, true = _get_predicted_and_true_tags(outputs, inputs, examples, head)
    is_entities = head.kind == "entities"
    comparable = list(map(to_bio2, predicted)) if is_entities else predicted
    is_correct = [
        predicted_tag == true_tag
        for predicted_tags, true_tags in zip(comparable, true, strict=True)
        for predicted_tag, true_tag in zip(predicted_tags, true_tags, strict=True)
    ]
    values: dict[str, Any] = {"accuracy": float(np.mean(is_correct))}
    if is_entities:
        values |= compute_entity_scores(predicted, true)
    if "char_macro_f1" in task.metrics:
        values["char_macro_f1"] = _compute_tag_macro_f1(predicted, true, head.labels)
    if any(name not in values for name in task.metrics):
        classes = compute_class_report(outputs, inputs, examples, head, task)["classes"]
        values |= metrics.select_label_scores(task.metrics, classes)
    return {name: values[name] for name in task.metrics}


def _compute_tag_macro_f1(
    predicted: list[list[str]],
    true: list[list[str]],
    labels: Sequence[str],
) -> float:
    """Return the mean F1 of all tags, including O: the character-level metric of KLUE-NER.

    The F1 of a tag that does not occur is 1, as in KLUE's baseline code, which calls scikit-learn's
    f1_score(average="macro", zero_division=1).
    """
    predicted_indices, true_indices, names = _to_class_indices(predicted, true, labels)
    classes = metrics.classification_report(predicted_indices, true_indices, names)["classes"]
    occurring = {*np.unique(predicted_indices).tolist(), *np.unique(true_indices).tolist()}
    scores = [
        classes[name]["f1"] if index in occurring else 1.0 for index, name in enumerate(names)
    ]
    return float(np.mean(scores))


def _to_class_indices(
    predicted: list[list[str]],
    true: list[list[str]],
    labels: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Return predicted and true tags of all units as class indices, and the names of the classes.

    The classes are the labels of the model, followed by other tags that occur. For example, a unit
    without a token may continue an entity with an I- tag that is not a label of the model.
    """
    predicted_tags = [tag for sentence_tags in predicted for tag in sentence_tags]
    true_tags = [tag for sentence_tags in true for tag in sentence_tags]
    names = list(dict.fromkeys([*labels, *predicted_tags, *true_tags]))
    class_index = {name: index for index, name in enumerate(names)}
    predicted_indices = np.array([class_index[tag] for tag in predicted_tags], np.int64)
    true_indices = np.array([class_index[tag] for tag in true_tags], np.int64)
    return predicted_indices, true_indices, names


def _get_predicted_and_true_tags(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the predicted and the true tags of the units of each sentence."""
    logits = np.concatenate(outputs)
    token_tags = [head.labels[index] for index in logits.argmax(-1)]
    true_tags = [list(example.tags or ()) for example in examples]
    predicted = list(to_unit_tags(examples, inputs.decoding_data, token_tags, head.kind))
    return predicted, true_tags


def compute_class_report(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
    task: TaskSettings,  # noqa: ARG001 - part of TaskFamily
) -> dict[str, Any]:
    """Return the scores of each entity type, or of each tag with a confusion matrix.

    See ``TaskFamily``.
    """
    predicted, true = _get_predicted_and_true_tags(outputs, inputs, examples, head)
    if head.kind == "entities":
        return {"classes": compute_type_scores(predicted, true)}
    return metrics.classification_report(*_to_class_indices(predicted, true, head.labels))


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the default and the supported metrics; see ``TaskFamily``."""
    if task.kind == "tags":
        return ("accuracy",), ("accuracy",)
    defaults = ("f1", "precision", "recall")
    character_metrics = ("char_macro_f1",) if task.tag_level == "character" else ()
    return defaults, (*defaults, "macro_f1", "accuracy", *character_metrics)
