"""Building of models from stored tensors, whose names, shapes and dtypes are all checked.

Tensors are copied one at a time, so that the weights are in memory only once.
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
    DECODER_WEIGHT,
    detect_non_bert_architecture,
    is_redundant,
    map_to_hf_names,
    normalize_names,
)
from bertsmith.errors import ModelError
from bertsmith.memory import format_bytes, get_total_memory_bytes
from bertsmith.model.config import ModelConfig

Model = TypeVar("Model", bound=nn.Module)

_WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
_POOLER_WEIGHTS = tuple(f"bert.pooler.dense.{parameter}" for parameter in ("weight", "bias"))
_NSP_WEIGHTS = tuple(f"cls.seq_relationship.{parameter}" for parameter in ("weight", "bias"))
#: Suffixes of the names of batch norm statistics, which are not parameters.
_BATCH_NORM_STATISTICS = (".running_mean", ".running_var")
#: Maximum number of weight names in a message.
_MAX_LISTED_NAMES = 5


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model directory.

    Attributes:
        directory: The model directory.
        tensors: The tensors by their names in current releases of transformers.
        file_tensors: All tensors by their names in the files.
    """

    directory: Path
    tensors: dict[str, StoredTensor]
    file_tensors: dict[str, StoredTensor]

    @property
    def num_parameters(self) -> int:
        """The number of parameters; tied weights count once."""
        return sum(
            math.prod(tensor.shape)
            for name, tensor in self.tensors.items()
            if name != DECODER_WEIGHT and not name.endswith(_BATCH_NORM_STATISTICS)
        )

    @property
    def has_nsp_head(self) -> bool:
        """Whether any weight of a next-sentence head is stored."""
        return any(name in self.tensors for name in _NSP_WEIGHTS)

    @property
    def has_mlm_head(self) -> bool:
        """Whether any weight of a masked-LM head is stored."""
        return any(name.startswith("cls.predictions.") for name in self.tensors)

    @property
    def has_pooler(self) -> bool:
        """Whether any weight of a pooler is stored."""
        return any(name in self.tensors for name in _POOLER_WEIGHTS)


def open_weights(directory: Path, config: ModelConfig) -> StoredWeights:
    """List the tensors of a directory and check that they have the sizes in the config.

    Models must be built only after this check: a damaged config could otherwise request more memory
    than the stored tensors need.

    Raises:
        ModelError: The weights are missing or damaged, belong to another architecture, or do not
            have the sizes in the config.
    """
    file_tensors = list_tensors(directory)
    architecture = detect_non_bert_architecture(file_tensors)
    if architecture is not None:
        article = "an" if architecture[0] in "AE" else "a"
        raise ModelError(
            f"{directory}: these are the weights of {article} {architecture}, not of a BERT; use a "
            "BERT model",
        )
    tensors = {
        name: file_tensors[stored_name]
        for name, stored_name in normalize_names(file_tensors).items()
    }
    weights = StoredWeights(directory, tensors, file_tensors)
    embeddings = "bert.embeddings"
    expected_shapes = {
        _WORD_EMBEDDINGS: (config.vocab_size, config.width),
        f"{embeddings}.position_embeddings.weight": (config.max_positions, config.width),
        f"{embeddings}.token_type_embeddings.weight": (config.segments, config.width),
        "bert.encoder.layer.0.intermediate.dense.weight": (config.feed_forward, config.width),
    }
    for name, shape in expected_shapes.items():
        _get_tensor(weights, name, shape)
    # The loop ends at the first missing layer, even if a damaged config specifies billions of
    # layers.
    for layer in range(config.layers):
        query_name = f"bert.encoder.layer.{layer}.attention.self.query.weight"
        _get_tensor(weights, query_name, (config.width, config.width))
    return weights


def build_with_weights(
    build: Callable[[], Model],
    weights: StoredWeights,
    optional: Collection[str] = (),
) -> tuple[Model, tuple[str, ...]]:
    """Build a model and load its weights, without a second copy in memory.

    Args:
        build: Function that builds the model. It is called with the meta device as the default, so
            that no memory is allocated.
        weights: The stored tensors.
        optional: Parameters that may be missing. Their values are then undefined.

    Returns:
        The model, and the names of stored tensors that it does not use.

    Raises:
        ModelError: A weight is missing or has another shape or dtype.
    """
    try:
        with torch.device("meta"):
            meta_model = build()
    except RuntimeError as error:
        raise ModelError(
            f"{weights.directory}: {CONFIG_FILE} contains a size that PyTorch cannot allocate: "
            f"{error}"
        ) from None
    stored = match_weights(meta_model, weights, optional)
    model = allocate_on_cpu(meta_model, weights.directory)
    tie_decoder(model)
    unused = copy_weights(model, stored, weights)
    return model, unused


def allocate_on_cpu(meta_model: Model, directory: Path) -> Model:
    """Move a model from the meta device to the CPU; the values of its weights are undefined.

    Raises:
        ModelError: The machine has too little memory.
    """
    num_bytes = sum(weight.numel() * weight.element_size() for weight in meta_model.parameters())
    total_bytes = get_total_memory_bytes()
    if num_bytes > total_bytes:
        raise ModelError(
            f"{directory}: this model needs {format_bytes(num_bytes)} of memory, and this machine "
            f"has {format_bytes(total_bytes)}; use a smaller model or a larger machine",
        )
    try:
        return meta_model.to_empty(device="cpu")
    except RuntimeError as error:
        raise ModelError(f"{directory}: out of memory: {error}") from None


