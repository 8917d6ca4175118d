"""The settings of a pre-training run, and the recipes that fill in what nobody set.

It never knows of tensors; it turns wishes into one resolved file.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bertsmith.data.settings import DataSettings
from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings, SettingsTable, merge_settings
from bertsmith.train.engine import compute_settings
from bertsmith.train.engine.probe import DEFAULT_NUM_EVALUATIONS, Cost
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, OptimSettings

RecipeName = Literal["fast", "paper"]


class RunSettings(SettingsTable):
    """Where a run begins, and where and how its steps are computed."""

    table: ClassVar[str] = "run"

    recipe: RecipeName = "fast"
    #: The store, its identity, and the model directory that a run goes on from.
    data: str = ""
    store: str = ""
    start_from: str | None = None
    #: What a new model starts from: chance alone, as published; "informed", what is known before
    #: the first step (how often each word occurs, which positions are neighbours); "beside", the
    #: same with two heads that look at the neighbours; or "across", the same with one that looks
    #: for words in the other segment, and one that counts them.
    initialization: Literal["random", "unigram", "neighbor-heads", "cross-segment-heads"] = "random"
    seed: compute_settings.Seed = 0
    device: str = "auto"
    precision: compute_settings.Precision = "auto"
    kernel: compute_settings.Kernel = "auto"
    compile: bool = False
    threads: compute_settings.Threads = None
    micro_batch_tokens: compute_settings.MicroTokens = compute_settings.MICRO_TOKENS
    log_every: compute_settings.LogEvery = compute_settings.LOG_EVERY
    #: Steps between two evaluations; None: a twentieth of the run.
    eval_every: Annotated[int, Field(ge=1)] | None = None
    #: Held-out sequences an evaluation reads, always the same ones with the same masks.
    eval_sequences: Annotated[int, Field(ge=1)] = 512
    tensorboard: bool = False
    #: Whether the journal has the gradients' norms of the embeddings, each layer and the heads.
    log_gradients: bool = False


class PretrainSettings(Settings):
    """Everything that decides a pre-training run: RUN/settings.toml."""

    model: ModelConfig
    data: DataSettings = DataSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: RunSettings = RunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


#: As published: the classes' own defaults, and the second phase of appendix A.2.
_PAPER: dict[str, Any] = {
    "schedule": {"long_length": 512, "long_share": 0.1, "warmup_steps": 10_000},
}

#: What has been learnt since; each choice stands with its source in docs/deviations.md.
_FAST: dict[str, Any] = {
    "model": {"attention_dropout": 0.0, "activation": "gelu"},
    "data": {"batch": 32},
    "optim": {"beta2": 0.98, "weight_decay": 0.01},
    "schedule": {"warmup_steps": 10_000},
}

#: A model that is to learn next sentence begins by looking across the segments, at no higher rate
#: than this: at higher ones the masked LM drowns next sentence before it is learnt.
_ACROSS_RATE = 1e-3

#: Peak learning rates of `fast` by width: small models bear, and at short budgets need, more.
_FAST_RATES = ((128, 2e-3), (256, 1e-3), (512, 7e-4), (768, 4e-4))
_FAST_RATE_BEYOND = 2e-4

#: The width and initial deviation of base, from which those of other sizes follow.
_BASE_WIDTH, _BASE_SPREAD = 768, 0.02

#: The share of a time budget that evaluations may take.
EVALUATION_SHARE = 0.1
#: Seconds between two checkpoints of a run with a time budget, at least, where nobody set them.
MIN_CHECKPOINT_SECONDS = 30.0

#: Steps of the paper's run, taken where nobody says how long.
PAPER_STEPS = 1_000_000


def recipe_defaults(
    recipe: RecipeName, model: Mapping[str, Any], *, nsp: bool = True
) -> dict[str, Any]:
    """Return a recipe's settings for a model of the given sizes, with or without next sentence."""
    if recipe == "paper":
        return merge_settings(_PAPER, {"model": dict(model), "run": {"recipe": "paper"}})
    width = model.get("width", _BASE_WIDTH)
    rate = next((rate for limit, rate in _FAST_RATES if width <= limit), _FAST_RATE_BEYOND)
    # The paper's 0.02 suits base. A product over fewer inputs needs larger weights to say as
    # much: with 0.02 a narrow model's attention stays flat, and its loss on the unigram plateau.
    spread = round(_BASE_SPREAD * (_BASE_WIDTH / width) ** 0.5, 4)
    # One layer or head has no room for it.
    across = nsp and 1 not in (model.get("layers"), model.get("heads"))
    chosen = {
        "model": {"init_range": spread},
        "optim": {"lr": min(rate, _ACROSS_RATE) if across else rate},
        "run": {"initialization": "cross-segment-heads" if across else "neighbor-heads"},
    }
    base = merge_settings(_FAST, chosen)
    return merge_settings(base, {"model": dict(model)})


def default_interval(steps: int) -> int:
    """Return the usual steps between two evaluations or checkpoints: a twentieth of the run."""
    # A run of some dozen steps is not to spend its time on evaluations.
    return max(min(10, steps), steps // 20)


def with_steps(settings: PretrainSettings, steps: int) -> PretrainSettings:
    """Return the settings with the number of steps, and the intervals that follow from it."""
    every = settings.checkpoint.every or default_interval(steps)
    run = settings.run.model_copy(
        update={"eval_every": settings.run.eval_every or default_interval(steps)}
    )
    return settings.model_copy(
        update={
            "schedule": settings.schedule.model_copy(update={"steps": steps}),
            "run": run,
            "checkpoint": settings.checkpoint.model_copy(update={"every": every}),
        }
    )


def with_budget(settings: PretrainSettings, cost: Cost, seconds: float) -> PretrainSettings:
    """Return the settings with the steps that fit into ``seconds``.

    Evaluations get at most EVALUATION_SHARE of the time: there are fewer of them, and where a
    single one is too long it reads fewer sequences. There is always one after the last step.
    """
    timing, run, checkpoint = settings.schedule, settings.run, settings.checkpoint
    limit, pause, sequences = (
        EVALUATION_SHARE * seconds,
        cost.evaluation_seconds,
        run.eval_sequences,
    )
    if pause > limit:
        sequences = max(1, int(min(sequences, cost.eval_sequences) * limit / pause))
        pause = limit
    most = max(1, int(limit / pause)) if pause > 0 else math.inf
    every = run.eval_every
    expected = seconds / (every * cost.step_seconds + pause) if every else DEFAULT_NUM_EVALUATIONS
    count = max(1.0, min(expected, most))
    steps = max(timing.min_steps, int((seconds - count * pause) / cost.step_seconds))
    every = every or default_interval(steps)
    if math.ceil(steps / every) > most:
        every = math.ceil(steps / most)
    saving = checkpoint.every or max(
        default_interval(steps), math.ceil(MIN_CHECKPOINT_SECONDS / cost.step_seconds)
    )
    return settings.model_copy(
        update={
            "schedule": timing.model_copy(update={"steps": steps}),
            "run": run.model_copy(update={"eval_every": every, "eval_sequences": sequences}),
            "checkpoint": checkpoint.model_copy(update={"every": saving}),
        }
    )
