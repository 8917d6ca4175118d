"""From a model directory to one of sentence-transformers.

It never embeds a text.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
    to_hf_state_dict,
)
from bertsmith.bundle.encoder import load_pooler
from bertsmith.bundle.weights import open_weights
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, check_new_directory, write_json
from bertsmith.interop.sentence_transformers.pooling import (
    MODEL_CONFIG,
    MODULE_CONFIG,
    MODULES_FILE,
    POOLING_MODE_KEYS,
    TRANSFORMER_CONFIG,
    Dense,
    PoolingConfig,
    PoolingMode,
    read_pooling,
)

#: The names of the modules that every release of theirs knows.
_TYPE = "sentence_transformers.models."


def write_sentence_transformers(
    model: Path | str,
    out: Path | str,
    *,
    pooling: PoolingMode | None = None,
    normalize: bool | None = None,
) -> list[str]:
    """Write the encoder of a model directory or RUN so that SentenceTransformer reads it.

    ``out`` must not be there, or be empty. ``pooling`` and ``normalize``: as the directory says if
    it is one of theirs, else the mean, made a vector of length 1. Returns what a user should know.
    Raises ModelError for a model that transformers' BERT cannot be.
    """
    bundle, out = load_encoder(model), Path(out)
    check_new_directory(out)
    raw = to_hf_config(bundle.config) | {"architectures": ["BertModel"]}
    if raw["model_type"] != "bert":
        raise ModelError(
            f"{bundle.path}: sentence-transformers has no BERT that is causal, with ELU or another "
            "norm than post"
        )
    if bundle.tokenizer.segmenter is not None:
        raise ModelError(
            f"{bundle.path}: sentence-transformers cannot segment text before WordPiece, as this "
            "model's tokenizer does"
        )
    told = _asked(bundle.path, pooling, normalize)
    pooler = _pooler(bundle)
    with atomic_directory(out) as new:
        state = {f"bert.{name}": value for name, value in bundle.model.state_dict().items()}
        tensors = {
            name.removeprefix("bert."): value
            for name, value in to_hf_state_dict(state | pooler).items()
        }
        save_tensors(tensors, new / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / CONFIG_FILE, raw | {"pad_token_id": bundle.tokenizer.pad_id})
        write_json(new / INFO_FILE, {**bundle.info, "positions": bundle.config.positions})
        bundle.tokenizer.save(new, bundle.config.max_positions)
        _write_modules(new, told, bundle, pooled=bool(pooler))
    if pooler:
        return []
    return ["the model has no pooler: transformers' AutoModel draws one anew, and says so"]


def _asked(directory: Path, pooling: PoolingMode | None, normalize: bool | None) -> PoolingConfig:
    """Return what the directory says, with what is asked for in its place."""
    if pooling is not None and pooling not in get_args(PoolingMode):
        raise ModelError(f"pooling {pooling!r}: expected one of {', '.join(get_args(PoolingMode))}")
    told = read_pooling(directory) or PoolingConfig(post_modules=("normalize",))
    if pooling is not None and told.modes != (pooling,):
        if any(isinstance(own, Dense) for own in told.post_modules):
            raise ModelError(
                f"{directory}: its Dense was learnt on the pooling {', '.join(told.modes)}; leave "
                "pooling as it is"
            )
        told = replace(told, modes=(pooling,))
    if normalize is not None:
        kept = tuple(own for own in told.post_modules if own != "normalize")
        told = replace(told, post_modules=(*kept, "normalize") if normalize else kept)
    return told


def _pooler(bundle: EncoderBundle) -> dict[str, Tensor]:
    """Return the pooler's weights, which their BERT has though nothing reads them; {} if none."""
    if not open_weights(bundle.path, bundle.config).has_pooler:
        return {}
    own = load_pooler(bundle.path, bundle.config).state_dict()
    return {f"pooler.{name}": value for name, value in own.items()}


def _write_modules(
    folder: Path, told: PoolingConfig, bundle: EncoderBundle, *, pooled: bool
) -> None:
    longest = min(told.max_seq_length or bundle.config.max_positions, bundle.config.max_positions)
    own: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": told.lowercase}
    if not pooled:
        own["model_args"] = {"add_pooling_layer": False}
    write_json(folder / TRANSFORMER_CONFIG, own)
    prompts = {"prompts": {"default": told.prompt}, "default_prompt_name": "default"}
    write_json(folder / MODEL_CONFIG, prompts if told.prompt else {"prompts": {}})
    width = bundle.config.width
    modes = {key: mode in told.modes for key, mode in POOLING_MODE_KEYS.items()}
    raw: Any = {"word_embedding_dimension": width, **modes, "include_prompt": True}
    if not _in_usual_order(told.modes):
        raw["pooling_mode"] = list(told.modes)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(folder / "1_Pooling" / MODULE_CONFIG, raw)
    for after in told.post_modules:
        kind = "Dense" if isinstance(after, Dense) else "Normalize"
        modules.append((kind, f"{len(modules)}_{kind}"))
        if isinstance(after, Dense):
            _write_dense(folder / modules[-1][1], after)
    write_json(
        folder / MODULES_FILE,
        [
            {"idx": number, "name": str(number), "path": place, "type": _TYPE + kind}
            for number, (kind, place) in enumerate(modules)
        ],
    )


def _in_usual_order(modes: Sequence[PoolingMode]) -> bool:
    """Tell whether the older keys say it all; newer releases alone know another order."""
    return [mode for mode in POOLING_MODE_KEYS.values() if mode in modes] == list(modes)


def _write_dense(folder: Path, dense: Dense) -> None:
    out, width = dense.weight.shape
    activation = (
        "linear.Identity" if dense.activation == "Identity" else (f"activation.{dense.activation}")
    )
    write_json(
        folder / MODULE_CONFIG,
        {
            "in_features": width,
            "out_features": out,
            "bias": dense.bias is not None,
            "activation_function": f"torch.nn.modules.{activation}",
        },
    )
    tensors = {"linear.weight": dense.weight}
    if dense.bias is not None:
        tensors["linear.bias"] = dense.bias
    save_tensors(tensors, folder / WEIGHTS_FILE)