def tie_decoder(model: nn.Module) -> None:
    """Tie the masked-LM decoder to the word embeddings again, because ``to_empty`` unties them."""
    head = getattr(model, "mlm", None)
    if head is not None:
        word_embeddings = model.get_submodule("bert.embeddings.words")
        head.decoder.weight = word_embeddings.weight


def match_weights(
    model: nn.Module,
    weights: StoredWeights,
    optional: Collection[str] = (),
    excluded: Collection[str] = (),
) -> dict[str, list[StoredTensor]]:
    """Return the stored tensors of each parameter of a model.

    The fused weight of queries, keys and values has three stored tensors. Other parameters have
    one.

    Args:
        model: The model whose parameters are matched.
        weights: The stored tensors.
        optional: Parameters that are omitted from the result if they are missing.
        excluded: Parameters that are always omitted from the result.

    Raises:
        ModelError: A weight is missing or has another shape or dtype.
    """
    state = model.state_dict()
    stored = {}
    for name, stored_names in map_to_hf_names(state).items():
        is_missing = not any(stored_name in weights.tensors for stored_name in stored_names)
        if name in excluded or (name in optional and is_missing):
            continue
        num_rows, *other_sizes = state[name].shape
        shape = (num_rows // len(stored_names), *other_sizes)
        stored[name] = [_get_tensor(weights, stored_name, shape) for stored_name in stored_names]
    return stored


@torch.no_grad()
def copy_weights(
    model: nn.Module,
    stored: Mapping[str, list[StoredTensor]],
    weights: StoredWeights,
) -> tuple[str, ...]:
    """Copy stored tensors into a model's parameters, one at a time, converted to float32.

    Args:
        model: The model whose parameters are overwritten.
        stored: The stored tensors of each parameter, as returned by ``match_weights``.
        weights: All stored tensors.

    Returns:
        The names of stored tensors that were not used.
    """
    state = model.state_dict()
    used = {id(tensor) for tensors in stored.values() for tensor in tensors}
    for name, tensors in stored.items():
        for chunk, tensor in zip(state[name].chunk(len(tensors)), tensors, strict=True):
            chunk.copy_(tensor.load())
    decoder = weights.tensors.get(DECODER_WEIGHT)
    if decoder is not None and "mlm.decoder.bias" in stored:
        _check_tied_decoder(weights, decoder, state["bert.embeddings.words.weight"])
        used.add(id(decoder))
    return tuple(
        name
        for name, tensor in weights.file_tensors.items()
        if id(tensor) not in used and not is_redundant(name)
    )


def _check_tied_decoder(
    weights: StoredWeights,
    decoder: StoredTensor,
    word_embeddings: Tensor,
) -> None:
    """Raise ModelError if a stored decoder weight differs from the word embeddings."""
    weight = decoder.load()
    if weight.shape != word_embeddings.shape or not torch.equal(
        weight,
        word_embeddings.to(weight.dtype),
    ):
        raise ModelError(
            f"{decoder.file}: {DECODER_WEIGHT} differs from {_WORD_EMBEDDINGS}; only models with "
            "tied weights are supported (tie_word_embeddings in "
            f"{weights.directory / CONFIG_FILE})"
        )


def _get_tensor(weights: StoredWeights, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a stored tensor after checking its shape and dtype."""
    tensor = weights.tensors.get(name)
    if tensor is None:
        tensors = weights.file_tensors.values()
        path = next(iter(tensors)).file if tensors else weights.directory
        raise ModelError(f"{path}: the tensor {name!r} is missing; use a complete model")
    if tensor.shape != shape:
        hint = ""
        if name == _WORD_EMBEDDINGS and tensor.shape[1:] == shape[1:]:
            hint = (
                f"; if the vocabulary was resized, set vocab_size to {tensor.shape[0]:,} in "
                f"{CONFIG_FILE}"
            )
        raise ModelError(
            f"{tensor.file}: {name} has shape {tensor.shape}; {CONFIG_FILE} requires {shape}{hint}",
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise ModelError(
            f"{tensor.file}: {name} has the dtype {tensor.dtype}; convert it to one of "
            f"{', '.join(sorted(FLOAT_DTYPES))}",
        )
    return tensor


def describe_names(directory: Path, message: str, names: Iterable[str]) -> list[str]:
    """Return a list with one message about weight names, or an empty list if there are no names.

    Args:
        directory: The model directory.
        message: The text before the names.
        names: The names, of which the message contains the first few.
    """
    all_names = list(names)
    if not all_names:
        return []
    listed_names = ", ".join(all_names[:_MAX_LISTED_NAMES])
    num_omitted = len(all_names) - _MAX_LISTED_NAMES
    suffix = f" and {num_omitted:,} more" if num_omitted > 0 else ""
    return [f"{directory}: {message}: {listed_names}{suffix}"]
