"""Compute vectors from hidden states: combine layers, pool over tokens, and postprocess.

In shapes, W is the width of the vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.errors import SettingsError
from bertsmith.interop.openvino import OpenVINOEncoder
from bertsmith.interop.sentence_transformers import Dense, PoolingConfig
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig, PoolingMode
from bertsmith.model.packed import PackedBatch
from bertsmith.model.pooling import pool_tokens
from bertsmith.model.sentence_embedding import DENSE_ACTIVATIONS
from bertsmith.model.task_models import get_pooled_token_indices
from bertsmith.plurals import count_noun
from bertsmith.use.vector_settings import PoolingName, VectorSettings

#: Name of a pooling in ``VectorSettings`` -> pooling modes of sentence-transformers.
_MODES: Final[dict[PoolingName, tuple[PoolingMode, ...]]] = {
    "mean": ("mean",), "max": ("max",), "mean-max": ("mean", "max"),
    "first": ("cls",), "last": ("lasttoken",), "pooled": (), "none": (),
    "mean_sqrt_len_tokens": ("mean_sqrt_len_tokens",), "weightedmean": ("weightedmean",),
}  # fmt: skip
#: Pooling modes that read a single token per text: [CLS] or [SEP], unless special tokens are
#: excluded. With these, the last layer is computed only for this token.
_SINGLE_TOKEN_MODES: Final = ({"cls"}, {"lasttoken"})


@dataclass(frozen=True)
class Truncate:
    """A step that keeps only the first dimensions of a vector.

    Attributes:
        num_dims: Number of dimensions; a vector with fewer stays as it is.
    """

    num_dims: int


@dataclass(frozen=True)
class VectorSpec:
    """``VectorSettings`` resolved for one model.

    Attributes:
        layer_indices: Indices of hidden states: 0 is the embeddings, L the last layer.
        layer_weights: Weights with which the layers are summed; None if they are concatenated.
        pooling: "modes" to apply ``modes``, "pooled" for the output of the pooler, or "none" for
            one vector per token.
        modes: Pooling modes, whose results are concatenated.
        postprocessing: Dense modules, normalization and truncation, in the order of application
            after pooling.
        include_special_tokens: Whether pooling includes [CLS] and [SEP].
        width: Width of the final vectors.
    """

    layer_indices: tuple[int, ...]
    layer_weights: tuple[float, ...] | None
    pooling: Literal["modes", "pooled", "none"]
    modes: tuple[PoolingMode, ...]
    postprocessing: tuple[Dense | Truncate | Literal["normalize"], ...]
    include_special_tokens: bool
    width: int

    @property
    def num_layers(self) -> int:
        """Number of encoder layers to compute."""
        return max(self.layer_indices)

    @property
    def needs_single_token(self) -> bool:
        """Whether pooling reads a single token per text, the first or the last one."""
        return self.pooling == "pooled" or (
            self.include_special_tokens and set(self.modes) in _SINGLE_TOKEN_MODES
        )


def resolve_settings(
    settings: VectorSettings, pooling_config: PoolingConfig | None, config: ModelConfig
) -> VectorSpec:
    """Resolve settings for a model.

    Args:
        settings: The user's settings.
        pooling_config: Pooling and postprocessing of a sentence-transformers directory, which are
            the defaults; None for other models.
        config: The model's config.

    Raises:
        SettingsError: A layer does not exist or is listed twice.
        ModelError: The shape of a Dense module does not fit.
    """
    layer_indices = tuple(_resolve_layer_index(layer, config.layers) for layer in settings.layers)
    if len(set(layer_indices)) < len(layer_indices):
        # Without this check, a short request to the server could exhaust memory by listing a layer
        # a million times.
        raise SettingsError("layers: a layer is listed twice; list each layer once")
    layer_weights = settings.weights or None
    if settings.combine == "mean":
        layer_weights = (1 / len(layer_indices),) * len(layer_indices)
    default = PoolingConfig()
    if pooling_config is not None and settings.pooling is None:
        default = pooling_config
    modes = default.modes if settings.pooling is None else _MODES[settings.pooling]
    post_modules = default.post_modules
    if settings.normalize is not None:
        post_modules = default.modules_before_normalize
    postprocessing: list[Dense | Truncate | Literal["normalize"]] = list(post_modules)
    # As in sentence-transformers, vectors are truncated after the modules of the model, and
    # normalized afterwards if the user requests it.
    if default.truncate_dim is not None:
        postprocessing.append(Truncate(default.truncate_dim))
    if settings.normalize:
        postprocessing.append("normalize")
    pooling: Any = settings.pooling if settings.pooling in ("pooled", "none") else "modes"
    if pooling == "pooled" and layer_indices != (config.layers,):
        raise SettingsError(
            'layers: the pooler was trained on the last layer; omit layers with pooling "pooled", '
            'or use pooling "first"'
        )
    if pooling == "pooled" and not settings.include_special_tokens:
        raise SettingsError(
            "include_special_tokens: the pooler reads [CLS]; include special tokens with pooling "
            '"pooled", or use another pooling'
        )
    hidden_width = config.width * (len(layer_indices) if layer_weights is None else 1)
    pooling_steps = PoolingConfig(modes=modes or ("mean",), post_modules=post_modules)
    width = pooling_steps.output_width(hidden_width)
    width = min(width, default.truncate_dim or width)
    return VectorSpec(
        layer_indices,
        layer_weights,
        pooling,
        modes,
        tuple(postprocessing),
        settings.include_special_tokens,
        width,
    )


def _resolve_layer_index(layer: int, num_layers: int) -> int:
    """Return the index of the hidden state for a layer number, which may be negative."""
    if not -num_layers - 1 <= layer <= num_layers:
        raise SettingsError(
            f"layers: there is no layer {layer} in a model of "
            f"{count_noun(num_layers, 'layer')}; expected "
            f"-{num_layers} (next to the input) to -1 (the last), or 0 for the embeddings"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def compute_vectors(
    encoder: BertModel | OpenVINOEncoder,
    batch: PackedBatch,
    spec: VectorSpec,
    pooler: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor] | Tensor:
    """Compute the vectors of a batch. Layers after the last requested layer are not computed.

    Args:
        encoder: The encoder; an OpenVINO graph computes the last layer only.
        batch: The packed texts.
        spec: How to compute the vectors.
        pooler: Maps float32 [B, D] to float32 [B, D]; required if the pooling is "pooled".

    Returns:
        float32 [B, W], or a list of B tensors float32 [S, W] if the pooling is "none".
    """
    token_indices = None
    if spec.needs_single_token and len(spec.layer_indices) == 1:
        if spec.pooling == "pooled":
            assert isinstance(encoder, BertModel)
            token_indices = get_pooled_token_indices(encoder.config, batch)
        elif "cls" in spec.modes:
            token_indices = batch.first_token_indices
        else:
            token_indices = batch.last_token_indices
    states = _compute_combined_layers(encoder, batch, spec, token_indices)
    if spec.pooling == "pooled":
        assert pooler is not None
        states = pooler(states)
    if token_indices is not None:
        return _postprocess(states, spec)
    if spec.pooling == "none":
        lengths = batch.cu_seqlens.diff().tolist()
        token_states: Sequence[Tensor] = states.split(lengths)  # type: ignore[no-untyped-call]
        if not spec.include_special_tokens:
            # An empty text keeps [CLS] and [SEP], as in ``pool_tokens``.
            token_states = tuple(x[1:-1] if len(x) > 2 else x for x in token_states)
        return [_postprocess(x, spec) for x in token_states]
    vectors = pool_tokens(
        states, batch, spec.modes, include_special_tokens=spec.include_special_tokens
    )
    return _postprocess(vectors, spec)


def _compute_combined_layers(
    encoder: BertModel | OpenVINOEncoder,
    batch: PackedBatch,
    spec: VectorSpec,
    token_indices: Tensor | None,
) -> Tensor:
    """Return the concatenation or weighted sum of the requested layers.

    Returns:
        float32 [T, W] for all tokens, or [B, W] for the tokens at ``token_indices`` [B].
    """
    if isinstance(encoder, OpenVINOEncoder):
        last_states = encoder(batch)
        return last_states if token_indices is None else last_states[token_indices]
    states_by_index: dict[int, Tensor] = {}
    states = encoder.iter_hidden_states(batch, None, token_indices, spec.num_layers)
    for index, state in enumerate(states):
        if index in spec.layer_indices:
            if index == 0 and token_indices is not None:
                # The embeddings are always computed for all tokens.
                state = state.index_select(0, token_indices)  # noqa: PLW2901
            states_by_index[index] = state.float()
        if index == spec.num_layers:
            break
    layers = [states_by_index[index] for index in spec.layer_indices]
    if spec.layer_weights is None:
        return torch.cat(layers, -1) if len(layers) > 1 else layers[0]
    return torch.stack(
        [weight * layer for weight, layer in zip(spec.layer_weights, layers, strict=True)]
    ).sum(0)


def _postprocess(x: Tensor, spec: VectorSpec) -> Tensor:
    """Apply the steps after pooling along the last axis, which may change its width."""
    for step in spec.postprocessing:
        if step == "normalize":
            x = F.normalize(x, dim=-1)
        elif isinstance(step, Truncate):
            x = x[..., : step.num_dims]
        else:
            bias = None if step.bias is None else step.bias.to(x)
            x = DENSE_ACTIVATIONS[step.activation](F.linear(x, step.weight.to(x), bias))
    return x
