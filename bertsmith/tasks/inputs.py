"""What the families of tasks share: the counts of a file, encoded examples, parts of a batch.

It never knows what a task asks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

#: Word ids and segment ids of one sequence.
TokenSequence = tuple[list[int], list[int]]
Example = TypeVar("Example")


@dataclass
class ExampleCounts:
    """What became of the examples of a file: nothing is dropped in silence.

    unseen_labels: of a training file, the labels that are known and that none of its examples has.
    num_without_target: of a training file, the inputs that have no target and so teach nothing.
    token_counts: those of the texts that were encoded, and how many of them are [UNK].
    """

    num_read: int = 0
    num_used: int = 0
    num_truncated: int = 0
    #: Answers that stand whole in no window, and are trained as if there were none.
    num_unreachable_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    #: By the reason, file and line of the first one that was skipped.
    first_skipped: dict[str, str] = field(default_factory=dict)
    unseen_labels: list[str] | None = None
    num_without_target: int = 0
    #: What a user should know of how the file was read.
    notes: list[str] = field(default_factory=list)
    token_counts: TokenCounts = field(default_factory=TokenCounts)

    @contextmanager
    def count_example(
        self, where: str, task: TaskSettings, *, labeled: bool = True
    ) -> Iterator[None]:
        """Count an example that is read inside; a bad one is an error, or, if set so, skipped.

        labeled: whether the file is; of others, which are a benchmark's, each needs its answer.
        """
        self.num_read += 1
        try:
            yield
        except BadExampleError as fault:
            place = fault.location or where
            if not task.skip_bad:
                advice = "mend it, or leave such examples out with --skip-bad"
                raise TaskError(f"{place}: {fault}; {advice if labeled else 'mend it'}") from None
            self.skipped[fault.reason] += 1
            self.first_skipped.setdefault(fault.reason, place)
        else:
            self.num_used += 1

    def require_examples(self, examples: list[Example], path: Path) -> list[Example]:
        """Return the examples that were read; TaskError if there is none."""
        if not examples:
            raise TaskError(
                f"{path}: no example could be used, of {self.num_read:,}; expected one at least"
            )
        return examples

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        counts = {"read": self.num_read, "used": self.num_used, "cut_off": self.num_truncated,
                  "skipped": dict(self.skipped)}  # fmt: skip
        more = {"first_skipped": self.first_skipped or None, "unseen": self.unseen_labels,
                "unreached": self.num_unreachable_answers or None, "untaught": self.num_without_target or None,
                "notes": self.notes or None,
                "unknown_share": self.token_counts.unknown_share if self.token_counts.num_tokens else None,
                }  # fmt: skip
        return counts | {name: value for name, value in more.items() if value is not None}


class BadExampleError(Exception):
    """An example that cannot be used. ``reason``: the same words for all that have this fault.

    location: file and line of the fault, where they are not those of the example.
    """

    def __init__(self, reason: str, detail: str = "", where: str | None = None) -> None:
        super().__init__(reason + detail)
        self.reason, self.location = reason, where


def to_batch_token_indices(packed: PackedBatch, asked: Sequence[Sequence[int]]) -> Tensor:
    """Return int64 [M], the places in the packed row of those asked about in each sequence."""
    starts = packed.cu_seqlens.tolist()
    return torch.tensor(
        [start + place for start, own in zip(starts, asked, strict=False) for place in own],
        dtype=torch.int64,
    )


@dataclass
class ModelInputs:
    """Units of training as the model takes them: texts, windows of a text, choices.

    sequences: one for each unit, several for a choice. places: the tokens of a unit's sequence that
    are asked about, or None where the model asks by itself. targets: what is right, an array for
    each unit, stacked along the first axis in a batch, empty where the unit's tokens do not hold
    it; None where it is not known. where: file and line. cut_off: whether something of the text is
    left out. memo: what the family itself keeps.
    """

    sequences: list[list[TokenSequence]]
    locations: list[str]
    is_truncated: list[bool]
    targets: list[NDArray[Any]] | None = None
    token_indices: list[list[int]] | None = None
    family_data: Any = None

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.sequences)

    def num_tokens(self, number: int) -> int:
        """Return the tokens of a unit."""
        return sum(len(ids) for ids, _ in self.sequences[number])

    def indices_with_target(self) -> list[int]:
        """Return the numbers of the units that have a target; what is right must be known."""
        assert self.targets is not None
        return [number for number, own in enumerate(self.targets) if len(own)]

    def make_micro_batch(
        self, numbers: Sequence[int], weights: NDArray[np.float32] | None = None
    ) -> "MicroBatch":
        """Return some units as a part of a batch. ``weights``: by class, float32 [C]."""
        rows = [one for number in numbers for one in self.sequences[number]]
        packed = pack_sequences(rows)
        places = None
        if self.token_indices is not None:
            places = to_batch_token_indices(
                packed, [self.token_indices[number] for number in numbers]
            )
        assert self.targets is not None
        targets = torch.from_numpy(np.concatenate([self.targets[number] for number in numbers]))
        counted = torch.ones(len(targets))
        if weights is not None:
            counted = torch.from_numpy(weights)[targets]
        sizes = [len(self.sequences[number]) for number in numbers]
        return MicroBatch(packed, places, targets, counted, sizes)


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch. weights: float32 [U], what each of its targets [U, …] counts.

    token_indices: int64 [M] or None; see ``ModelInputs``. sizes: how many sequences each unit has.
    """

    packed: PackedBatch
    token_indices: Tensor | None
    targets: Tensor
    target_weights: Tensor
    sequences_per_unit: list[int]

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the part on ``device``."""
        places = None if self.token_indices is None else self.token_indices.to(device)
        return MicroBatch(self.packed.to(device), places, self.targets.to(device),
                    self.target_weights.to(device), self.sequences_per_unit)  # fmt: skip


class TaskFamily(Protocol):
    """What a family of tasks is asked for: a module of this room has these functions.

    The examples are of the family's own kind, and the others never look inside.
    """

    #: Tokens of an input where nobody says.
    DEFAULT_LENGTH: int

    def read_examples(
        self,
        path: Path,
        task: TaskSettings,
        *,
        labels: Sequence[str] | None = None,
        labeled: bool = True,
    ) -> tuple[list[Any], ExampleCounts]:
        """Read the examples of a file; a bad one is an error, or, if so set, a counted skip.

        ``labels``: the known ones, where an example with another is bad. Raises TaskError.
        """

    def collect_labels(self, examples: Sequence[Any], where: str) -> tuple[str, ...]:
        """Return the labels that occur, in the order of the outputs; TaskError if useless."""

    def encode_examples(
        self,
        examples: Sequence[Any],
        tokenizer: Tokenizer,
        head: HeadConfig,
        task: TaskSettings,
        counts: ExampleCounts,
    ) -> ModelInputs:
        """Return the examples as inputs of at most ``task.length`` tokens; count what is cut."""

    def compute_losses(self, outputs: Tensor, part: MicroBatch, head: HeadConfig) -> Tensor:
        """Return float32 [U], the loss of each target, from the model's outputs of a part."""

    def compute_metrics(
        self,
        outputs: list[NDArray[np.float32]],
        inputs: ModelInputs,
        examples: Sequence[Any],
        head: HeadConfig,
        task: TaskSettings,
    ) -> dict[str, float]:
        """Return the named metrics of the model's outputs, float32 [m, C] for each unit."""

    def compute_class_report(
        self,
        outputs: list[NDArray[np.float32]],
        inputs: ModelInputs,
        examples: Sequence[Any],
        head: HeadConfig,
    ) -> dict[str, Any]:
        """Return scores by class, for JSON; empty where a family has no classes.

        classes: precision, recall, F1 and support of each label. confusion: for each right label
        the counts of the predicted ones, where each target has one label.
        """

    def list_metrics(self, task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the metrics where a task names none, the deciding one first, and all there are."""
