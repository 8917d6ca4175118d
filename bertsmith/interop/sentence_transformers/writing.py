"""Export of an encoder as a sentence-transformers directory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from torch import Tensor

from bertsmith.bundle import (
    CONFIG_FILE,
    INFO_FILE,
    WEIGHTS_FILE,
    EncoderBundle,
    load_encoder,
    save_tensors,
    to_hf_config,
)
from bertsmith.bundle.directory import MODULES_FILE, SENTENCE_TRANSFORMERS_CONFIG
from bertsmith.bundle.encoder import NO_POOLER_NOTE, load_pooler_weights
from bertsmith.bundle.model_card import EMBEDDING, MODEL_CARD_FILE, build_model_card
from bertsmith.bundle.weight_names import to_hf_encoder_state_dict
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, check_new_directory, write_atomic, write_json
from bertsmith.interop.sentence_transformers.pooling import (
    MODULE_CONFIG,
    POOLING_MODE_KEYS,
    TRANSFORMER_CONFIG,
    Dense,
    PoolingConfig,
    read_pooling,
)
from bertsmith.interop.sentence_transformers.splade import read_splade
from bertsmith.model.config import ModelConfig, PoolingMode

#: Prefix of the module types in modules.json; all releases of sentence-transformers accept it.
_TYPE_PREFIX = "sentence_transformers.models."


def write_sentence_transformers(
    model: Path | str,
    out: Path | str,
    *,
    pooling: PoolingMode | None = None,
    normalize: bool | None = None,
) -> list[str]:
    """Write a model's encoder as a sentence-transformers directory.

    Args:
        model: A model directory or run directory.
        out: A directory that is empty or does not exist.
        pooling: The pooling mode. If None, the mode in ``model`` if it is a sentence-transformers
            directory, otherwise "mean".
        normalize: Whether vectors are scaled to length 1. If None, the value in ``model`` if it is
            a sentence-transformers directory, otherwise True.

    Returns:
        Notes for the user.

    Raises:
        ModelError: transformers' BERT cannot represent the model, or ``out`` is not empty.
    """
    out = Path(out)
    bundle, config = load_for_export(model, out, pooling, normalize)
    # transformers' BertModel has a pooler, even if sentence-transformers does not use it.
    pooler_weights = load_pooler_weights(bundle.path, bundle.config)
    model_card = build_model_card(bundle.config, bundle.tokenizer, bundle.info, EMBEDDING)
    save_sentence_transformers(out, bundle, config, bundle.info, model_card, pooler_weights)
    if pooler_weights:
        return []
    return [NO_POOLER_NOTE]


def load_for_export(
    model: Path | str, out: Path, pooling: PoolingMode | None, normalize: bool | None
) -> tuple[EncoderBundle, PoolingConfig]:
    """Load an encoder that a sentence-transformers directory can contain, and its pooling.

    The arguments are those of ``write_sentence_transformers``.

    Raises:
        ModelError: transformers' BERT cannot represent the model, or ``out`` is not empty.
    """
    bundle = load_encoder(model)
    check_new_directory(out)
    check_is_expressible(bundle)
    check_is_dense(bundle.path)
    return bundle, resolve_pooling(bundle.path, pooling, normalize)


def check_is_expressible(bundle: EncoderBundle) -> None:
    """Raise ModelError if sentence-transformers cannot compute a model's vectors."""
    if to_hf_config(bundle.config)["model_type"] != "bert":
        raise ModelError(
            f"{bundle.path}: transformers' BERT cannot represent this model; use a model that "
            "is bidirectional and post-norm and does not use ELU"
        )
    if bundle.tokenizer.segmenter is not None:
        raise ModelError(
            f"{bundle.path}: this model's tokenizer segments text before WordPiece, which "
            "sentence-transformers cannot do; use a model without a segmenter"
        )


def check_is_dense(directory: Path) -> None:
    """Raise ModelError for a sparse model, whose vectors have one weight per vocabulary entry."""
    if read_splade(directory) is not None:
        raise ModelError(
            f"{directory}: a sparse model (SPLADE), which cannot be exported as an embedding model "
            "with dense vectors; serve it with `bertsmith serve`, or export another model"
        )


