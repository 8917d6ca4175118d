"""The settings of a fine-tuning run.

It never knows of tensors, or where a run is written.
"""

from typing import Annotated, Literal

from pydantic import Field

from bertsmith.bundle import Kind
from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings
from bertsmith.train.checkpoint import CheckpointSettings
from bertsmith.train.optimizer import OptimSettings
from bertsmith.train.schedule import ScheduleSettings


class TaskSettings(Settings):
    """Which task, where its data stands, and how a text becomes an input."""

    #: A public task's name, or "classify" with columns of one's own.
    name: str = "classify"
    kind: Kind = "single"
    #: In the order of the outputs; resolved from the training file where nobody says them.
    labels: list[str] = Field(default_factory=list)
    train: str = ""
    #: Held-out files by name; the first one decides.
    heldout: dict[str, str] = Field(default_factory=dict)
    #: A hash of all these files; the run finds it out.
    fingerprint: str = ""
    #: The share of the training file that is held out where there is no held-out file.
    heldout_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    header: bool = True
    metrics: list[str] = Field(default_factory=list)
    #: Tokens of an input, [CLS] and [SEP] counted; what is longer is cut at its end. None: 128,
    #: or as many as the model takes.
    length: Annotated[int, Field(ge=8)] | None = None
    batch: Annotated[int, Field(ge=1)] = 32
    skip_bad: bool = False
    #: "balanced": an example counts the more, the rarer its label is.
    class_weights: Literal["none", "balanced"] = "none"


class TuneRunSettings(Settings):
    """Where fine-tuning begins, and how its steps are computed."""

    start_from: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    kernel: Literal["auto", "reference", "padded", "varlen"] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    micro_tokens: Annotated[int, Field(ge=64)] = 16384
    log_every: Annotated[int, Field(ge=1)] = 10
    #: The weights that become the model: those of the last step, or of the best evaluation.
    choose: Literal["last", "best"] = "last"
    #: Evaluations without a better one after which a run ends early, with the best one's weights.
    patience: Annotated[int, Field(ge=1)] | None = None
    #: Layers from below that are not trained, the embeddings with them; None: all are trained.
    freeze: Annotated[int, Field(ge=0)] | None = None


class FinetuneSettings(Settings):
    """Everything that decides a fine-tuning run: RUN/settings.toml. Appendix A.3 of the paper."""

    model: ModelConfig
    task: TaskSettings = TaskSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: TuneRunSettings = TuneRunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
