"""Texts and pairs with a label, several labels or a number: reading them and scoring answers.

It never trains, and it never prints.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.bundle import Head, Kind
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.public import Source
from bertsmith.tasks.tables import Row, rows
from bertsmith.text.wordpiece import Tokenizer

#: What parts the labels of one text in a multi-label column of CSV or TSV.
SEPARATOR = "|"


@dataclass(frozen=True)
class Example:
    """One text, or a pair, and what is right. ``where``: file and line, for messages.

    label: a name, a number, a set of names, or None where it is not known.
    """

    texts: tuple[str, ...]
    label: str | float | frozenset[str] | None
    where: str


@dataclass
class Counts:
    """What became of the rows of a file: nothing is dropped in silence."""

    read: int = 0
    used: int = 0
    cut_off: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return {"read": self.read, "used": self.used, "cut_off": self.cut_off,
                "skipped": dict(self.skipped)}  # fmt: skip


def read(
    path: Path,
    source: Source,
    kind: Kind,
    *,
    skip_bad: bool = False,
    labels: Sequence[str] | None = None,
    labelled: bool = True,
) -> tuple[list[Example], Counts]:
    """Read the examples of a file; a bad row is an error, or with ``skip_bad`` a counted skip.

    ``labels``: the known ones, where a row with another is bad. Raises TaskError.
    """
    examples, counts = [], Counts()
    for row in rows(path, header=source.header):
        counts.read += 1
        try:
            examples.append(_example(row, source, kind, labels, labelled=labelled))
        except _BadRowError as fault:
            if not skip_bad:
                raise TaskError(
                    f"{row.where}: {fault}; mend it, or leave such rows out with --skip-bad"
                ) from None
            counts.skipped[fault.reason] += 1
    counts.used = len(examples)
    if not examples:
        raise TaskError(f"{path}: no row could be used, of {counts.read:,}; expected one at least")
    return examples, counts


class _BadRowError(Exception):
    """A row that cannot be used. ``reason``: the same words for all rows of this fault."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + detail)
        self.reason = reason


def _example(
    row: Row, source: Source, kind: Kind, labels: Sequence[str] | None, *, labelled: bool
) -> Example:
    if row.fault:
        raise _BadRowError(row.fault)
    names = (source.text, source.pair) if source.pair else (source.text,)
    cells = [_cell(row, name) for name in names]
    texts = tuple(map(str, cells))
    for name, cell, text in zip(names, cells, texts, strict=True):
        if isinstance(cell, list | dict):
            raise _BadRowError("no text", f" in column {name!r}, but a {type(cell).__name__}")
        if not text.strip():
            raise _BadRowError("an empty text", f" in column {name!r}")
    label = None
    if labelled:
        label = _label(_cell(row, source.label), kind)
        _refuse_unknown(label, labels)
    return Example(texts, label, row.where)


def _cell(row: Row, name: str) -> Any:
    if name not in row.cells:
        known = ", ".join(map(repr, row.cells))
        raise TaskError(f"{row.where}: there is no column {name!r}; the columns are {known}")
    value = row.cells[name]
    if value is None:
        raise _BadRowError("nothing where a value is expected", f" in column {name!r}")
    return value


def _label(value: Any, kind: Kind) -> str | float | frozenset[str]:
    if kind == "multi":
        given = value if isinstance(value, list) else str(value).split(SEPARATOR)
        return frozenset(str(name).strip() for name in given if str(name).strip())
    if kind == "single":
        if isinstance(value, list | dict):
            raise _BadRowError("several labels where one is expected", "; see --kind multi")
        # JSON's true is a label named as it is written.
        name = json.dumps(value) if isinstance(value, bool) else str(value).strip()
        if not name:
            raise _BadRowError("an empty label")
        return name
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _BadRowError("a score that is no number", f": {value!r}") from None
    if not math.isfinite(number):
        raise _BadRowError("a score that is not finite", f": {value!r}")
    return number


def _refuse_unknown(label: str | float | frozenset[str], labels: Sequence[str] | None) -> None:
    if labels is None or isinstance(label, float):
        return
    strange = sorted((label if isinstance(label, frozenset) else {label}) - set(labels))
    if strange:
        known = ", ".join(map(repr, labels[:20]))
        raise _BadRowError("an unknown label", f": {strange[0]!r}; known are {known}")


