"""Import of TensorFlow checkpoints: checks all names and shapes, then copies each tensor."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.bundle import FineTunedBundle, HeadConfig, PretrainedBundle, read_info
from bertsmith.bundle.metadata import read_max_seqlen
from bertsmith.bundle.weight_names import map_to_hf_names
from bertsmith.bundle.weights import tie_decoder
from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow import names as variable_names
from bertsmith.interop.tensorflow.release import (
    CONFIG_FILE,
    Checkpoint,
    open_checkpoint,
    read_config,
    read_tokenizer,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig

Model = TypeVar("Model", bound=nn.Module)

#: Prefixes of the weight names of heads that are newly initialized if they are missing.
_OPTIONAL_HEADS = ("mlm.", "nsp.")
#: Seed of newly initialized weights. It is fixed so that importing a checkpoint is reproducible.
_SEED = 0


def read_tensorflow(
    path: Path | str, *, lowercase: bool | None = None, files_from: Path | str | None = None
) -> PretrainedBundle | FineTunedBundle:
    """Read an original BERT release, or a model fine-tuned with its code, in eval mode.

    Args:
        path: A folder, a file of a checkpoint, or the common prefix of its files. The checkpoint
            may have the V1, V2 or object-based format.
        lowercase: Whether text is lowercased; None to detect it (see ``read_tokenizer``).
        files_from: The folder of bert_config.json and vocab.txt; None for the checkpoint's folder.

    Returns:
        The model. ``info["imported"]`` contains the names of newly initialized and of unused
        tensors, and a note about the casing of the tokenizer.

    Raises:
        ModelError: A file is missing or damaged, or this is not a supported model.
    """
    checkpoint = open_checkpoint(Path(path))
    folder = checkpoint.path.parent if files_from is None else Path(files_from)
    stored_names = _map_to_stored_names(checkpoint)
    info = read_info(folder)
    has_nsp = any(name.startswith("bert/pooler/") for name in stored_names)
    positions = info.get("positions", "learned")
    config = read_config(folder / CONFIG_FILE, nsp=has_nsp, positions=positions)
    _check_sizes(checkpoint, stored_names, config)
    tokenizer, case_note = read_tokenizer(folder, lowercase)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: vocab.txt has {tokenizer.vocab_size:,} tokens, but the model has only "
            f"{config.vocab_size:,}; use the vocabulary with which the model was trained"
        )
    head = _read_head(checkpoint, stored_names, info)
    source = f"a TensorFlow checkpoint in {checkpoint.format_name} format"
    imported = {"source": source, "case": case_note}
    if head is None:
        model, report = _build_model(lambda: BertForPreTraining(config), checkpoint, stored_names)
        info = info | {"imported": imported | report}
        return PretrainedBundle(model, tokenizer, config, folder, info)
    fine_tuned, report = _build_model(lambda: head.build_model(config), checkpoint, stored_names)
    info = info | {"imported": imported | report}
    max_seqlen = read_max_seqlen(folder, config)
    return FineTunedBundle(fine_tuned, tokenizer, config, head, folder, info, max_seqlen=max_seqlen)


def _map_to_stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Map the original BERT's variable names to the checkpoint's tensor names.

    Raises:
        ModelError: The checkpoint is not a BERT.
    """
    stored = list(checkpoint.shapes)
    architecture = variable_names.detect_non_bert_architecture(stored)
    official_words = variable_names.to_official_name(variable_names.WORD_EMBEDDINGS)
    if not architecture and variable_names.WORD_EMBEDDINGS in checkpoint.shapes:
        return {name: name for name in stored}
    if not architecture and official_words in checkpoint.shapes:
        return _map_to_official_names(checkpoint)
    weights = [name for name in stored if not variable_names.is_training_state(name)]
    finding = f"this is {architecture}" if architecture else "this is not a BERT"
    raise ModelError(
        f"{checkpoint.path}: {finding}: its tensors are {', '.join(weights[:3]) or 'none'}, …; "
        "use a checkpoint with the tensor names of the original BERT, such as "
        f"{variable_names.WORD_EMBEDDINGS}"
    )


