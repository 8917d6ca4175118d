"""Data structures shared by the task families: example counts, model inputs and micro-batches."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.unknown import TokenCounts
from bertsmith.text.wordpiece import Tokenizer

#: Token ids and segment ids of one sequence.
TokenSequence = tuple[list[int], list[int]]
Example = TypeVar("Example")


class HasSkipInvalid(Protocol):
    """Settings that say whether invalid examples are skipped."""

    @property
    def skip_invalid(self) -> bool:
        """Whether invalid examples are skipped and counted; otherwise they are errors."""


@dataclass
class ExampleCounts:
    """How many examples of a file were read, used, truncated and skipped.

    Attributes:
        num_read: Examples in the file.
        num_used: Examples without errors.
        num_truncated: Examples longer than the maximum length.
        num_unreachable_answers: Answers that no window contains entirely. Their questions are
            trained as unanswerable.
        skipped: Number of skipped examples by reason.
        first_skipped: File and line of the first skipped example by reason.
        first_problems: File, line and problem of the first invalid example by reason.
        unseen_labels: Labels of ``task.labels`` that no training example has.
        num_without_target: Training inputs without a target, which do not contribute to the loss.
        notes: Messages about how the file was read.
        token_counts: Tokens of the encoded texts, and how many are [UNK].
    """

    num_read: int = 0
    num_used: int = 0
    num_truncated: int = 0
    num_unreachable_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    first_problems: dict[str, str] = field(default_factory=dict)
    unseen_labels: list[str] | None = None
    num_without_target: int = 0
    notes: list[str] = field(default_factory=list)
    token_counts: TokenCounts = field(default_factory=TokenCounts)

    @contextmanager
    def count_example(
        self,
        location: str,
        task: HasSkipInvalid,
        *,
        labeled: bool = True,
    ) -> Iterator[None]:
        """Count the example that is read in the ``with`` block.

        With ``task.skip_invalid`` a ``BadExampleError`` is counted; otherwise it becomes a
        TaskError.

        Args:
            location: File and line of the example.
            task: The settings of the task or of an embedding model.
            labeled: Whether the file has labels. Unlabeled test files need a prediction for every
                row, so the error does not suggest skipping rows.
        """
        self.num_read += 1
        try:
            yield
        except BadExampleError as error:
            error_location = error.location or location
            if not task.skip_invalid:
                advice = "correct it, or skip such examples with --skip-invalid"
                raise TaskError(
                    f"{error_location}: {error}; {advice if labeled else 'correct it'}",
                ) from None
            self.skipped[error.reason] += 1
            self.first_skipped.setdefault(error.reason, error_location)
            self.first_problems.setdefault(error.reason, f"{error_location}: {error}")
        else:
            self.num_used += 1

    def require_examples(self, examples: list[Example], path: Path) -> list[Example]:
        """Return the examples; raise TaskError if there are none."""
        if not examples:
            if not self.num_read:
                raise TaskError(f"{path}: this file has no examples; expected at least one")
            reason = max(self.skipped, key=lambda reason: self.skipped[reason])
            raise TaskError(
                f"{path}: all examples were skipped ({self.num_read:,}), such as "
                f"{self.first_problems.get(reason, reason)}; expected at least one valid example",
            )
        return examples

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        counts = {
            "num_read": self.num_read,
            "num_used": self.num_used,
            "num_truncated": self.num_truncated,
            "skipped": dict(self.skipped),
        }
        unknown_share = self.token_counts.unknown_share if self.token_counts.num_tokens else None
        optional = {
            "first_skipped": self.first_skipped or None,
            "unseen_labels": self.unseen_labels,
            "num_unreachable_answers": self.num_unreachable_answers or None,
            "num_without_target": self.num_without_target or None,
            "notes": self.notes or None,
            "unknown_share": unknown_share,
        }
        return counts | {name: value for name, value in optional.items() if value is not None}


class BadExampleError(Exception):
    """An example that cannot be used.

    Attributes:
        reason: What is wrong, without details of the example. Skipped examples are counted by
            reason.
        location: File and line of the error, None if it is at the start of the example.
    """

    def __init__(self, reason: str, detail: str = "", location: str | None = None) -> None:
        super().__init__(reason + detail)
        self.reason = reason
        self.location = location


def to_batch_token_indices(packed: PackedBatch, token_indices: Sequence[Sequence[int]]) -> Tensor:
    """Convert token indices within each sequence to indices into the packed batch.

    Returns:
        int64 [M], where M is the number of indices of all sequences.
    """
    batch_indices: list[int] = []
    # The last entry of ``cu_seqlens`` is the end of the last sequence.
    sequence_starts = packed.cu_seqlens[:-1].tolist()
    for start, indices in zip(sequence_starts, token_indices, strict=True):
        batch_indices += [start + index for index in indices]
    return torch.tensor(batch_indices, dtype=torch.int64)


@dataclass
class ModelInputs:
    """Encoded examples. An input is a text, a window of a text, or a prompt with its endings.

    Attributes:
        sequences: The sequences of each input. A prompt has one sequence for each ending, other
            inputs have a single sequence.
        locations: File and line of each input.
        is_truncated: Whether each input was truncated.
        targets: The targets of each input, empty if the input has no target. A micro-batch
            concatenates them along the first axis. None for unlabeled data.
        token_indices: Indices of the tokens of each input for which outputs are needed. None if the
            model selects them.
        decoding_data: Data that the task family needs to convert outputs to answers or tags.
    """

    sequences: list[list[TokenSequence]]
    locations: list[str]
    is_truncated: list[bool]
    targets: list[NDArray[Any]] | None = None
    token_indices: list[Sequence[int]] | None = None
    decoding_data: Any = None

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(self.sequences)

    def select(self, indices: Sequence[int]) -> "ModelInputs":
        """Return the sequences and token indices of some inputs, without their targets."""
        return ModelInputs(
            sequences=[self.sequences[index] for index in indices],
            locations=[self.locations[index] for index in indices],
            is_truncated=[self.is_truncated[index] for index in indices],
            token_indices=self.token_indices and [self.token_indices[index] for index in indices],
        )

    def count_tokens(self, index: int) -> int:
        """Return the number of tokens of an input."""
        return sum(len(ids) for ids, _ in self.sequences[index])

    def find_inputs_with_target(self) -> list[int]:
        """Return the indices of the inputs that have a target; the data must be labeled."""
        assert self.targets is not None
        return [index for index, targets in enumerate(self.targets) if len(targets)]

    def make_micro_batch(
        self,
        indices: Sequence[int],
        class_weights: NDArray[np.float32] | None = None,
    ) -> "TaskMicroBatch":
        """Return a micro-batch of the selected inputs; the data must be labeled.

        Args:
            indices: Indices of the inputs.
            class_weights: float32 [C], None for equal weights.
        """
        packed = pack_sequences(
            [sequence for index in indices for sequence in self.sequences[index]]
        )
        token_indices = None
        if self.token_indices is not None:
            selected_token_indices = [self.token_indices[index] for index in indices]
            token_indices = to_batch_token_indices(packed, selected_token_indices)
        assert self.targets is not None
        targets = torch.from_numpy(np.concatenate([self.targets[index] for index in indices]))
        target_weights = torch.ones(len(targets))
        if class_weights is not None:
            target_weights = torch.from_numpy(class_weights)[targets]
        sequences_per_input = [len(self.sequences[index]) for index in indices]
        return TaskMicroBatch(
            packed, token_indices, targets, target_weights, sequences_per_input, list(indices)
        )


@dataclass(frozen=True)
class TaskMicroBatch:
    """Packed inputs of a fine-tuning task and their targets, for one forward and backward pass.

    Attributes:
        packed: The packed sequences.
        token_indices: int64 [M], the M packed tokens for which outputs are needed, or None.
        targets: [N, ...], the N targets of all inputs.
        target_weights: float32 [N], the weight of each target's loss.
        sequences_per_input: Number of sequences of each input.
        input_indices: Index of each input in the ``ModelInputs``.
    """

    packed: PackedBatch
    token_indices: Tensor | None
    targets: Tensor
    target_weights: Tensor
    sequences_per_input: list[int]
    input_indices: list[int] = field(default_factory=list)

    def to(self, device: torch.device) -> "TaskMicroBatch":
        """Return the micro-batch on ``device``."""
        token_indices = None if self.token_indices is None else self.token_indices.to(device)
        return replace(
            self,
            packed=self.packed.to(device),
            token_indices=token_indices,
            targets=self.targets.to(device),
            target_weights=self.target_weights.to(device),
        )


class TaskFamily(Protocol):
    """The functions that the module of a task family defines.

    Each family has a different type of examples, which only functions of that family inspect.
    """

    def read_examples(
        self,
        path: Path,
        task: TaskSettings,
        *,
        labels: Sequence[str] | None = None,
        labeled: bool = True,
    ) -> tuple[list[Any], ExampleCounts]:
        """Read the examples of a file.

        Args:
            path: The file.
            task: The task settings; with ``skip_invalid`` invalid examples are skipped and counted.
            labels: Allowed labels, None for any.
            labeled: Whether to read the labels.

        Raises:
            TaskError: The file is unreadable, or an example is invalid.
        """

    def collect_labels(self, examples: Sequence[Any], path: str) -> tuple[str, ...]:
        """Return the distinct labels, in the order of the model's outputs.

        Args:
            examples: The training examples.
            path: Name of the training file, for error messages.

        Raises:
            TaskError: The labels are insufficient for training.
        """

    def encode_examples(
        self,
        examples: Sequence[Any],
        tokenizer: Tokenizer,
        head: HeadConfig,
        task: TaskSettings,
        counts: ExampleCounts,
    ) -> ModelInputs:
        """Encode examples as inputs of at most ``task.max_seqlen`` tokens; update ``counts``."""

    def compute_losses(self, outputs: Tensor, batch: TaskMicroBatch, head: HeadConfig) -> Tensor:
        """Return the loss of each of the U targets of a micro-batch, float32 [U]."""

    def compute_metrics(
        self,
        outputs: list[NDArray[np.float32]],
        inputs: ModelInputs,
        examples: Sequence[Any],
        head: HeadConfig,
        task: TaskSettings,
    ) -> dict[str, float]:
        """Return the metrics of ``task.metrics``.

        Args:
            outputs: Model outputs of each input, float32 [m, C].
            inputs: The encoded examples.
            examples: The labeled examples.
            head: Kind and labels of the head.
            task: The task settings.
        """

    def compute_class_report(
        self,
        outputs: list[NDArray[np.float32]],
        inputs: ModelInputs,
        examples: Sequence[Any],
        head: HeadConfig,
        task: TaskSettings,
    ) -> dict[str, Any]:
        """Return the scores of each class as JSON values, empty for families without classes.

        ``classes`` has the precision, recall, F1 and support of each label. If each target has a
        single label, ``confusion`` has the counts of the predicted labels for each true label.
        """

    def list_metrics(self, task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the default metrics and all supported metrics of the task's kind.

        The first default metric selects the best checkpoint.
        """
