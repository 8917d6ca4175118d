"""Tell where two models differ: config, vocabulary, weights, and what they say of the same texts.

It never changes a model, nor says which of the two is right.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bertsmith.errors import QuestionError
from bertsmith.use.inspection.model_pairs import Side, Texts, encoded, opened, outputs

#: Ids and texts named in a report.
NAMED = 10
#: Where nobody gives texts. A tab parts the two of a pair.
SENTENCES: Final = (
    "The ferry crosses the river twice a day, in the morning and in the evening.",
    "Nobody remembers a winter in which the ice held it fast!",
    "In 1998 she paid $1,250.75 for 3 books (all of them second-hand).",
    "나는 어제 친구와 함께 도서관에서 책을 읽었다.",
    "서울의 겨울은 춥지만, 눈이 오면 강가의 길이 아름답다.",
    "Where does the old pilot live?\tHe has a house by the river.",
    "내일은 비가 올까요?\t아니요, 하루 종일 맑을 것입니다.",
)


@dataclass(frozen=True)
class Measure:
    """How far two arrays of numbers are apart.

    shapes: of the first and the second; None where a model has none. largest: the largest absolute
    difference, None where the shapes differ. scale: the largest absolute number of both.
    """

    shapes: tuple[list[int] | None, list[int] | None]
    largest: float | None = None
    scale: float = 0.0

    @property
    def relative(self) -> float | None:
        """The largest difference by the scale."""
        return self.largest / self.scale if self.largest else self.largest

    def within(self, tolerance: float) -> bool:
        """Tell whether both are there, of one shape, and not further apart than that."""
        return self.largest is not None and self.largest <= tolerance

    def joined(self, other: "Measure") -> "Measure":
        """Return the measure of both measures' arrays together; the shapes are the same."""
        if self.largest is None or other.largest is None:
            return self
        largest, scale = max(self.largest, other.largest), max(self.scale, other.scale)
        return Measure(self.shapes, largest, scale)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {"shapes": self.shapes, "largest": self.largest, "relative": self.relative}


@dataclass(frozen=True)
class Vocabularies:
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
    vocabulary: Vocabularies
    tensors: dict[str, Measure]
    outputs: dict[str, Measure]
    texts: int
    tokens: int
    cut_off: int
    without_pairs: int
    otherwise: list[tuple[str, list[str], list[str]]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs save numbers, and those by the tolerance at most."""
        numbers = [*self.tensors.values(), *self.outputs.values()]
        words = self.vocabulary
        differs = self.config or words.choices or words.differing or self.otherwise
        return not differs and all(one.within(self.tolerance) for one in numbers)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        measures = {
            name: {key: one.to_json() for key, one in found.items()}
            for name, found in (("tensors", self.tensors), ("outputs", self.outputs))
        }
        return {"equal": self.equal} | asdict(self) | measures


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
    lines = [text for text in (SENTENCES if texts is None else texts) if text.strip()]
    if not lines:
        raise QuestionError("there is no text to compare the models on; expected a text a line")
    first, second = opened(a, device), opened(b, device)
    both = encoded(first, second, lines)
    return Comparison(
        paths=(str(first.path), str(second.path)),
        tolerance=tolerance,
        config=_differing(first.facts, second.facts),
        vocabulary=_vocabularies(first, second),
        tensors=_tensors(first, second),
        outputs=_outputs(first, second, both),
        texts=len(both.first),
        tokens=both.tokens,
        cut_off=both.cut_off,
        without_pairs=both.without_pairs,
        otherwise=both.otherwise,
    )


def measure(a: Tensor | None, b: Tensor | None, axes: int = 0) -> Measure:
    """Return how far two float32 tensors are apart; NaN is equal to NaN, and to nothing else.

    ``axes``: how many of the first ones are left out of the shapes that are told.
    """
    shapes = (_shape(a, axes), _shape(b, axes))
    if a is None or b is None or a.shape != b.shape:
        return Measure(shapes)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0
    if not apart.numel():
        return Measure(shapes, 0.0)
    # nan_to_num would make a large number of infinity, too.
    apart[apart.isnan()] = torch.inf
    largest = float(apart.max())
    scale = max(float(one.abs().nan_to_num().max()) for one in (a, b))
    return Measure(shapes, largest, scale)


def _shape(tensor: Tensor | None, axes: int) -> list[int] | None:
    return None if tensor is None else list(tensor.shape[axes:])


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*a, *b])
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _vocabularies(a: Side, b: Side) -> Vocabularies:
    choices = [
        {name: value for name, value in vars(side.tokenizer.recipe).items() if name != "vocab"}
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
    return Vocabularies(sizes, _differing(*choices), len(differing), differing[:NAMED])


def _tensors(a: Side, b: Side) -> dict[str, Measure]:
    first, second = a.tensors(), b.tensors()
    names = dict.fromkeys([*first, *second])
    return {name: measure(first.get(name), second.get(name)) for name in names}


def _outputs(a: Side, b: Side, texts: Texts) -> dict[str, Measure]:
    """Return for each output how far it is apart, all texts together."""
    found: dict[str, Measure] = {}
    for name, one, other in outputs(a, b, texts):
        # The first axis is that of the batch: tokens, or sequences.
        own = measure(one, other, axes=1)
        found[name] = found[name].joined(own) if name in found else own
    return found
