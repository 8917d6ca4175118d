"""The settings of a fine-tuning run.

It never knows of tensors, or where a run is written.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.settings import Settings
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train import computing
from bertsmith.train.schedule import ScheduleSettings
from bertsmith.train.settings import CheckpointSettings, OptimSettings


class TuneRunSettings(Settings):
    """Where fine-tuning begins, and how its steps are computed."""

    start_from: str = ""
    seed: computing.Seed = 0
    device: str = "auto"
    precision: computing.Precision = "auto"
    kernel: computing.Kernel = "auto"
    threads: computing.Threads = None
    micro_tokens: computing.MicroTokens = computing.MICRO_TOKENS
    log_every: computing.LogEvery = computing.LOG_EVERY
    #: When the held-out files are scored: after each epoch, or when all steps are done.
    evaluate: Literal["epoch", "end"] = "epoch"
    #: The weights that become the model: those of the last step, or of the best evaluation.
    choose: Literal["last", "best"] = "last"
    #: Evaluations without a better one after which a run ends early, with the best one's weights.
    patience: Annotated[int, Field(ge=1)] | None = None
    #: Layers from below that are not trained, the embeddings with them; None: all are trained.
    freeze: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _scored_on_the_way(self) -> Self:
        asked = 'choose = "best"' if self.choose == "best" else "patience"
        if self.evaluate == "end" and (self.choose == "best" or self.patience is not None):
            raise ValueError(f'{asked} wants scores on the way, and evaluate is "end"; give up one')
        return self


class FinetuneSettings(Settings):
    """Everything that decides a fine-tuning run: RUN/settings.toml. Appendix A.3 of the paper."""

    model: ModelConfig
    task: TaskSettings = TaskSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: TuneRunSettings = TuneRunSettings()
    #: A BiLSTM on the encoder, which stays as it is or learns too; None: the task's Linear alone.
    features: FeatureSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
