"""Tell where two models differ: config, vocabulary, weights, and what they say of the same texts.

It never changes a model, nor says which of the two is right.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.use.inspection.model_pairs import (
    ComparedModel,
    TokenizedTexts,
    load_compared_model,
    paired_outputs,
    tokenize_for_both,
)

#: Ids and texts named in a report.
MAX_EXAMPLES = 10
#: Where nobody gives texts. A tab parts the two of a pair.
DEFAULT_TEXTS: Final = (
    "The ferry crosses the river twice a day, in the morning and in the evening.",
    "Nobody remembers a winter in which the ice held it fast!",
    "In 1998 she paid $1,250.75 for 3 books (all of them second-hand).",
    "나는 어제 친구와 함께 도서관에서 책을 읽었다.",
    "서울의 겨울은 춥지만, 눈이 오면 강가의 길이 아름답다.",
    "Where does the old pilot live?\tHe has a house by the river.",
    "내일은 비가 올까요?\t아니요, 하루 종일 맑을 것입니다.",
)


@dataclass(frozen=True)
class Difference:
    """How far two arrays of numbers are apart.

    shapes: of the first and the second; None where a model has none. largest: the largest absolute
    difference, None where the shapes differ. scale: the largest absolute number of both.
    """

    shapes: tuple[list[int] | None, list[int] | None]
    max_abs_difference: float | None = None
    scale: float = 0.0

    @property
    def relative(self) -> float | None:
        """The largest difference by the scale."""
        return (
            self.max_abs_difference / self.scale
            if self.max_abs_difference
            else self.max_abs_difference
        )

    def is_within(self, tolerance: float) -> bool:
        """Tell whether both are there, of one shape, and not further apart than that."""
        return self.max_abs_difference is not None and self.max_abs_difference <= tolerance

    def merge(self, other: "Difference") -> "Difference":
        """Return the measure of both measures' arrays together; the shapes are the same."""
        if self.max_abs_difference is None or other.max_abs_difference is None:
            return self
        largest, scale = (
            max(self.max_abs_difference, other.max_abs_difference),
            max(self.scale, other.scale),
        )
        return Difference(self.shapes, largest, scale)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "shapes": self.shapes,
            "largest": self.max_abs_difference,
            "relative": self.relative,
        }


@dataclass(frozen=True)
class VocabularyComparison:
    """sizes: words of each. choices: how text is cleaned, where that differs, name -> both.

    differing: how many ids stand for other words, or for one in one vocabulary only. first: the
    first of them, as (id, word, word).
    """

    sizes: tuple[int, int]
    choices: dict[str, tuple[Any, Any]]
    differing: int
    first: list[tuple[int, str | None, str | None]]


@dataclass(frozen=True)
class Comparison:
    """What was found; ``config`` has the fields that differ, name -> both.

    otherwise: texts that the tokenizers cut otherwise, as (text, tokens, tokens); nothing else is
    asked about those. texts: how many the models were asked about, of ``tokens`` together.
    """

    paths: tuple[str, str]
    tolerance: float
    config: dict[str, tuple[Any, Any]]
    vocabulary: VocabularyComparison
    tensors: dict[str, Difference]
    outputs: dict[str, Difference]
    texts: int
    tokens: int
    cut_off: int
    without_pairs: int
    otherwise: list[tuple[str, list[str], list[str]]] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs save numbers, and those by the tolerance at most."""
        numbers = [*self.tensors.values(), *self.outputs.values()]
        words = self.vocabulary
        differs = self.config or words.choices or words.differing or self.otherwise
        return not differs and all(one.is_within(self.tolerance) for one in numbers)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        measures = {
            name: {key: one.to_json() for key, one in found.items()}
            for name, found in (("tensors", self.tensors), ("outputs", self.outputs))
        }
        return {"equal": self.is_equal} | asdict(self) | measures


def compare(
    a: Path | str,
    b: Path | str,
    texts: Sequence[str] | None = None,
    *,
    tolerance: float = 1e-5,
    device: str = "cpu",
) -> Comparison:
    """Compare two model directories or RUNs, of any origin and any heads.

    texts: what both are asked about, one sequence each; a tab parts the two of a pair. Raises
    ModelError, and QuestionError for texts without a word.
    """
    lines = [text for text in (DEFAULT_TEXTS if texts is None else texts) if text.strip()]
    if not lines:
        raise InputError("there is no text to compare the models on; expected a text a line")
    first, second = load_compared_model(a, device), load_compared_model(b, device)
    both = tokenize_for_both(first, second, lines)
    return Comparison(
        paths=(str(first.path), str(second.path)),
        tolerance=tolerance,
        config=_differing(first.facts, second.facts),
        vocabulary=_vocabularies(first, second),
        tensors=_tensors(first, second),
        outputs=_outputs(first, second, both),
        texts=len(both.sequences_a),
        tokens=both.num_tokens,
        cut_off=both.cut_off,
        without_pairs=both.without_pairs,
        otherwise=both.otherwise,
    )


def measure_difference(a: Tensor | None, b: Tensor | None, skip_axes: int = 0) -> Difference:
    """Return how far two float32 tensors are apart; NaN is equal to NaN, and to nothing else.

    ``skip_axes``: how many of the first ones are left out of the shapes that are told.
    """
    shapes = (_shape(a, skip_axes), _shape(b, skip_axes))
    if a is None or b is None or a.shape != b.shape:
        return Difference(shapes)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0
    if not apart.numel():
        return Difference(shapes, 0.0)
    # nan_to_num would make a large number of infinity, too.
    apart[apart.isnan()] = torch.inf
    largest = float(apart.max())
    scale = max(float(one.abs().nan_to_num().max()) for one in (a, b))
    return Difference(shapes, largest, scale)


def _shape(tensor: Tensor | None, axes: int) -> list[int] | None:
    return None if tensor is None else list(tensor.shape[axes:])


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*a, *b])
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _vocabularies(a: ComparedModel, b: ComparedModel) -> VocabularyComparison:
    choices = [
        {name: value for name, value in vars(side.tokenizer.spec).items() if name != "vocab"}
        for side in (a, b)
    ]
    words = a.tokenizer.vocab, b.tokenizer.vocab
    longest = max(map(len, words))
    filled = [(*own, *[None] * (longest - len(own))) for own in words]
    differing = [
        (number, one, other)
        for number, (one, other) in enumerate(zip(*filled, strict=True))
        if one != other
    ]
    sizes = len(words[0]), len(words[1])
    return VocabularyComparison(
        sizes, _differing(*choices), len(differing), differing[:MAX_EXAMPLES]
    )


def _tensors(a: ComparedModel, b: ComparedModel) -> dict[str, Difference]:
    first, second = a.tensors(), b.tensors()
    names = dict.fromkeys([*first, *second])
    return {name: measure_difference(first.get(name), second.get(name)) for name in names}


def _outputs(a: ComparedModel, b: ComparedModel, texts: TokenizedTexts) -> dict[str, Difference]:
    """Return for each output how far it is apart, all texts together."""
    found: dict[str, Difference] = {}
    for name, one, other in paired_outputs(a, b, texts):
        # The first axis is that of the batch: tokens, or sequences.
        own = measure_difference(one, other, skip_axes=1)
        found[name] = found[name].merge(own) if name in found else own
    return found
