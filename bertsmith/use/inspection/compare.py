"""Compare two models: config, vocabulary, weights, and outputs on the same texts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.use.inspection.model_pairs import (
    ComparedModel,
    ComparedTexts,
    iter_paired_outputs,
    load_compared_model,
    tokenize_for_both,
)

#: Maximum number of differing ids in a report.
MAX_EXAMPLES = 10
#: Texts to compare outputs on by default. A tab separates the texts of a pair.
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
    """The difference between two tensors.

    Attributes:
        shapes: Shapes of the two tensors; None for a tensor that does not exist.
        max_abs_difference: Largest absolute difference of two elements; None if the shapes differ.
        scale: Largest absolute value in the two tensors.
    """

    shapes: tuple[list[int] | None, list[int] | None]
    max_abs_difference: float | None = None
    scale: float = 0.0

    @property
    def relative_difference(self) -> float | None:
        """Largest absolute difference divided by the scale; None if the shapes differ."""
        if self.max_abs_difference is None:
            return None
        if self.max_abs_difference == 0:
            # The scale may also be 0.
            return 0.0
        # NaN has no scale.
        return self.max_abs_difference / self.scale if self.scale else math.inf

    def is_within(self, tolerance: float) -> bool:
        """Return whether the tensors have the same shape and differ by at most the tolerance."""
        return self.max_abs_difference is not None and self.max_abs_difference <= tolerance

    def merge(self, other: "Difference") -> "Difference":
        """Return the difference over all elements of these tensors and of two other tensors.

        Args:
            other: The difference between two other tensors of the same shapes.
        """
        if self.max_abs_difference is None or other.max_abs_difference is None:
            return self
        return Difference(
            self.shapes,
            max(self.max_abs_difference, other.max_abs_difference),
            max(self.scale, other.scale),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the difference as a JSON value."""
        return {
            "shapes": self.shapes,
            "max_abs_difference": self.max_abs_difference,
            "relative_difference": self.relative_difference,
        }


