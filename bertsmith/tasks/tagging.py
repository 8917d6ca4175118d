"""A tag for each word or character of a sentence: inputs, losses, and tags back from outputs.

It never trains, and it never prints.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.conll import TaggedSentence, read_tagged_sentences
from bertsmith.tasks.entities import (
    OUTSIDE_TAG,
    compute_entity_scores,
    compute_type_scores,
    to_inside_tag,
)
from bertsmith.tasks.inputs import ExampleCounts, MicroBatch, ModelInputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.wordpiece import Tokenizer

DEFAULT_LENGTH = 128


@dataclass(frozen=True)
class TokenAlignment:
    """How the units of a sentence stand to its pieces.

    ids: the sentence's pieces. asked: which of them are asked for a tag, ascending; the first piece
    of each word (section 5.3 of the paper). slots: for each unit the place of its piece in
    ``asked``, or -1 where it has none. own: whether the unit is the first one that its piece holds.
    """

    ids: list[int]
    predicted_tokens: list[int]
    unit_predictions: list[int]
    is_first_unit: list[bool]


@dataclass(frozen=True)
class TaggingWindow:
    """Some sentences' pieces [first, last) of their document, with pieces around them."""

    ids: list[int]
    token_indices: list[int]
    targets: list[int]
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,
    labeled: bool = True,
) -> tuple[list[TaggedSentence], ExampleCounts]:
    """Read tagged sentences; see ``Family``."""
    return read_tagged_sentences(path, task, labels, labeled=labeled)


def collect_labels(examples: Sequence[TaggedSentence], where: str) -> tuple[str, ...]:
    """Return the tags that occur, "O" first; each B- has its I-. TaskError if there is one only."""
    found = {tag for example in examples for tag in example.tags or ()}
    if len(found) < 2:
        raise TaskError(
            f"{where}: {'every tag is ' + repr(min(found)) if found else 'there is no tag'}; "
            "expected two different ones at least"
        )
    begins = {tag for tag in found if tag.startswith("B-")}
    if found <= {OUTSIDE_TAG, "B", "I"}:
        begins |= found & {"B"}
    found |= set(map(to_inside_tag, begins))
    return tuple(sorted(found, key=lambda tag: (tag != OUTSIDE_TAG, tag[2:], tag)))


