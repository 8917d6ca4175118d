"""Settings that all kinds of fine-tuning share; does not import torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import SettingsTable
from bertsmith.train.engine.settings import (
    DEFAULT_LOG_EVERY,
    DEFAULT_MICRO_BATCH_TOKENS,
    Kernel,
    LogEvery,
    MicroBatchTokens,
    Precision,
    Seed,
    Threads,
)


class FinetuneRunSettings(SettingsTable):
    """Start model, seed, device, evaluation and early stopping of a fine-tuning run."""

    table: ClassVar[str] = "run"

    #: Model directory that the run starts from.
    start_from: str = ""
    #: Random seed of new weights, data order and dropout.
    seed: Seed = 0
    #: `cpu`, `cuda`, `cuda:N`, or `auto`: CUDA if available, else the CPU.
    device: str = "auto"
    #: `fp32`, `bf16` (mixed precision), or `auto`: bf16 if the device computes it fast.
    precision: Precision = "auto"
    #: Attention implementation: `reference` (explicit softmax), `padded`
    #: (scaled_dot_product_attention), `varlen` (FlashAttention on CUDA), or `auto`.
    attention_kernel: Kernel = "auto"
    #: CPU threads; None: PyTorch's default, or fewer on a busy machine.
    threads: Threads = None
    #: Number of processes, if there are several (torchrun); set by the run.
    world_size: Annotated[int, Field(ge=2)] | None = None
    #: Maximum tokens of a micro-batch; gradients of larger batches are accumulated.
    micro_batch_tokens: MicroBatchTokens = DEFAULT_MICRO_BATCH_TOKENS
    #: Steps between two lines of the metrics log with training metrics.
    log_every: LogEvery = DEFAULT_LOG_EVERY
    #: When to evaluate on the validation files: after each epoch, or only after the last step.
    eval_strategy: Literal["epoch", "end"] = "epoch"
    #: Weights of the final model: those of the last step, or those of the best evaluation.
    model_selection: Literal["last", "best"] = "last"
    #: Stop early after this many evaluations without improvement, and use the best weights; None:
    #: no early stopping.
    patience: Annotated[int, Field(ge=1)] | None = None
    #: Number of first layers that are frozen together with the embeddings; None: nothing is frozen.
    num_frozen_layers: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_evaluates_every_epoch(self) -> Self:
        needs_every_epoch = self.model_selection == "best" or self.patience is not None
        if self.eval_strategy == "end" and needs_every_epoch:
            setting = 'model_selection = "best"' if self.model_selection == "best" else "patience"
            raise ValueError(
                f'{setting} needs an evaluation after each epoch, but eval_strategy is "end"; '
                "change one of them"
            )
        return self