@dataclass(frozen=True)
class VocabularyComparison:
    """Differences between two tokenizers.

    Attributes:
        sizes: Vocabulary sizes of A and B.
        settings: Names of the settings that differ, such as lowercasing -> (value of A, value of
            B).
        num_different_ids: Number of ids that have different tokens, or a token in only one
            vocabulary.
        examples: The first of these ids, as (id, token of A, token of B).
    """

    sizes: tuple[int, int]
    settings: dict[str, tuple[Any, Any]]
    num_different_ids: int
    examples: list[tuple[int, str | None, str | None]]


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    Attributes:
        paths: The directories of the models A and B.
        tolerance: Largest absolute difference between elements that counts as equal.
        config: Names of the config fields that differ -> (value of A, value of B).
        vocabulary: Differences between the tokenizers.
        tensors: Name of each weight -> its difference.
        outputs: Name of each output, such as a hidden state -> its difference over all texts.
        num_texts: Number of texts on which the outputs were compared.
        num_tokens: Number of tokens in these texts.
        num_truncated: Number of these texts that were truncated.
        num_skipped_pairs: Number of text pairs that were skipped because a model has only one
            segment.
        tokenized_differently: Texts that were skipped because the tokenizers give different tokens,
            as (text, tokens of A, tokens of B).
    """

    paths: tuple[str, str]
    tolerance: float
    config: dict[str, tuple[Any, Any]]
    vocabulary: VocabularyComparison
    tensors: dict[str, Difference]
    outputs: dict[str, Difference]
    num_texts: int
    num_tokens: int
    num_truncated: int
    num_skipped_pairs: int
    tokenized_differently: list[tuple[str, list[str], list[str]]] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether the models are equal, up to numerical differences within the tolerance."""
        has_equal_tokenizers = not (
            self.vocabulary.settings
            or self.vocabulary.num_different_ids
            or self.tokenized_differently
        )
        differences = [*self.tensors.values(), *self.outputs.values()]
        has_equal_numbers = all(difference.is_within(self.tolerance) for difference in differences)
        return not self.config and has_equal_tokenizers and has_equal_numbers

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON value."""
        return {
            "equal": self.is_equal,
            "paths": self.paths,
            "tolerance": self.tolerance,
            "config": self.config,
            "vocabulary": asdict(self.vocabulary),
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
            "outputs": {name: output.to_json() for name, output in self.outputs.items()},
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "num_truncated": self.num_truncated,
            "num_skipped_pairs": self.num_skipped_pairs,
            "tokenized_differently": self.tokenized_differently,
        }


def compare(
    a: Path | str,
    b: Path | str,
    texts: Sequence[str] | None = None,
    *,
    tolerance: float = 1e-5,
    device: str = "cpu",
) -> Comparison:
    """Compare two models, which may come from different toolkits and have different heads.

    Args:
        a: A model directory or run directory.
        b: Another model directory or run directory.
        texts: Texts on which to compare the outputs. Two texts separated by a tab are a pair. By
            default, a few sentences in English and Korean.
        tolerance: Largest absolute difference between elements that counts as equal.
        device: Device on which the outputs are computed.

    Raises:
        ModelError: A model cannot be loaded.
        InputError: All texts are empty.
    """
    lines = [text for text in (DEFAULT_TEXTS if texts is None else texts) if text.strip()]
    if not lines:
        raise InputError("there is no text to compare the models on; expected one text per line")
    model_a, model_b = load_compared_model(a, device), load_compared_model(b, device)
    tokenized = tokenize_for_both(model_a, model_b, lines)
    return Comparison(
        paths=(str(model_a.path), str(model_b.path)),
        tolerance=tolerance,
        config=_find_differing_values(model_a.facts, model_b.facts),
        vocabulary=_compare_vocabularies(model_a, model_b),
        tensors=_compare_tensors(model_a, model_b),
        outputs=_compare_outputs(model_a, model_b, tokenized),
        num_texts=len(tokenized.sequences_a),
        num_tokens=tokenized.num_tokens,
        num_truncated=tokenized.num_truncated,
        num_skipped_pairs=tokenized.num_skipped_pairs,
        tokenized_differently=tokenized.tokenized_differently,
    )


def measure_difference(a: Tensor | None, b: Tensor | None, skip_axes: int = 0) -> Difference:
    """Measure the difference between two float32 tensors. NaN is equal only to NaN.

    Args:
        a: A tensor, or None if it does not exist.
        b: Another tensor, or None if it does not exist.
        skip_axes: Number of leading axes that are not included in the shapes of the result.
    """
    shapes = (_get_shape(a, skip_axes), _get_shape(b, skip_axes))
    if a is None or b is None or a.shape != b.shape:
        return Difference(shapes)
    difference = (a - b).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0
    if not difference.numel():
        return Difference(shapes, 0.0)
    # A difference is NaN if only one of the two elements is NaN. It counts as infinite.
    difference[difference.isnan()] = torch.inf
    max_abs_difference = float(difference.max())
    scale = max(float(tensor.abs().nan_to_num().max()) for tensor in (a, b))
    return Difference(shapes, max_abs_difference, scale)


def _get_shape(tensor: Tensor | None, skip_axes: int) -> list[int] | None:
    return None if tensor is None else list(tensor.shape[skip_axes:])


def _find_differing_values(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ: key -> (value in a, value in b)."""
    names = dict.fromkeys([*a, *b])
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _compare_vocabularies(a: ComparedModel, b: ComparedModel) -> VocabularyComparison:
    """Compare the vocabularies and the settings of the tokenizers."""
    settings = [
        {name: value for name, value in vars(model.tokenizer.spec).items() if name != "vocab"}
        for model in (a, b)
    ]
    vocab_a, vocab_b = a.tokenizer.vocab, b.tokenizer.vocab
    different_ids = [
        (token_id, token_a, token_b)
        for token_id, (token_a, token_b) in enumerate(zip_longest(vocab_a, vocab_b))
        if token_a != token_b
    ]
    return VocabularyComparison(
        sizes=(len(vocab_a), len(vocab_b)),
        settings=_find_differing_values(*settings),
        num_different_ids=len(different_ids),
        examples=different_ids[:MAX_EXAMPLES],
    )


def _compare_tensors(a: ComparedModel, b: ComparedModel) -> dict[str, Difference]:
    """Return the difference of each weight by its Hugging Face name."""
    tensors_a, tensors_b = a.get_tensors(), b.get_tensors()
    names = dict.fromkeys([*tensors_a, *tensors_b])
    return {name: measure_difference(tensors_a.get(name), tensors_b.get(name)) for name in names}


def _compare_outputs(
    a: ComparedModel, b: ComparedModel, texts: ComparedTexts
) -> dict[str, Difference]:
    """Return the difference of each output, over all texts."""
    differences: dict[str, Difference] = {}
    for name, output_a, output_b in iter_paired_outputs(a, b, texts):
        # The first axis is the tokens or sequences of the batch, and is not reported in the shapes.
        difference = measure_difference(output_a, output_b, skip_axes=1)
        if name in differences:
            difference = differences[name].merge(difference)
        differences[name] = difference
    return differences
