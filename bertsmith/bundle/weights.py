"""From the tensors of a directory to the weights of a model: every name, shape and kind checked.

It never knows which files the tensors are in, and holds no second copy of them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from bertsmith.bundle.config import CONFIG_FILE
from bertsmith.bundle.tensor_files import FLOAT_DTYPES, StoredTensor, list_tensors
from bertsmith.bundle.weight_names import (
    DECODER,
    detect_other_architecture,
    hf_names,
    is_redundant,
    normalize_names,
)
from bertsmith.errors import ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.model.memory import format_bytes, total_memory_bytes

Model = TypeVar("Model", bound=nn.Module)

_WORDS = "bert.embeddings.word_embeddings.weight"
_POOLED = tuple(f"bert.pooler.dense.{kind}" for kind in ("weight", "bias"))
_NEXT = tuple(f"cls.seq_relationship.{kind}" for kind in ("weight", "bias"))
#: How the names of batch norm's statistics end, which nothing trains.
_STATISTICS = (".running_mean", ".running_var")
#: Names that a note shows before it only counts.
_SHOWN = 5


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model directory under today's names.

    tensors: each tensor by that name; files: by the name in the files.
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    file_tensors: dict[str, StoredTensor]

    @property
    def num_parameters(self) -> int:
        """How many numbers were trained; of weights that are tied, one counts."""
        counted = (own for name, own in self.tensors.items()
                   if name != DECODER and not name.endswith(_STATISTICS))  # fmt: skip
        return sum(math.prod(own.shape) for own in counted)

    @property
    def has_nsp_head(self) -> bool:
        """Whether anything of a next-sentence head is there."""
        return any(name in self.tensors for name in _NEXT)

    @property
    def has_mlm_head(self) -> bool:
        """Whether anything of a masked-LM head is there."""
        return any(name.startswith("cls.predictions.") for name in self.tensors)

    @property
    def has_pooler(self) -> bool:
        """Whether anything of a pooler is there."""
        return any(name in self.tensors for name in _POOLED)


def open_weights(directory: Path, config: ModelConfig) -> StoredWeights:
    """Tell what tensors a directory has, and check that the config's sizes are theirs.

    Only then may a model be built of the config: its sizes are bounded by the file's real ones.
    Raises ModelError.
    """
    files = list_tensors(directory)
    other = detect_other_architecture(files)
    if other is not None:
        raise ModelError(f"{directory}: these are the weights of {_a(other)}, not of a BERT")
    weights = StoredWeights(
        directory, {today: files[name] for today, name in normalize_names(files).items()}, files
    )
    embeddings = "bert.embeddings"
    expected = {
        _WORDS: (config.vocab_size, config.width),
        f"{embeddings}.position_embeddings.weight": (config.max_positions, config.width),
        f"{embeddings}.token_type_embeddings.weight": (config.segments, config.width),
        "bert.encoder.layer.0.intermediate.dense.weight": (config.feed_forward, config.width),
    }
    for name, shape in expected.items():
        _tensor(weights, name, shape)
    # Stops at the first that is missing, whatever number the config promises.
    for number in range(config.layers):
        _tensor(weights, f"bert.encoder.layer.{number}.attention.self.query.weight",
                (config.width, config.width))  # fmt: skip
    return weights


def build_with_weights(
    make: Callable[[], Model], weights: StoredWeights, optional: Collection[str] = ()
) -> tuple[Model, tuple[str, ...]]:
    """Return a model with every weight read, in memory once; and the names that had no place in it.

    ``make`` builds the model; none of its first weights is drawn. Of ``optional`` names, those that
    are missing are left to the caller: they hold whatever the memory held.
    """
    try:
        with torch.device("meta"):
            empty = make()
    except RuntimeError as error:
        raise ModelError(f"{weights.directory}: sizes that no model can have: {error}") from None
    plan = match_weights(empty, weights, optional)
    model = allocate_on_cpu(empty, weights.directory)
    tie(model)
    left_out = copy_weights(model, plan, weights)
    return model, left_out


def allocate_on_cpu(empty: Model, directory: Path) -> Model:
    """Return a model of the meta device with memory on the CPU, its values undefined.

    Raises ModelError where the machine has not that much.
    """
    needed = sum(own.numel() * own.element_size() for own in empty.parameters())
    if needed > total_memory_bytes():
        raise ModelError(
            f"{directory}: this model takes {format_bytes(needed)} of memory, and this machine has "
            f"{format_bytes(total_memory_bytes())}; use a smaller model or a larger machine"
        )
    try:
        return empty.to_empty(device="cpu")
    except RuntimeError as error:
        raise ModelError(f"{directory}: not enough memory for it: {error}") from None


def tie(model: nn.Module) -> None:
    """Let the masked-LM head have the word embeddings for its weights; a move parts the two."""
    head = getattr(model, "mlm", None)
    if head is not None:
        words = model.get_submodule("bert.embeddings.words")
        head.decoder.weight = words.weight


def match_weights(
    model: nn.Module,
    weights: StoredWeights,
    optional: Collection[str] = (),
    excluded: Collection[str] = (),
) -> dict[str, list[StoredTensor]]:
    """Return the stored tensors of each of our names, three for queries, keys and values.

    Of ``optional`` names, those that are missing are left out; those of ``excluded`` are in any case.
    Raises ModelError for what is missing, or has another shape or kind.
    """
    state = model.state_dict()
    plan = {}
    for ours, theirs in hf_names(list(state)).items():
        missing = not any(name in weights.tensors for name in theirs)
        if ours in excluded or (ours in optional and missing):
            continue
        first, *rest = state[ours].shape
        shape = (first // len(theirs), *rest)
        plan[ours] = [_tensor(weights, name, shape) for name in theirs]
    return plan


@torch.no_grad()
def copy_weights(
    model: nn.Module, plan: Mapping[str, list[StoredTensor]], weights: StoredWeights
) -> tuple[str, ...]:
    """Copy stored tensors into a model's own, one at a time; return the names that were not used.

    16-bit floats are widened on the way.
    """
    state = model.state_dict()
    used = {id(one) for stored in plan.values() for one in stored}
    for ours, stored in plan.items():
        for piece, one in zip(state[ours].chunk(len(stored)), stored, strict=True):
            piece.copy_(one.load())
    decoder = weights.tensors.get(DECODER)
    if decoder is not None and "mlm.decoder.bias" in plan:
        _check_tied(weights, decoder, state["bert.embeddings.words.weight"])
        used.add(id(decoder))
    return tuple(name for name, one in weights.file_tensors.items()
                 if id(one) not in used and not is_redundant(name))  # fmt: skip


def _check_tied(weights: StoredWeights, decoder: StoredTensor, words: Tensor) -> None:
    """Check that a decoder that is stored by itself is the word embeddings all the same."""
    own = decoder.load()
    if own.shape != words.shape or not torch.equal(own, words.to(own.dtype)):
        raise ModelError(
            f"{decoder.file}: {DECODER} differs from {_WORDS}; only models that share the two are "
            f"known here ({weights.directory / CONFIG_FILE} should say tie_word_embeddings)"
        )


def _tensor(weights: StoredWeights, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor, checked."""
    own = weights.tensors.get(name)
    if own is None:
        where = (
            next(iter(weights.file_tensors.values())).file
            if weights.file_tensors
            else weights.directory
        )
        raise ModelError(f"{where}: the tensor {name!r} is missing")
    if own.shape != shape:
        hint = ""
        if name == _WORDS and own.shape[1:] == shape[1:]:
            hint = f"; if the vocabulary was resized, vocab_size should be {own.shape[0]:,} there"
        raise ModelError(
            f"{own.file}: {name} has shape {own.shape}; {CONFIG_FILE} asks for {shape}{hint}"
        )
    if own.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{own.file}: {name} is in {own.dtype}; expected {', '.join(sorted(FLOAT_DTYPES))}; "
            "convert it first"
        )
    return own


def describe_names(directory: Path, what: str, found: Iterable[str]) -> list[str]:
    """Return a note on some names, none for no names."""
    every = list(found)
    if not every:
        return []
    shown = ", ".join(every[:_SHOWN])
    more = f" and {len(every) - _SHOWN:,} more" if len(every) > _SHOWN else ""
    return [f"{directory}: {what}: {shown}{more}"]


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AE' else 'a'} {name}"
