"""Reading of the examples of an embedding model: each distinct text is tokenized once.

In shapes, n is the number of examples.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import TaskError
from bertsmith.tasks.embedding_columns import open_rows, resolve_columns
from bertsmith.tasks.embedding_settings import EmbeddingSettings, ExampleKind, TextColumns
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.label_values import parse_score, to_label_name
from bertsmith.tasks.tables import Row, get_cell, get_text, require_text

Ints = NDArray[np.int64]
#: What a text is in an example. Queries and documents may have different prompts.
TextRole = Literal["text", "query", "document"]
#: Texts that are tokenized together.
_TEXTS_PER_BATCH: Final = 4096


class TokenizeTexts(Protocol):
    """A function that tokenizes texts."""

    def __call__(self, texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        """Return [CLS] text [SEP] for each text; count truncated texts and [UNK] tokens."""


@dataclass(frozen=True)
class TextPrompts:
    """The prefix of the texts of each role.

    Attributes:
        text: Prefix of texts that are neither queries nor documents.
        query: Prefix of queries: the anchors of pairs.
        document: Prefix of documents: the positives and negatives of pairs.
    """

    text: str = ""
    query: str = ""
    document: str = ""

    def get(self, role: TextRole) -> str:
        """Return the prefix of texts of this role."""
        return {"text": self.text, "query": self.query, "document": self.document}[role]

    @property
    def distinguishes_roles(self) -> bool:
        """Whether queries and documents have different prefixes."""
        return self.query != self.document


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids of distinct texts with their prompts, one after another.

    Attributes:
        ids: int32 [number of tokens], with [CLS] and [SEP].
        offsets: int64 [number of texts + 1], the start of each text in ``ids``.
        identities: int64 [number of texts]. Texts that differ only in their prompt have the same
            number.
    """

    ids: NDArray[np.int32]
    offsets: Ints
    identities: Ints

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.offsets) - 1

    def get_lengths(self, numbers: Ints) -> Ints:
        """Return the number of tokens of the texts with these numbers, int64 [n]."""
        lengths: Ints = self.offsets[numbers + 1] - self.offsets[numbers]
        return lengths

    def get(self, index: int) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.ids[self.offsets[index] : self.offsets[index + 1]].tolist()
        return ids

    def select(self, numbers: Ints) -> "EncodedTexts":
        """Return the texts with these numbers, of which there is at least one."""
        ranges = zip(self.offsets[numbers], self.offsets[numbers + 1], strict=True)
        ids = np.concatenate([self.ids[start:end] for start, end in ranges])
        offsets = np.concatenate([[0], np.cumsum(self.get_lengths(numbers))])
        _, identities = np.unique(self.identities[numbers], return_inverse=True)
        return EncodedTexts(ids, offsets, identities.astype(np.int64))


class TextCollector:
    """Numbers distinct texts, and tokenizes each of them once.

    A text is identified by its hash, so that texts need not stay in memory.
    """

    def __init__(self, tokenize: TokenizeTexts, prompts: TextPrompts | None = None) -> None:
        """Create the collector.

        Args:
            tokenize: Tokenizes texts that include their prompts.
            prompts: The prompt of each role; None for no prompts.
        """
        self._tokenize = tokenize
        self._prompts = prompts or TextPrompts()
        self._index_of_digest: dict[bytes, int] = {}
        #: Numbers of the texts without prompts, if roles have different prompts.
        self._identity_of_digest: dict[bytes, int] = {}
        self._identities = array("q")
        self._pending: list[str] = []
        self._chunks: list[NDArray[np.int32]] = []
        self._lengths = array("q")

    def add(self, text: str, counts: ExampleCounts, role: TextRole = "text") -> int:
        """Return the number of a text; ``counts`` counts truncated texts and [UNK] tokens."""
        prompted = self._prompts.get(role) + text
        index = _number_text(self._index_of_digest, prompted)
        if index == len(self._lengths) + len(self._pending):
            if self._prompts.distinguishes_roles:
                self._identities.append(_number_text(self._identity_of_digest, text))
            self._pending.append(prompted)
            if len(self._pending) == _TEXTS_PER_BATCH:
                self.flush(counts)
        return index

    def add_row(self, texts: Sequence[str], kind: ExampleKind, counts: ExampleCounts) -> list[int]:
        """Return the numbers of the texts of a row, as returned by ``get_row_texts``."""
        roles: list[TextRole] = ["text"] * len(texts)
        if kind == "pairs":
            roles = ["document"] * len(texts)
            roles[0] = "query"
        return [self.add(text, counts, role) for text, role in zip(texts, roles, strict=True)]

    def flush(self, counts: ExampleCounts) -> None:
        """Tokenize the texts that are not tokenized yet."""
        if not self._pending:
            return
        sequences = self._tokenize(self._pending, counts)
        self._lengths.extend(map(len, sequences))
        self._chunks.append(np.array([i for ids in sequences for i in ids], np.int32))
        self._pending = []

    def collect(self) -> EncodedTexts:
        """Return all texts; ``flush`` must have been called."""
        offsets = np.concatenate([[0], np.cumsum(np.array(self._lengths, np.int64))])
        ids = np.concatenate(self._chunks) if self._chunks else np.empty(0, np.int32)
        identities = np.array(self._identities, np.int64)
        if not self._prompts.distinguishes_roles:
            identities = np.arange(len(self._lengths))
        return EncodedTexts(ids, offsets.astype(np.int64), identities)