def _map_to_official_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Map the original BERT's variable names to the tensor names of the official TF2 model.

    Names that are not in the checkpoint are omitted.
    """
    num_layers = sum(name.endswith("/intermediate/kernel") for name in checkpoint.shapes)
    config = ModelConfig(vocab_size=1, layers=max(num_layers, 1), width=1, heads=1)
    with torch.device("meta"):
        hf_names = map_to_hf_names(BertForPreTraining(config).state_dict())
    result = {}
    for group in hf_names.values():
        for hf_name in group:
            original_name = variable_names.to_original_name(hf_name)
            official_name = variable_names.to_official_name(original_name)
            if official_name in checkpoint.shapes:
                result[original_name] = official_name
    return result


def _check_sizes(
    checkpoint: Checkpoint, stored_names: Mapping[str, str], config: ModelConfig
) -> None:
    """Raise ModelError if the config and the checkpoint have different sizes.

    This is checked before the model is built, because a damaged config could request any amount of
    memory.
    """
    num_layers = variable_names.count_layers(stored_names)
    if num_layers != config.layers:
        raise ModelError(
            f"{checkpoint.path}: the checkpoint has {num_layers} layers, but {CONFIG_FILE} says "
            f"{config.layers}; use the config of this checkpoint"
        )
    expected_shapes = {
        variable_names.WORD_EMBEDDINGS: (config.vocab_size, config.width),
        variable_names.POSITION_EMBEDDINGS: (config.max_positions, config.width),
        variable_names.SEGMENT_EMBEDDINGS: (config.segments, config.width),
        variable_names.FIRST_FEED_FORWARD_KERNEL: (config.width, config.feed_forward),
    }
    for name, shape in expected_shapes.items():
        _check_shape(checkpoint, stored_names, name, shape)
    checkpoint.check_data([stored_names[name] for name in expected_shapes])


def _check_shape(
    checkpoint: Checkpoint, stored_names: Mapping[str, str], name: str, expected: tuple[int, ...]
) -> None:
    """Raise ModelError unless a tensor exists and has the expected shape.

    In the official TF2 model, attention weights have the shape [D, N, H] instead of [D, D], with
    the same order of values.
    """
    if name not in stored_names:
        raise ModelError(
            f"{checkpoint.path}: the tensor {name!r} is missing; use a complete checkpoint"
        )
    stored_name = stored_names[name]
    shape = checkpoint.shapes[stored_name]
    is_official = stored_name != name and "/self_attention/" in stored_name
    if shape == expected or (is_official and math.prod(shape) == math.prod(expected)):
        return
    raise ModelError(
        f"{checkpoint.path}: {stored_name} has shape {shape}, but {CONFIG_FILE} requires {expected}"
    )


def _read_head(
    checkpoint: Checkpoint, stored_names: Mapping[str, str], info: Mapping[str, Any]
) -> HeadConfig | None:
    """Return the task kind and labels of a fine-tuned checkpoint; None if it is pre-trained."""
    if variable_names.SQUAD_WEIGHTS in stored_names:
        return HeadConfig("span")
    if variable_names.CLASSIFIER_WEIGHTS not in stored_names:
        return None
    stored_name = stored_names[variable_names.CLASSIFIER_WEIGHTS]
    shape = checkpoint.shapes[stored_name]
    checkpoint.check_data([stored_name])
    if shape[:1] == (1,):
        return HeadConfig("regression")
    default_labels = tuple(f"LABEL_{index}" for index in range(shape[0] if shape else 0))
    labels = tuple(str(label) for label in info.get("labels", ()))
    return HeadConfig("single", labels if len(labels) == len(default_labels) else default_labels)


def _build_model(
    build: Callable[[], Model], checkpoint: Checkpoint, stored_names: Mapping[str, str]
) -> tuple[Model, dict[str, Any]]:
    """Build a model and copy the checkpoint's weights into it.

    Returns:
        The model in eval mode, and a report with the names of newly initialized weights, the names
        of unused tensors, and the number of tensors of the training state.
    """
    with torch.device("meta"):
        model = build()
    sources = _match_weights(model, checkpoint, stored_names)
    used = {stored_names[name] for group in sources.values() for name in group}
    checkpoint.check_data(sorted(used))
    new_weights = [name for name in map_to_hf_names(model.state_dict()) if name not in sources]
    if new_weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = build()
    else:
        # The weights are not initialized, which would take longer than reading them.
        model.to_empty(device="cpu")
        tie_decoder(model)
    state = model.state_dict()
    for name, group in sources.items():
        # A fused weight, such as query_key_value, is stored as several tensors.
        for original_name, chunk in zip(group, state[name].chunk(len(group)), strict=True):
            _copy_tensor(chunk, checkpoint, stored_names[original_name])
    unused = [name for name in checkpoint.shapes if name not in used]
    training_state = [name for name in unused if variable_names.is_training_state(name)]
    report = {
        "newly_initialized": new_weights,
        "unused": [name for name in unused if name not in training_state],
        "num_training_state_tensors": len(training_state),
    }
    return model.eval(), report


def _match_weights(
    model: nn.Module, checkpoint: Checkpoint, stored_names: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the original variable names of each weight of the model.

    Heads that have no weights in the checkpoint are omitted.

    Raises:
        ModelError: A weight outside these heads is missing, or a shape is wrong.
    """
    state = model.state_dict()
    sources = {
        name: [variable_names.to_original_name(hf_name) for hf_name in group]
        for name, group in map_to_hf_names(state).items()
    }
    for head in _OPTIONAL_HEADS:
        head_weights = [name for name in sources if name.startswith(head)]
        head_variables = [original for name in head_weights for original in sources[name]]
        if not any(original in stored_names for original in head_variables):
            for name in head_weights:
                del sources[name]
    for name, group in sources.items():
        rows, *other_axes = state[name].shape
        shape = (rows // len(group), *other_axes)
        for original in group:
            is_transposed = variable_names.is_transposed(stored_names.get(original, original))
            expected = shape[::-1] if is_transposed else shape
            _check_shape(checkpoint, stored_names, original, expected)
    return sources


@torch.no_grad()
def _copy_tensor(weight: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Copy a stored tensor into a weight or into a part of a weight."""
    array = checkpoint.read(name)
    if array.dtype.kind != "f":
        raise ModelError(f"{checkpoint.path}: {name} has dtype {array.dtype}; expected floats")
    shape = tuple(weight.shape)
    is_transposed = variable_names.is_transposed(name)
    source = torch.from_numpy(array.reshape(shape[::-1] if is_transposed else shape))
    weight.copy_(source.t() if is_transposed else source)