def labels_of(examples: Iterable[Example], where: str) -> tuple[str, ...]:
    """Return the labels that occur, numbers by size, other names by the alphabet.

    Raises TaskError if there is one only: nothing could be learnt.
    """
    found: set[str] = set()
    for example in examples:
        if isinstance(example.label, str):
            found.add(example.label)
        elif isinstance(example.label, frozenset):
            found |= example.label
    if len(found) < 2:
        raise TaskError(
            f"{where}: {'every label is ' + repr(min(found)) if found else 'there is no label'}; "
            "expected two different ones at least"
        )
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


@dataclass(frozen=True)
class Inputs:
    """Examples as the model takes them.

    sequences: (ids, segments) each. targets: int64 [n] class numbers, float32 [n] scores, or
    float32 [n, C] of 0 and 1; None where no label is known.
    """

    sequences: list[tuple[list[int], list[int]]]
    targets: NDArray[Any] | None
    where: list[str]
    #: Whether something of the example was cut off.
    cut_off: list[bool]

    def __len__(self) -> int:
        """Return n."""
        return len(self.sequences)


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, head: Head, length: int, counts: Counts
) -> Inputs:
    """Return [CLS] A [SEP] or [CLS] A [SEP] B [SEP] of each example, cut to ``length`` tokens.

    What is cut off stands in ``counts``.
    """
    texts = [text for example in examples for text in example.texts]
    rest = iter(tokenizer.encode_batch(texts))
    sequences, cut_off = [], []
    for example in examples:
        ids = [next(rest) for _ in example.texts]
        kept = shortened(ids, length - 1 - len(ids))
        cut_off.append(sum(map(len, kept)) < sum(map(len, ids)))
        row, segments = [tokenizer.cls_id], [0]
        for segment, own in enumerate(kept):
            row += [*own, tokenizer.sep_id]
            segments += [segment] * (len(own) + 1)
        sequences.append((row, segments))
    counts.cut_off += sum(cut_off)
    where = [example.where for example in examples]
    return Inputs(sequences, targets_of(examples, head), where, cut_off)


def shortened(ids: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Cut one or two texts to ``room`` ids together, each at its end, the longer one first.

    Both long: the shorter one keeps half, as ``tokenizers`` truncates ("longest_first").
    """
    if len(ids) == 1:
        return [ids[0][:room]]
    sizes = [len(own) for own in ids]
    if sum(sizes) > room:
        short = min(*sizes, room // 2)
        first_is_longer = sizes[0] > sizes[1]
        sizes = [room - short, short] if first_is_longer else [short, room - short]
    return [own[:size] for own, size in zip(ids, sizes, strict=True)]


def targets_of(examples: Sequence[Example], head: Head) -> NDArray[Any] | None:
    """Return what is right as numbers; see ``Inputs``."""
    given = [example.label for example in examples]
    if any(label is None for label in given):
        return None
    if head.kind == "regression":
        return np.array(given, np.float32)
    number = {name: index for index, name in enumerate(head.labels)}
    if head.kind == "single":
        return np.array([number[str(label)] for label in given], np.int64)
    matrix = np.zeros((len(given), head.outputs), np.float32)
    for row, label in zip(matrix, given, strict=True):
        assert isinstance(label, frozenset)
        row[[number[name] for name in label]] = 1.0
    return matrix


def score(
    logits: NDArray[np.float32], targets: NDArray[Any], head: Head, names: Sequence[str]
) -> dict[str, float]:
    """Return the named metrics of logits float32 [n, C] against ``targets``."""
    if head.kind == "regression":
        said, right = logits[:, 0].astype(np.float64), targets.astype(np.float64)
        return {name: metrics.OF_NUMBERS[name](said, right) for name in names}
    if head.kind == "single":
        return {name: metrics.OF_CLASSES[name](logits.argmax(-1), targets) for name in names}
    chosen, wanted = (logits > 0).astype(np.int64), targets.astype(np.int64)
    return {"f1": metrics.f1(chosen, wanted),
            "accuracy": float((chosen == wanted).all(-1).mean())}  # fmt: skip


def check_metrics(names: Sequence[str], kind: Kind) -> None:
    """Raise SettingsError for a metric that this kind of task does not have."""
    known = {"single": tuple(metrics.OF_CLASSES), "regression": tuple(metrics.OF_NUMBERS),
             "multi": default_metrics("multi")}[kind]  # fmt: skip
    for name in names:
        if name not in known:
            raise SettingsError(
                f"task.metrics: {name!r} is no metric of the kind {kind!r}; "
                f"known are {', '.join(known)}"
            )


def default_metrics(kind: Kind) -> tuple[str, ...]:
    """Return the metrics where a task names none; the first one decides."""
    return {"single": ("accuracy", "macro_f1"), "multi": ("f1", "accuracy"),
            "regression": ("spearman", "pearson")}[kind]  # fmt: skip