def _number_text(number_of_digest: dict[bytes, int], text: str) -> int:
    """Return the number of a text, which is the next one for a new text."""
    digest = blake2b(text.encode(), digest_size=16).digest()
    return number_of_digest.setdefault(digest, len(number_of_digest))


@dataclass(frozen=True)
class EmbeddingExamples:
    """Examples of one kind; texts are given by their number in ``texts``.

    Attributes:
        kind: The kind of all examples.
        texts: All distinct texts.
        anchors: int64 [n], the first text of each example.
        positives: int64 [n], the second text; the anchor itself if the kind has no second text.
        negatives: int64 [number of negatives].
        negative_offsets: int64 [n + 1], the first negative of each example in ``negatives``.
        scores: float32 [n], similarities; 0 for kinds without scores.
        labels: int64 [n], classes; 0 for kinds without labels.
        file_indices: int64 [n], the file of each example.
    """

    kind: ExampleKind
    texts: EncodedTexts
    anchors: Ints
    positives: Ints
    negatives: Ints
    negative_offsets: Ints
    scores: NDArray[np.float32]
    labels: Ints
    file_indices: Ints

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.anchors)

    def select(self, indices: Ints) -> "EmbeddingExamples":
        """Return the examples with these indices; all texts are kept."""
        counts = self.count_negatives(indices)
        return EmbeddingExamples(
            kind=self.kind,
            texts=self.texts,
            anchors=self.anchors[indices],
            positives=self.positives[indices],
            negatives=self.get_negatives(indices),
            negative_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            scores=self.scores[indices],
            labels=self.labels[indices],
            file_indices=self.file_indices[indices],
        )

    def count_negatives(self, indices: Ints) -> Ints:
        """Return the number of negatives of the examples with these indices, int64 [n]."""
        counts: Ints = self.negative_offsets[indices + 1] - self.negative_offsets[indices]
        return counts

    def get_negatives(self, indices: Ints) -> Ints:
        """Return the negatives of the examples with these indices, one example after another."""
        starts, ends = self.negative_offsets[indices], self.negative_offsets[indices + 1]
        ranges = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return self.negatives[np.concatenate(ranges)] if ranges else np.empty(0, np.int64)

    def list_used_texts(self) -> Ints:
        """Return the numbers of the texts that occur in an example, in ascending order."""
        return np.unique(np.concatenate([self.anchors, self.positives, self.negatives]))

    def drop_unused_texts(self) -> "EmbeddingExamples":
        """Return the examples, with only the texts that occur in them."""
        numbers = self.list_used_texts()

        def renumber(texts: Ints) -> Ints:
            return np.searchsorted(numbers, texts).astype(np.int64)

        return replace(
            self,
            texts=self.texts.select(numbers),
            anchors=renumber(self.anchors),
            positives=renumber(self.positives),
            negatives=renumber(self.negatives),
        )


@dataclass
class _ExampleCollector:
    """The examples read so far, as growing arrays of the fields of ``EmbeddingExamples``."""

    texts: TextCollector
    keep_duplicate_scores: bool = False
    anchors: "array[int]" = field(default_factory=lambda: array("q"))
    positives: "array[int]" = field(default_factory=lambda: array("q"))
    negatives: "array[int]" = field(default_factory=lambda: array("q"))
    negative_offsets: "array[int]" = field(default_factory=lambda: array("q", [0]))
    scores: "array[float]" = field(default_factory=lambda: array("f"))
    labels: "array[int]" = field(default_factory=lambda: array("q"))
    file_indices: "array[int]" = field(default_factory=lambda: array("q"))
    index_of_label: dict[str, int] = field(default_factory=dict)
    label_of_text: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def add_row(
        self, row: Row, columns: TextColumns, file_index: int, counts: ExampleCounts
    ) -> None:
        """Add the example of a row.

        Raises:
            BadExampleError: The row is invalid.
        """
        texts = get_row_texts(row, columns)
        score, label = 0.0, 0
        if columns.score is not None:
            score = parse_score(get_cell(row, columns.score, "--score"))
        label_name = ""
        if columns.label is not None:
            label_name = to_label_name(get_cell(row, columns.label, "--label"))
            if not label_name:
                raise BadExampleError("an empty label")
        if columns.kind == "pairs":
            _reject_equal_texts(texts)
        numbers = self.texts.add_row(texts, columns.kind, counts)
        if label_name:
            label = self._number_label(numbers[0], label_name)
        # Not the score itself, because -1.0 and -2.0 have the same hash.
        key = hash((*numbers, str(score)))
        is_kept = self.keep_duplicate_scores and columns.kind == "scored_pairs"
        if key in self.seen and not is_kept:
            counts.skipped["a duplicate of an earlier example"] += 1
            counts.first_skipped.setdefault("a duplicate of an earlier example", row.location)
            counts.num_used -= 1
            return
        self.seen.add(key)
        self.anchors.append(numbers[0])
        self.positives.append(numbers[1] if columns.pair is not None else numbers[0])
        self.negatives.extend(numbers[2:])
        self.negative_offsets.append(len(self.negatives))
        self.scores.append(score)
        self.labels.append(label)
        self.file_indices.append(file_index)

    def _number_label(self, text: int, name: str) -> int:
        """Return the number of a label; raise BadExampleError if the text has another label."""
        label = self.index_of_label.setdefault(name, len(self.index_of_label))
        if self.label_of_text.setdefault(text, label) != label:
            raise BadExampleError("a text that has another label in an earlier row", f": {name!r}")
        return label

    def collect(self, kind: ExampleKind) -> EmbeddingExamples:
        """Return all examples."""
        return EmbeddingExamples(
            kind=kind,
            texts=self.texts.collect(),
            anchors=np.array(self.anchors, np.int64),
            positives=np.array(self.positives, np.int64),
            negatives=np.array(self.negatives, np.int64),
            negative_offsets=np.array(self.negative_offsets, np.int64),
            scores=np.array(self.scores, np.float32),
            labels=np.array(self.labels, np.int64),
            file_indices=np.array(self.file_indices, np.int64),
        )


