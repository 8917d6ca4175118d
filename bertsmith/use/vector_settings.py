"""The settings of a text's vector; importing them loads no torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import Settings

PoolingName = Literal[
    "mean", "max", "mean-max", "first", "last", "pooled", "none", "mean_sqrt_len_tokens",
    "weightedmean",
]  # fmt: skip


class VectorSettings(Settings):
    """What a vector is made of; what nobody says is as the model's directory has it, or usual."""

    #: Layers by number: 1 is the one next to the input, -1 the last, 0 the embeddings; as the
    #: places in Hugging Face's hidden_states, and from the end as in bert-as-service.
    layers: Annotated[tuple[int, ...], Field(min_length=1)] = (-1,)
    combine: Literal["concat", "mean", "weighted"] = "concat"
    #: Of each layer, for "weighted".
    weights: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    pooling: PoolingName | None = None
    #: Whether vectors are made to have length 1.
    normalize: bool | None = None
    #: Whether [CLS] and [SEP] are pooled, or told, with the text's own tokens.
    special: bool = True

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if (self.combine == "weighted") != bool(self.weights):
            raise ValueError('weights belong to combine "weighted", and it to them')
        if self.weights and len(self.weights) != len(self.layers):
            raise ValueError(f"{len(self.weights)} weights for {len(self.layers)} layers")
        return self


def build_vector_settings(layer: int | Sequence[int] | None = None, **said: Any) -> VectorSettings:
    """Return settings from what is said; one layer, or several; None says nothing.

    Raises SettingsError.
    """
    values = {name: value for name, value in said.items() if value is not None}
    if layer is not None:
        values["layers"] = (layer,) if isinstance(layer, int) else tuple(layer)
    if "weights" in values:
        values["weights"] = tuple(map(float, values["weights"]))
    return VectorSettings.parse(values, "the settings of vectors")
