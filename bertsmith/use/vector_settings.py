"""Settings of the vectors of texts. Importing this module does not load torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import Settings

PoolingName = Literal[
    "mean", "max", "mean-max", "first", "last", "pooled", "none", "mean_sqrt_len_tokens",
    "weightedmean",
]  # fmt: skip
#: Side on which texts that are too long are truncated.
TruncationSide = Literal["right", "left"]


class VectorSettings(Settings):
    """How the vectors of texts are computed. None means the default of the model directory."""

    #: Layer numbers, as indices into transformers' ``hidden_states``: 0 is the embeddings, 1 the
    #: layer next to the input, and -1 the last layer.
    layers: Annotated[tuple[int, ...], Field(min_length=1)] = (-1,)
    combine: Literal["concat", "mean", "weighted"] = "concat"
    #: One weight per layer, if ``combine`` is "weighted".
    weights: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    pooling: PoolingName | None = None
    #: Whether vectors are scaled to length 1.
    normalize: bool | None = None
    #: Whether [CLS] and [SEP] are included in pooling, or in the vectors per token.
    include_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        """Raise ValueError unless "weighted" has one weight per layer, and others have none."""
        if self.combine == "weighted" and not self.weights:
            raise ValueError('combine is "weighted" without weights; give one weight per layer')
        if self.combine != "weighted" and self.weights:
            raise ValueError(
                f'weights have no effect if combine is "{self.combine}"; omit them, or set combine '
                'to "weighted"'
            )
        if self.weights and len(self.weights) != len(self.layers):
            raise ValueError(
                f"there are {len(self.weights)} weights for {len(self.layers)} layers; give one "
                "weight per layer"
            )
        return self


def build_vector_settings(
    layer: int | Sequence[int] | None = None, **settings: Any
) -> VectorSettings:
    """Build the settings from keyword arguments. Arguments that are None get their default.

    Args:
        layer: A layer number, or several.
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