def encode_examples(
    examples: Sequence[TaggedSentence],
    tokenizer: Tokenizer,
    head: HeadConfig,
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Return sentences, alone or amid their document, as inputs; see ``Family``.

    Alone: [CLS] sentence [SEP], and what is too long is cut at its end. With its document: whole
    sentences up to half an input are asked about together, and as many pieces stand before and
    after them as fit; nothing is cut.
    """
    assert task.length is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    room = task.length - 2
    number = {name: index for index, name in enumerate(head.labels)}
    mapped = [_mapped(example, tokenizer) for example in examples]
    cut_off = [False] * len(examples)
    if task.context == "sentence":
        cut_off = [len(own.ids) > room for own in mapped]
        counts.num_truncated += sum(cut_off)
        mapped = [_shortened(own, room) for own in mapped]
    known = bool(examples) and all(example.tags is not None for example in examples)
    windows = list(_windows(examples, mapped, number if known else None, task, room))
    return ModelInputs(
        sequences=[[([tokenizer.cls_id, *one.ids, tokenizer.sep_id], [0] * (len(one.ids) + 2))]
                   for one in windows],
        locations=[one.location for one in windows],
        is_truncated=cut_off,
        targets=[np.array(one.targets, np.int64) for one in windows] if known else None,
        token_indices=[[place + 1 for place in one.token_indices] for one in windows],
        family_data=mapped,
    )  # fmt: skip


def _mapped(example: TaggedSentence, tokenizer: Tokenizer) -> TokenAlignment:
    """Find the piece of each unit: the one that holds its first character."""
    ids, offsets = tokenizer.encode_with_offsets(example.text)
    asked: list[int] = []
    slots, own, piece = [], [], 0
    for start, end in example.units:
        while piece < len(ids) and offsets[piece][1] <= start:
            piece += 1
        if piece == len(ids) or offsets[piece][0] >= end:
            slots.append(-1)
            own.append(True)
            continue
        fresh = not asked or asked[-1] != piece
        if fresh:
            asked.append(piece)
        slots.append(len(asked) - 1)
        own.append(fresh)
    return TokenAlignment(ids, asked, slots, own)


def _shortened(mapped: TokenAlignment, room: int) -> TokenAlignment:
    """Return the first ``room`` pieces; units whose piece is cut off have none."""
    if len(mapped.ids) <= room:
        return mapped
    asked = [piece for piece in mapped.predicted_tokens if piece < room]
    slots = [slot if slot < len(asked) else -1 for slot in mapped.unit_predictions]
    return TokenAlignment(mapped.ids[:room], asked, slots, mapped.is_first_unit)


def _targets(
    example: TaggedSentence, mapped: TokenAlignment, number: dict[str, int] | None
) -> list[int]:
    """Return the class of each piece asked: that of its first unit; none where tags are unknown."""
    if number is None or example.tags is None:
        return []
    units = zip(example.tags, mapped.unit_predictions, mapped.is_first_unit, strict=True)
    return [number[tag] for tag, slot, own in units if own and slot >= 0]


def _windows(
    examples: Sequence[TaggedSentence],
    mapped: Sequence[TokenAlignment],
    number: dict[str, int] | None,
    task: TaskSettings,
    room: int,
) -> Iterator[TaggingWindow]:
    """Yield the inputs; over all of them the pieces asked about come in the order of the text."""
    targets = [_targets(*both, number) for both in zip(examples, mapped, strict=True)]
    if task.context == "sentence":
        for example, own, right in zip(examples, mapped, targets, strict=True):
            yield TaggingWindow(own.ids, own.predicted_tokens, right, example.location)
        return
    first = 0
    while first < len(examples):
        last = first
        while last < len(examples) and examples[last].document == examples[first].document:
            last += 1
        yield from _document(examples[first:last], mapped[first:last], targets[first:last], room)
        first = last


def _document(
    examples: Sequence[TaggedSentence],
    mapped: Sequence[TokenAlignment],
    targets: Sequence[list[int]],
    room: int,
) -> Iterator[TaggingWindow]:
    """Yield the windows of a document; one that asks nothing where it has no piece."""
    if not any(own.ids for own in mapped):
        yield TaggingWindow([], [], [], examples[0].location)
        return
    ids = [one for own in mapped for one in own.ids]
    starts = np.cumsum([0, *(len(own.ids) for own in mapped)]).tolist()
    asked = [
        start + piece
        for start, own in zip(starts, mapped, strict=False)
        for piece in own.predicted_tokens
    ]
    right = [one for own in targets for one in own]
    half = max(room // 2, 1)
    begin = done = 0
    while begin < len(ids):
        # Whole sentences as far as they fit, else as much of one as does.
        end = starts[bisect_right(starts, begin + half) - 1]
        if end <= begin:
            end = min(begin + half, len(ids))
        left = max(min((room - end + begin) // 2, begin), room - (len(ids) - begin), 0)
        left = min(left, begin)
        low = begin - left
        count = bisect_left(asked, end) - done
        yield TaggingWindow(
            ids[low : low + room],
            [place - low for place in asked[done : done + count]],
            right[done : done + count],
            examples[min(bisect_right(starts, begin), len(examples)) - 1].location,
        )
        begin, done = end, done + count


def compute_losses(outputs: Tensor, part: MicroBatch, head: HeadConfig) -> Tensor:  # noqa: ARG001 - see Family
    """Return float32 [M], the cross-entropy of each tag, from outputs float32 [M, C]."""
    return F.cross_entropy(outputs, part.targets, reduction="none")


def to_unit_tags(
    examples: Sequence[TaggedSentence], mapped: Sequence[TokenAlignment], chosen: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the tags of each sentence's units from those of the pieces that were asked about.

    Several units of one piece belong to one entity; a unit without a piece goes on with the entity
    around it, and is outside where there is none.
    """
    first = 0
    for example, own in zip(examples, mapped, strict=True):
        tags: list[str] = []
        following = _following(own.unit_predictions)
        for place in range(len(example.units)):
            slot = own.unit_predictions[place]
            if slot >= 0 and own.is_first_unit[place]:
                tags.append(chosen[first + slot])
                continue
            before = tags[-1] if tags else OUTSIDE_TAG
            inside = to_inside_tag(before)
            if slot < 0:
                after = following[place]
                follows = None if after < 0 else chosen[first + after]
                inside = inside if follows == inside else OUTSIDE_TAG
            tags.append(inside)
        first += len(own.predicted_tokens)
        yield tags


def _following(slots: Sequence[int]) -> list[int]:
    """Return for each unit the slot of the next unit that has one, or -1."""
    result, after = [-1] * len(slots), -1
    for place in range(len(slots) - 1, -1, -1):
        result[place] = after
        after = slots[place] if slots[place] >= 0 else after
    return result


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
    task: TaskSettings,
) -> dict[str, float]:
    """Return the named metrics over all units, those that were cut off included; see ``Family``."""
    said, right = _predicted_and_right(outputs, inputs, examples, head)
    hits = [one == other for own, true in zip(said, right, strict=True)
            for one, other in zip(own, true, strict=True)]  # fmt: skip
    found: dict[str, Any] = {"accuracy": float(np.mean(hits))}
    if head.kind == "entities":
        found |= compute_entity_scores(said, right)
    if "char_macro_f1" in task.metrics:
        found["char_macro_f1"] = _tag_macro_f1(said, right, head.labels)
    if any(name not in found for name in task.metrics):
        classes = compute_class_report(outputs, inputs, examples, head)["classes"]
        found |= metrics.select_label_scores(task.metrics, classes)
    return {name: found[name] for name in task.metrics}


