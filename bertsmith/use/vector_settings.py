"""Settings of text vectors. Importing this module does not load torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import Settings

PoolingName = Literal[
    "mean", "max", "mean-max", "first", "last", "pooled", "none", "mean_sqrt_len_tokens",
    "weightedmean",
]  # fmt: skip


class VectorSettings(Settings):
    """How vectors are computed. None means the default of the model directory."""

    #: Layer numbers: 0 is the embeddings, 1 the layer next to the input, -1 the last layer. They
    #: are indices into Hugging Face's hidden_states; negative ones are as in bert-as-service.
    layers: Annotated[tuple[int, ...], Field(min_length=1)] = (-1,)
    combine: Literal["concat", "mean", "weighted"] = "concat"
    #: One weight per layer, for "weighted".
    weights: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    pooling: PoolingName | None = None
    #: Whether vectors are scaled to length 1.
    normalize: bool | None = None
    #: Whether [CLS] and [SEP] are included in pooling, or in the vectors per token.
    include_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if (self.combine == "weighted") != bool(self.weights):
            raise ValueError('weights belong to combine "weighted", which requires weights')
        if self.weights and len(self.weights) != len(self.layers):
            raise ValueError(f"{len(self.weights)} weights for {len(self.layers)} layers")
        return self


def build_vector_settings(
    layer: int | Sequence[int] | None = None, **settings: Any
) -> VectorSettings:
    """Build settings from keyword arguments; None selects the default.

    Args:
        layer: One layer number or several.
        settings: Other fields of ``VectorSettings``.

    Raises:
        SettingsError: A value is invalid.
    """
    values = {name: value for name, value in settings.items() if value is not None}
    if layer is not None:
        values["layers"] = (layer,) if isinstance(layer, int) else tuple(layer)
    if "weights" in values:
        values["weights"] = tuple(map(float, values["weights"]))
    return VectorSettings.parse(values, "the settings of vectors")