def save_sentence_transformers(
    directory: Path,
    bundle: EncoderBundle,
    config: PoolingConfig,
    info: Mapping[str, Any],
    model_card: str,
    pooler_weights: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write a sentence-transformers directory atomically, replacing an existing one.

    Args:
        directory: The directory to write.
        bundle: The encoder and its tokenizer; see ``check_is_expressible``.
        config: Pooling and the modules after it.
        info: Content of bertsmith.json, such as provenance.
        model_card: Content of README.md.
        pooler_weights: Weights of BERT's pooler by name; empty if there is none.
    """
    with atomic_directory(directory) as folder:
        tensors = to_hf_encoder_state_dict(bundle.model.state_dict(), pooler_weights)
        save_tensors(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_metadata(folder, bundle, config, info, has_pooler=bool(pooler_weights))
        write_atomic(folder / MODEL_CARD_FILE, model_card)


def write_metadata(
    folder: Path,
    bundle: EncoderBundle,
    config: PoolingConfig,
    info: Mapping[str, Any],
    *,
    has_pooler: bool,
) -> None:
    """Write the files of a sentence-transformers directory except the encoder's weights.

    Args:
        folder: The folder to write to.
        bundle: The encoder and its tokenizer; see ``check_is_expressible``.
        config: Pooling and the modules after it.
        info: Content of bertsmith.json, such as provenance.
        has_pooler: Whether the weights contain BERT's pooler.
    """
    hf_config = to_hf_config(bundle.config) | {"architectures": ["BertModel"]}
    write_json(folder / CONFIG_FILE, hf_config | {"pad_token_id": bundle.tokenizer.pad_id})
    write_json(folder / INFO_FILE, {**info, "positions": bundle.config.positions})
    bundle.tokenizer.save(folder, get_max_seqlen(config, bundle.config))
    _write_modules(folder, config, bundle, has_pooler=has_pooler)


def resolve_pooling(
    directory: Path, pooling: PoolingMode | None, normalize: bool | None
) -> PoolingConfig:
    """Return the pooling config of a model directory with the requested changes.

    Args:
        directory: The model directory.
        pooling: The pooling mode; None for that of the directory, or else "mean".
        normalize: Whether vectors are scaled to length 1; None for what the directory specifies, or
            else True.

    Raises:
        ModelError: The pooling mode is unknown or cannot be changed.
    """
    if pooling is not None and pooling not in get_args(PoolingMode):
        supported = ", ".join(get_args(PoolingMode))
        raise ModelError(f"pooling {pooling!r} is not supported; use one of {supported}")
    config = read_pooling(directory) or PoolingConfig(post_modules=("normalize",))
    if pooling is not None and config.modes != (pooling,):
        if any(isinstance(module, Dense) for module in config.post_modules):
            raise ModelError(
                f"{directory}: the model's Dense module was trained with "
                f"{', '.join(config.modes)} pooling, which cannot be changed to {pooling}; do not "
                "specify a pooling mode"
            )
        config = replace(config, modes=(pooling,))
    if normalize is not None:
        modules = config.modules_before_normalize
        config = replace(config, post_modules=(*modules, "normalize") if normalize else modules)
    return config


def get_max_seqlen(pooling: PoolingConfig, config: ModelConfig) -> int:
    """Return the number of tokens to which an embedding model truncates texts."""
    return min(pooling.max_seq_length or config.max_positions, config.max_positions)


def _write_modules(
    folder: Path, config: PoolingConfig, bundle: EncoderBundle, *, has_pooler: bool
) -> None:
    """Write modules.json and the config files and weights of all modules."""
    transformer: dict[str, Any] = {
        "max_seq_length": get_max_seqlen(config, bundle.config),
        "do_lower_case": config.lowercase,
    }
    if not has_pooler:
        transformer["model_args"] = {"add_pooling_layer": False}
    write_json(folder / TRANSFORMER_CONFIG, transformer)
    model_config: dict[str, Any] = {
        "prompts": dict(config.prompts),
        "similarity_fn_name": config.similarity,
    }
    if config.default_prompt_name is not None:
        model_config["default_prompt_name"] = config.default_prompt_name
    if config.matryoshka_dims:
        model_config["matryoshka_dims"] = list(config.matryoshka_dims)
    if config.truncate_dim is not None:
        model_config["truncate_dim"] = config.truncate_dim
    write_json(folder / SENTENCE_TRANSFORMERS_CONFIG, model_config)
    mode_keys = {key: mode in config.modes for key, mode in POOLING_MODE_KEYS.items()}
    width = bundle.config.width
    pooling: Any = {"word_embedding_dimension": width, **mode_keys, "include_prompt": True}
    if not _has_legacy_order(config.modes):
        pooling["pooling_mode"] = list(config.modes)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(folder / "1_Pooling" / MODULE_CONFIG, pooling)
    for module in config.post_modules:
        module_type = "Dense" if isinstance(module, Dense) else "Normalize"
        modules.append((module_type, f"{len(modules)}_{module_type}"))
        if isinstance(module, Dense):
            _write_dense(folder / modules[-1][1], module)
    write_modules_file(folder, modules)


def write_modules_file(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Write modules.json of a sentence-transformers directory.

    Args:
        folder: The directory.
        modules: The class and the subfolder of each module.
    """
    content = [
        {"idx": index, "name": str(index), "path": path, "type": _TYPE_PREFIX + module_type}
        for index, (module_type, path) in enumerate(modules)
    ]
    write_json(folder / MODULES_FILE, content)


def _has_legacy_order(modes: Sequence[PoolingMode]) -> bool:
    """Return whether the modes are in the order of older releases, which have boolean keys."""
    return [mode for mode in POOLING_MODE_KEYS.values() if mode in modes] == list(modes)


def _write_dense(folder: Path, dense: Dense) -> None:
    """Write the config and the weights of a Dense module."""
    out_features, in_features = dense.weight.shape
    is_identity = dense.activation == "Identity"
    activation = "linear.Identity" if is_identity else f"activation.{dense.activation}"
    write_json(
        folder / MODULE_CONFIG,
        {
            "in_features": in_features,
            "out_features": out_features,
            "bias": dense.bias is not None,
            "activation_function": f"torch.nn.modules.{activation}",
        },
    )
    tensors = {"linear.weight": dense.weight}
    if dense.bias is not None:
        tensors["linear.bias"] = dense.bias
    save_tensors(tensors, folder / WEIGHTS_FILE)