def _tag_macro_f1(
    predicted: list[list[str]], right: list[list[str]], labels: Sequence[str]
) -> float:
    """Return the mean F1 of all tags, O among them, as KLUE-NER scores characters.

    A tag that is neither right nor predicted anywhere counts as 1, as in the code of KLUE's
    baseline: f1_score(average="macro", zero_division=1).
    """
    chosen, true, names = _numbered(predicted, right, labels)
    classes = metrics.classification_report(chosen, true, names)["classes"]
    occurs = {*np.unique(chosen).tolist(), *np.unique(true).tolist()}
    scores = [classes[name]["f1"] if number in occurs else 1.0 for number, name in enumerate(names)]
    return float(np.mean(scores))


def _numbered(
    predicted: list[list[str]], right: list[list[str]], labels: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Return both sides' tags of all units as numbers, and the names of the numbers."""
    # A unit without a piece gets a tag from its neighbours, which may be none of the model's.
    names = dict.fromkeys([*labels, *(tag for tags in (*predicted, *right) for tag in tags)])
    number = {name: place for place, name in enumerate(names)}
    chosen, true = (
        np.array([number[tag] for tags in side for tag in tags], np.int64)
        for side in (predicted, right)
    )
    return chosen, true, list(names)


def _predicted_and_right(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the predicted and the right tags of each sentence."""
    rows = np.concatenate(outputs)
    chosen = [head.labels[place] for place in rows.argmax(-1)]
    right = [list(example.tags or ()) for example in examples]
    return list(to_unit_tags(examples, inputs.family_data, chosen)), right


def compute_class_report(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[TaggedSentence],
    head: HeadConfig,
) -> dict[str, Any]:
    """Return the scores of each entity type, or of each tag with confusions; see ``Family``."""
    predicted, right = _predicted_and_right(outputs, inputs, examples, head)
    if head.kind == "entities":
        return {"classes": compute_type_scores(predicted, right)}
    return metrics.classification_report(*_numbered(predicted, right, head.labels))


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the usual metrics and the known ones; see ``Family``."""
    if task.kind == "tags":
        return ("accuracy",), ("accuracy",)
    usual = ("f1", "precision", "recall")
    of_characters = ("char_macro_f1",) if task.unit == "character" else ()
    return usual, (*usual, "macro_f1", "accuracy", *of_characters)
