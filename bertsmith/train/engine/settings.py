"""Settings that pre-training and fine-tuning share; importing them loads no torch."""

from typing import Annotated, ClassVar

from pydantic import Field

from bertsmith.settings import Settings, SettingsTable

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimSettings(SettingsTable):
    """The optimizer; the defaults are the paper's (appendix A.2) and the original code's."""

    table: ClassVar[str] = "optim"

    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.01
    #: Gradients are scaled down to this global norm (the original's clip_by_global_norm).
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0


class CheckpointSettings(Settings):
    """When checkpoints are written and how many stay."""

    #: Steps between two checkpoints; None: a twentieth of the run.
    every: Annotated[int, Field(gt=0)] | None = None
    #: How many of the last ones stay, besides the best.
    keep: Annotated[int, Field(ge=1)] = 2
    #: Whether a finished run keeps the optimizer state, twice the size of its weights.
    keep_optimizer: bool = False
