"""Settings that several kinds of training share; does not import torch."""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import SettingsTable

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Precision = Literal["auto", "fp32", "bf16"]
OptimizerName = Literal["adamw", "muon"]
Kernel = Literal["auto", "reference", "padded", "varlen"]
#: CPU threads; None: PyTorch's default.
Threads = Annotated[int, Field(ge=1)] | None
#: Maximum tokens of a micro-batch. Larger batches are split into several micro-batches.
MicroBatchTokens = Annotated[int, Field(ge=64)]
DEFAULT_MICRO_BATCH_TOKENS: Final = 16384
#: Steps between two training lines of the metrics log.
LogEvery = Annotated[int, Field(ge=1)]
DEFAULT_LOG_EVERY: Final = 10


class OptimSettings(SettingsTable):
    """The optimizer. Defaults: the paper (appendix A.2) and the original code."""

    table: ClassVar[str] = "optim"

    #: "adamw", or "muon": Muon for the weight matrices of the encoder layers (Jordan et al. 2024;
    #: Liu et al. 2025, arXiv:2502.16982), and AdamW for all other parameters.
    optimizer: OptimizerName = "adamw"
    #: Peak learning rate.
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-4
    #: Decay rate of Adam's first moment.
    beta1: Fraction = 0.9
    #: Decay rate of Adam's second moment.
    beta2: Fraction = 0.999
    #: Epsilon of Adam.
    eps: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-6
    #: Decoupled weight decay; biases and LayerNorm have none.
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.01
    #: Maximum global gradient norm (clip_by_global_norm in the original code).
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    #: Learning rate of Muon, divided by that of AdamW. Muon's updates are scaled to the size of
    #: AdamW's, so the same learning rate suits both.
    muon_lr_factor: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    #: Decay rate of Muon's momentum.
    muon_momentum: Fraction = 0.95
    #: Newton-Schulz iterations that orthogonalize an update of Muon. Fewer are faster and less
    #: exact.
    muon_iterations: Annotated[int, Field(ge=1, le=20)] = 5
    #: Average the weights over about this fraction of the completed steps, with more weight for
    #: later steps; evaluations and the final model use the average. 0: no averaging.
    average_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class CheckpointSettings(SettingsTable):
    """Interval and number of checkpoints."""

    table: ClassVar[str] = "checkpoint"

    #: Steps between two checkpoints, in addition to the best one; None: a twentieth of a
    #: pre-training run or an epoch of fine-tuning, but at least 10 steps.
    steps: Annotated[int, Field(gt=0)] | None = None
    #: Maximum minutes between two checkpoints, even if fewer than ``steps`` steps are taken.
    minutes: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 10.0
    #: Whether a thread writes checkpoints while training continues. This takes main memory for a
    #: copy of the weights and the optimizer state. None: on a GPU.
    asynchronous: bool | None = None
    #: Number of recent checkpoints to keep, in addition to the best one.
    keep: Annotated[int, Field(ge=1)] = 2
    #: Whether a finished run keeps the optimizer state, which has one (Muon) or two (AdamW) float32
    #: numbers for each weight.
    keep_optimizer: bool = False

    def is_asynchronous(self, device_type: str) -> bool:
        """Return whether a thread writes the checkpoints of a run on "cpu" or "cuda"."""
        return device_type != "cpu" if self.asynchronous is None else self.asynchronous


class FinetuneRunSettings(SettingsTable):
    """Start model, seed, device, evaluation and early stopping of a fine-tuning run."""

    table: ClassVar[str] = "run"

    #: Model directory that the run starts from.
    start_from: str = ""
    #: Hash of the files of ``start_from``; set by the run.
    start_id: str | None = None
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
    #: Freeze the embeddings and this many layers, from the first one on; None: freeze nothing.
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
