"""How hidden states become vectors: which layers, joined how, pooled how, and what follows.

It never knows a text, nor where the vectors go.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.errors import SettingsError
from bertsmith.interop.sentence_transformers import Dense, PoolingConfig, PoolingMode
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import PackedBatch
from bertsmith.use.vector_settings import PoolingName, VectorSettings

#: The words of this package -> sentence-transformers' own.
_MODES: Final[dict[PoolingName, tuple[PoolingMode, ...]]] = {
    "mean": ("mean",), "max": ("max",), "mean-max": ("mean", "max"),
    "first": ("cls",), "last": ("lasttoken",), "pooled": (), "none": (),
    "mean_sqrt_len_tokens": ("mean_sqrt_len_tokens",), "weightedmean": ("weightedmean",),
}  # fmt: skip
#: Pooling that looks at one token of a text only, so that the last layer is computed for no other.
_ONE_TOKEN: Final = ({"cls"}, {"lasttoken"})


@dataclass(frozen=True)
class VectorSpec:
    """The settings, worked out for one model.

    layer_indices: which hidden states, 0 the embeddings, L the last layer. shares: of each in a sum, None
    where they are joined. modes: those of pooling; none: the pooler's tanh, or a vector a token.
    """

    layer_indices: tuple[int, ...]
    layer_weights: tuple[float, ...] | None
    pooling: Literal["modes", "pooled", "none"]
    modes: tuple[PoolingMode, ...]
    postprocessing: tuple[Dense | Literal["normalize"], ...]
    include_special_tokens: bool
    width: int

    @property
    def num_layers(self) -> int:
        """How many layers are computed."""
        return max(self.layer_indices)

    @property
    def needs_one_token(self) -> bool:
        """Whether only one token of each text is looked at."""
        return self.pooling == "pooled" or set(self.modes) in _ONE_TOKEN


def resolve_settings(
    settings: VectorSettings, told: PoolingConfig | None, config: ModelConfig
) -> VectorSpec:
    """Work the settings out for a model; ``told``: what its directory says of pooling, if it does.

    Raises SettingsError for layers that the model has not or that are named twice, and ModelError
    where a Dense that follows does not fit.
    """
    states = tuple(_state(layer, config.layers) for layer in settings.layers)
    if len(set(states)) < len(states):
        # A few bytes could name one a million times, and each token has all before pooling.
        raise SettingsError("layers: a layer stands there twice; name each of them once")
    shares = settings.weights or None
    if settings.combine == "mean":
        shares = (1 / len(states),) * len(states)
    plain = PoolingConfig()
    kept = told if told is not None and settings.pooling is None else plain
    modes = kept.modes if settings.pooling is None else _MODES[settings.pooling]
    after = kept.post_modules
    if settings.normalize is not None:
        after = tuple(own for own in after if own != "normalize")
        after = (*after, "normalize") if settings.normalize else after
    pooling: Any = settings.pooling if settings.pooling in ("pooled", "none") else "modes"
    if pooling == "pooled" and states != (config.layers,):
        raise SettingsError(
            "layers: the pooler was trained on the last layer; leave them out with pooling "
            '"pooled", or take pooling "first"'
        )
    width = config.width * (len(states) if shares is None else 1)
    whole = PoolingConfig(modes=modes or ("mean",), post_modules=after).output_width(width)
    return VectorSpec(states, shares, pooling, modes, after, settings.special, whole)


def _state(layer: int, layers: int) -> int:
    if not -layers - 1 <= layer <= layers:
        raise SettingsError(
            f"layers: there is no layer {layer} in a model of {layers}; expected -{layers} (next "
            "to the input) to -1 (the last), or 0 for the embeddings"
        )
    return layer if layer >= 0 else layers + 1 + layer


def compute_vectors(
    encoder: BertModel,
    packed: PackedBatch,
    recipe: VectorSpec,
    pooler: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor] | Tensor:
    """Return float32 [B, W], a vector a text; without pooling one float32 [S_b, W] for each.

    No layer above the highest that is asked for is computed. ``pooler``: for "pooled".
    """
    places = None
    if recipe.needs_one_token and len(recipe.layer_indices) == 1:
        first = recipe.pooling == "pooled" or "cls" in recipe.modes
        places = packed.first_token_indices if first else packed.cu_seqlens[1:].long() - 1
    mixed = _mixed(encoder, packed, recipe, places)
    if recipe.pooling == "pooled":
        assert pooler is not None
        mixed = pooler(mixed)
    if places is not None:
        return _finished(mixed, recipe)
    parts: Sequence[Tensor] = mixed.split(packed.cu_seqlens.diff().tolist())  # type: ignore[no-untyped-call]
    if not recipe.include_special_tokens:
        # A text without a word keeps its [CLS] and [SEP]: a mean of nothing is none.
        parts = tuple(own[1:-1] if len(own) > 2 else own for own in parts)
    if recipe.pooling == "none":
        return [_finished(own, recipe) for own in parts]
    joined = [torch.cat([_POOLED[mode](own) for mode in recipe.modes]) for own in parts]
    return _finished(torch.stack(joined), recipe)


def _mixed(
    encoder: BertModel, packed: PackedBatch, recipe: VectorSpec, places: Tensor | None
) -> Tensor:
    """Return what is pooled, float32 [T, W], or [M, W] at ``places``."""
    found: dict[int, Tensor] = {}
    states = encoder.hidden_states(packed, None, places, recipe.num_layers)
    for number, state in enumerate(states):
        if number in recipe.layer_indices:
            if number == 0 and places is not None:
                # The embeddings are computed for all tokens.
                state = state.index_select(0, places)  # noqa: PLW2901
            found[number] = state.float()
        if number == recipe.num_layers:
            break
    chosen = [found[number] for number in recipe.layer_indices]
    if recipe.layer_weights is None:
        return torch.cat(chosen, -1) if len(chosen) > 1 else chosen[0]
    return torch.stack(
        [share * own for share, own in zip(recipe.layer_weights, chosen, strict=True)]
    ).sum(0)


def _finished(x: Tensor, recipe: VectorSpec) -> Tensor:
    """Apply what follows pooling: [..., D'] -> [..., W]."""
    for after in recipe.postprocessing:
        if after == "normalize":
            x = F.normalize(x, dim=-1)
        else:
            bias = None if after.bias is None else after.bias.to(x)
            x = _ACTIVATIONS[after.activation](F.linear(x, after.weight.to(x), bias))
    return x


def _weighted(own: Tensor) -> Tensor:
    """[S, D] -> [D]: the mean in which the n-th token counts n times."""
    weights = torch.arange(1, len(own) + 1, device=own.device, dtype=own.dtype)
    return (weights / weights.sum()) @ own


#: What each mode makes of the hidden states of one text: [S, D] -> [D].
_POOLED: Final[dict[PoolingMode, Callable[[Tensor], Tensor]]] = {
    "cls": lambda own: own[0],
    "max": lambda own: own.amax(0),
    "mean": lambda own: own.mean(0),
    "mean_sqrt_len_tokens": lambda own: own.sum(0) / len(own) ** 0.5,
    "weightedmean": _weighted,
    "lasttoken": lambda own: own[-1],
}
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}
