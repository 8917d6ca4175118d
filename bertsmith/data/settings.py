"""The settings of the examples that a model learns from: pairs, lengths and masks.

It never knows how an example is drawn, nor the training that uses it.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import SettingsTable


class DataSettings(SettingsTable):
    """How sentences become training examples; the defaults are those of the paper.

    ``length`` counts tokens with [CLS] and [SEP]; ``batch`` counts sequences a step. The shares
    are those of the paper's section 3.1 and appendix A.2, and of the original code.
    """

    table: ClassVar[str] = "data"

    length: int = Field(default=128, ge=8, le=65535)
    batch: int = Field(default=256, ge=1)
    #: masked: the paper's masked LM. left-to-right: every word from those before it, without
    #: masks, its loss under the same names (section 5.1); it takes model.attention = "causal" and
    #: nsp = false.
    objective: Literal["masked", "left-to-right"] = "masked"
    nsp: bool = True
    short_share: float = Field(default=0.1, ge=0.0, le=1.0)
    masking_rate: float = Field(default=0.15, gt=0.0, le=1.0)
    mask_token_share: float = Field(default=0.8, ge=0.0, le=1.0)
    random_share: float = Field(default=0.1, ge=0.0, le=1.0)
    whole_words: bool = False
    max_predictions: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        total = self.mask_token_share + self.random_share
        if total > 1.0 + 1e-9:
            raise ValueError(
                f"mask_token_share + random_share is {total:g}, and must be at most 1 "
                "(the rest of the chosen tokens is kept as it is)"
            )
        return self

    @model_validator(mode="after")
    def _left_to_right_stands_alone(self) -> Self:
        if self.objective == "left-to-right" and self.nsp:
            raise ValueError(
                "the left-to-right objective goes without next sentence: set data.nsp to false"
            )
        return self
