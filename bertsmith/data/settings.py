"""Settings of the training examples: lengths, sentence pairs and masks."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import SettingsTable


class DataSettings(SettingsTable):
    """How sentences become training examples.

    The defaults are those of the paper (section 3.1 and appendix A.2) and of the original code.

    Attributes:
        max_seqlen: Maximum number of tokens in a sequence, with [CLS] and [SEP].
        batch_size: Sequences per optimizer step.
        initial_batch_size: Sequences of the first step, from which the batch grows linearly to
            ``batch_size`` over the first schedule.batch_ramp_fraction of the run; None for a
            constant size.
        objective: "masked" is the paper's masked LM. "left-to-right" predicts each token from
            those before it, without masks (section 5.1), and logs its loss under the names of
            the masked-LM loss. It requires model.attention = "causal" and nsp = false.
        nsp: Whether an example is a pair of segments, for next-sentence prediction.
        pair_objective: What the next-sentence head predicts of a pair. "nsp" is the paper's
            next-sentence prediction: whether B follows A, or is from another document. "sop" is
            sentence-order prediction (Lan et al. 2019, arXiv:1909.11942): A and B are always
            consecutive, and swapped with probability 1/2; its loss and accuracy are logged under
            the names of next-sentence prediction.
        short_seq_prob: Share of examples with a random, shorter target length.
        masking_rate: Share of tokens to predict.
        final_masking_rate: Share of tokens to predict at the end of the run, to which the rate
            changes linearly (Ankner et al. 2023, arXiv:2305.15096); None for a constant rate. All
            evaluations of the run use the final rate.
        mask_replace_prob: Share of the predicted tokens that are replaced by [MASK].
        random_replace_prob: Share of the predicted tokens that are replaced by a random token.
        whole_word_masking: Whether all pieces of a word are masked together.
        max_predictions_per_seq: Maximum number of predicted tokens per sequence; None for no limit.
    """

    table: ClassVar[str] = "data"

    max_seqlen: int = Field(default=128, ge=8, le=65535)
    batch_size: int = Field(default=256, ge=1)
    initial_batch_size: int | None = Field(default=None, ge=1)
    objective: Literal["masked", "left-to-right"] = "masked"
    nsp: bool = True
    pair_objective: Literal["nsp", "sop"] = "nsp"
    short_seq_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    masking_rate: float = Field(default=0.15, gt=0.0, le=1.0)
    final_masking_rate: float | None = Field(default=None, gt=0.0, le=1.0)
    mask_replace_prob: float = Field(default=0.8, ge=0.0, le=1.0)
    random_replace_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    whole_word_masking: bool = False
    max_predictions_per_seq: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_initial_batch_size(self) -> Self:
        if self.initial_batch_size is not None and self.initial_batch_size > self.batch_size:
            raise ValueError(
                f"data.initial_batch_size is {self.initial_batch_size}, which is above "
                f"data.batch_size, {self.batch_size}; a batch can only grow"
            )
        return self

    @model_validator(mode="after")
    def _check_final_masking_rate(self) -> Self:
        if self.final_masking_rate is not None and self.objective != "masked":
            raise ValueError(
                f"data.final_masking_rate is {self.final_masking_rate:g}, but the objective "
                f"{self.objective!r} has no masks; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_replacement_shares(self) -> Self:
        total = self.mask_replace_prob + self.random_replace_prob
        # The tolerance is for rounding errors of the sum.
        if total > 1.0 + 1e-9:
            raise ValueError(
                f"mask_replace_prob + random_replace_prob is {total:g}, and must be at most 1 "
                "(the remaining predicted tokens stay unchanged)"
            )
        return self

    @model_validator(mode="after")
    def _check_left_to_right_without_nsp(self) -> Self:
        if self.objective == "left-to-right" and self.nsp:
            raise ValueError(
                "the left-to-right objective cannot be combined with next-sentence prediction: "
                "set data.nsp to false"
            )
        return self