def read_examples(
    paths: Sequence[Path],
    settings: EmbeddingSettings,
    tokenize: TokenizeTexts,
    columns: TextColumns,
    other_columns: TextColumns | None = None,
    prompts: TextPrompts | None = None,
    *,
    keep_duplicate_scores: bool = False,
) -> tuple[EmbeddingExamples, list[ExampleCounts]]:
    """Read the examples of one or several tables, which must be of the same kind.

    Exact duplicates are dropped and counted, except for scored pairs if they are to be kept.

    Args:
        paths: The tables.
        settings: How to read the tables.
        tokenize: Tokenizes texts that include their prompts.
        columns: The columns that the user has named; see ``resolve_columns``.
        other_columns: Columns to look for if the user has named none.
        prompts: The prompt of each role; None for no prompts.
        keep_duplicate_scores: Whether to keep duplicates of scored pairs, which published
            correlations include.

    Returns:
        The examples, and the counts of each table.

    Raises:
        TaskError: A table cannot be read, has no valid example, or is of another kind than the
            first.
    """
    collector = _ExampleCollector(TextCollector(tokenize, prompts), keep_duplicate_scores)
    all_counts: list[ExampleCounts] = []
    kind: ExampleKind | None = None
    for file_index, path in enumerate(paths):
        file_columns = resolve_columns(path, settings, columns, other_columns)
        kind = kind or file_columns.kind
        if file_columns.kind != kind:
            raise TaskError(
                f"{path}: its examples are {describe_kind(file_columns.kind)}, but those of "
                f"{paths[0]} are {describe_kind(kind)}; give files of the same kind"
            )
        counts = ExampleCounts()
        all_counts.append(counts)
        with open_rows(path, settings, file_columns, counts.notes) as rows:
            for row in rows:
                with counts.count_example(row.location, settings):
                    collector.add_row(row, file_columns, file_index, counts)
        collector.texts.flush(counts)
        if not counts.num_used:
            reason = "this file has none"
            if counts.num_read:
                reason = f"all {counts.num_read:,} are duplicates or invalid"
            raise TaskError(f"{path}: {reason}; expected at least one valid example")
    assert kind is not None
    return collector.collect(kind), all_counts


def describe_kind(kind: ExampleKind) -> str:
    """Return the name of a kind of examples in messages."""
    names = {"scored_pairs": "scored pairs", "labeled_texts": "labeled texts"}
    return names.get(kind, kind)


def get_row_texts(row: Row, columns: TextColumns) -> list[str]:
    """Return the text of a row, the second text, and the negatives, if there are such columns.

    Raises:
        BadExampleError: A cell is empty or has no text.
    """
    assert columns.text is not None
    texts = [get_text(row, columns.text, "--text")]
    if columns.pair is not None:
        texts.append(get_text(row, columns.pair, "--pair"))
    for column in columns.negatives:
        texts += parse_texts(get_cell(row, column, "--negatives"), column)
    return texts


def parse_texts(value: Any, column: str) -> list[str]:
    """Return the texts in a cell: a text, or a list of texts."""
    if isinstance(value, list):
        if not value:
            raise BadExampleError("an empty list of texts", f" in column {column!r}")
        return [require_text(item, column) for item in value]
    return [require_text(value, column)]


def _reject_equal_texts(texts: Sequence[str]) -> None:
    """Raise BadExampleError if the anchor, the positive and the negatives are not all different."""
    anchor, positive, *negatives = texts
    if anchor == positive:
        raise BadExampleError("an anchor and a positive that are the same text", f": {anchor!r}")
    for text in negatives:
        if text in (anchor, positive):
            error = "a negative that is also the anchor or the positive"
            raise BadExampleError(error, f": {text!r}")
