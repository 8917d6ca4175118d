"""Settings of a pre-training run, and the defaults of each recipe; does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from bertsmith.compatibility.recipes import UNCHANGED_SETTINGS, get_old_fast_defaults
from bertsmith.data.settings import DataSettings
from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings, SettingsTable, get_table, merge_settings
from bertsmith.train.engine.duration import (
    DEFAULT_NUM_EVALUATIONS,
    EVALUATION_SHARE,
    SINGLE_EVALUATION_SHARE,
    get_default_interval,
)
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.settings import (
    DEFAULT_LOG_EVERY,
    CheckpointSettings,
    Kernel,
    LogEvery,
    MicroBatchTokens,
    OptimSettings,
    Precision,
    Seed,
    Threads,
)
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings

RecipeName = Literal["fast", "paper"]
DEFAULT_RECIPE: Final[RecipeName] = "fast"


class RunSettings(SettingsTable):
    """Recipe, store, initialization, device, evaluation and logging of a pre-training run."""

    table: ClassVar[str] = "run"

    #: `paper`: the published settings; `fast`: with methods published later.
    recipe: RecipeName = DEFAULT_RECIPE
    #: Path of the store; set by the run.
    store_path: str = ""
    #: Hash of the store's manifest; set by the run.
    store_id: str = ""
    #: Model directory for continued pre-training; None: newly initialized weights.
    start_from: str | None = None
    #: Hash of the files of `run.start_from`; set by the run.
    start_id: str | None = None
    #: Initialization of the weights; with `run.start_from`, only of those that its model lacks.
    #: "random": as published.
    #: "unigram": output biases from unigram frequencies, and sinusoidal position embeddings.
    #: "separate-positions": "unigram", with dimensions of the embeddings only for positions.
    #: "neighbor-heads": "separate-positions", and two heads that attend to neighboring tokens.
    #: "match-heads": "separate-positions", a head that attends to equal tokens in the other
    #: segment, and one that counts them; needs two layers, heads and segments. The NSP classifier
    #: starts at 0.
    #: "cross-segment-heads": "neighbor-heads" and "match-heads".
    initialization: Literal[
        "random",
        "unigram",
        "separate-positions",
        "neighbor-heads",
        "match-heads",
        "cross-segment-heads",
    ] = "random"
    #: Dropout rate during pre-training, of attention probabilities too; None: the rates of the
    #: model. The rates of the model are stored in its config and used by fine-tuning.
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    #: Random seed of initialization, data order, masks and dropout.
    seed: Seed = 0
    #: `cpu`, `cuda`, `cuda:N`, or `auto`: CUDA if available, else the CPU.
    device: str = "auto"
    #: `fp32`, `bf16` (mixed precision), or `auto`: bf16 if the device computes it fast.
    precision: Precision = "auto"
    #: Dtype of the sums of the residual connections: `fp32`, or `bf16`, which needs less memory
    #: traffic on a GPU and rounds each sum. `bf16` needs `run.precision=bf16`.
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    #: Attention implementation: `reference` (explicit softmax), `padded`
    #: (scaled_dot_product_attention), `varlen` (FlashAttention on CUDA), or `auto`.
    attention_kernel: Kernel = "auto"
    #: Whether to use torch.compile; None: on a GPU, if Triton is installed.
    compile: bool | None = None
    #: CPU threads; None: PyTorch's default, or fewer on a busy machine.
    threads: Threads = None
    #: Number of processes, if there are several (torchrun); set by the run.
    world_size: Annotated[int, Field(ge=2)] | None = None
    #: Maximum tokens of a micro-batch; gradients of larger batches are accumulated. None: 16384 on
    #: the CPU, and up to 131072 on a GPU, depending on its memory.
    micro_batch_tokens: MicroBatchTokens | None = None
    #: Steps between two lines of the metrics log with training metrics.
    log_every: LogEvery = DEFAULT_LOG_EVERY
    #: Steps between two evaluations; None: a twentieth of the run, but at least 10 steps.
    eval_every: Annotated[int, Field(ge=1)] | None = None
    #: Maximum held-out sequences per evaluation. All evaluations use the same sequences and masks.
    #: A time budget can lower it, and results on different numbers of sequences differ by chance.
    max_eval_sequences: Annotated[int, Field(ge=1)] = 512
    #: Whether to also write the metrics as TensorBoard event files, to RUN/tensorboard.
    tensorboard: bool = False
    #: Whether to log the gradient norms of the embeddings, each layer and the heads.
    log_grad_norms: bool = False


class PretrainSettings(Settings):
    """All settings of a pre-training run, stored in RUN/settings.toml."""

    model: ModelConfig
    data: DataSettings = DataSettings()
    optim: OptimSettings = OptimSettings()
    schedule: PretrainScheduleSettings = PretrainScheduleSettings()
    run: RunSettings = RunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


#: The published settings: the defaults of the settings classes, with the second phase of
#: appendix A.2.
_PAPER: dict[str, Any] = {
    "schedule": {"phase2_max_seqlen": 512, "phase2_fraction": 0.1, "warmup_steps": 10_000},
}

#: Default batch sizes of `fast`. A GPU needs a larger batch to be fully used. On a CPU, the loss
#: falls faster with more steps of smaller batches.
FAST_CPU_BATCH_SIZE, FAST_CUDA_BATCH_SIZE = 32, 256

#: Methods published after BERT; docs/deviations.md lists the source of each.
_FAST: dict[str, Any] = {
    "model": {"attention_dropout": 0.0, "activation": "gelu"},
    "data": {"batch_size": FAST_CPU_BATCH_SIZE},
    "optim": {"optimizer": "muon", "beta2": 0.98, "weight_decay": 0.01},
    "schedule": {"warmup_steps": 10_000},
    "run": {"dropout": 0.0},
}
#: The masking rate of `fast` falls linearly.
_FAST_MASKING = {"masking_rate": 0.3, "final_masking_rate": 0.15}
#: Steps with a bias of attention towards neighboring tokens, at most half of the run.
_FAST_NEIGHBOR_BIAS_STEPS = 1000

#: Maximum learning rate of `fast` with next-sentence prediction. At higher rates, the gradients of
#: masked LM prevent the model from learning next-sentence prediction.
_MAX_LR_WITH_NSP = 1e-3

#: Peak learning rates of `fast` as (maximum width, rate). Narrow models tolerate higher rates than
#: wide ones, and need them if the time budget is short.
_FAST_LRS = ((256, 2e-3), (512, 7e-4), (768, 4e-4))
#: Peak learning rate of `fast` for wider models.
_FAST_LR_WIDE = 2e-4
#: Factor of the learning rate of `fast` in continued pre-training.
_CONTINUED_LR_FACTOR = 0.5

#: Width and initialization std of BERT base, from which the std for other widths is derived.
_BASE_WIDTH, _BASE_STD = 768, 0.02

#: Number of steps in the paper, the default of the recipe "paper".
PAPER_STEPS = 1_000_000


def get_accepted_defaults(settings: PretrainSettings) -> dict[str, tuple[Any, ...]]:
    """Return other default values of settings, by key, that a resumed run may have.

    These are the defaults on other machines, and the defaults of version 0.2, whose runs have no
    ``run.start_id``.
    """
    accepted: dict[str, tuple[Any, ...]] = {"run.start_id": (None,)}
    if settings.run.recipe != "fast":
        return accepted
    model = settings.model.model_dump()
    accepted["model.nsp"] = (True,)
    for defaults in (
        UNCHANGED_SETTINGS,
        get_old_fast_defaults(model),
        get_old_fast_defaults(model, nsp=False),
        {"data": {"batch_size": FAST_CPU_BATCH_SIZE}},
        {"data": {"batch_size": FAST_CUDA_BATCH_SIZE}},
    ):
        for table in ("data", "optim", "schedule", "run"):
            for name, value in defaults.get(table, {}).items():
                key = f"{table}.{name}"
                accepted[key] = (*accepted.get(key, ()), value)
    return accepted


def scale_init_range(width: int) -> float:
    """Return the standard deviation of the initial weights for a width.

    The std is scaled to keep the variance of the layers' outputs. With a std of 0.02, the attention
    of a narrow model stays uniform, and its loss does not fall below the unigram entropy.
    """
    return round(float(_BASE_STD * (_BASE_WIDTH / width) ** 0.5), 4)


def trains_nsp(recipe: RecipeName, data: Mapping[str, Any], start_model: Mapping[str, Any]) -> bool:
    """Return whether a run has sentence pairs and a next-sentence head.

    Args:
        recipe: Name of the recipe.
        data: The user's data settings.
        start_model: Fields of the start model's config; empty for a new model. Continued
            pre-training has the objectives of the start model.
    """
    if "nsp" in data:
        return data["nsp"] is not False
    if "pair_objective" in data:
        return True
    return bool(start_model.get("nsp", recipe == "paper"))


def get_recipe_defaults(
    recipe: RecipeName,
    model: Mapping[str, Any],
    user_values: Mapping[str, Any] | None = None,
    *,
    nsp: bool = False,
    is_continued: bool = False,
) -> dict[str, Any]:
    """Return the default settings of a recipe.

    Args:
        recipe: Name of the recipe.
        model: Fields of the model config, such as layers and width.
        user_values: The user's settings by table, on which defaults of `fast` depend.
        nsp: Whether the run trains next-sentence prediction.
        is_continued: Whether the run starts from a trained model.
    """
    if recipe == "paper":
        return merge_settings(_PAPER, {"model": dict(model), "run": {"recipe": "paper"}})
    user_values = user_values or {}
    data, schedule = get_table(user_values, "data"), get_table(user_values, "schedule")
    width = model.get("width", _BASE_WIDTH)
    lr = next((lr for max_width, lr in _FAST_LRS if width <= max_width), _FAST_LR_WIDE)
    # The "cross-segment-heads" initialization needs two layers and two heads.
    is_large_enough = 1 not in (model.get("layers"), model.get("heads"))
    initialization = "cross-segment-heads" if is_large_enough else "neighbor-heads"
    has_nsp_loss = nsp and data.get("pair_objective", "nsp") == "nsp"
    if has_nsp_loss and is_large_enough:
        lr = min(lr, _MAX_LR_WITH_NSP)
    if is_continued:
        lr *= _CONTINUED_LR_FACTOR
    size_defaults = {
        "model": {"init_range": scale_init_range(width)},
        "data": {"nsp": nsp},
        "optim": {"lr": lr},
        "run": {"initialization": initialization},
    }
    defaults = merge_settings(_FAST, size_defaults)
    # The left-to-right objective has neither masks nor the bias.
    is_masked = data.get("objective", "masked") == "masked"
    # A masking rate of the user is constant.
    if is_masked and "masking_rate" not in data:
        defaults = merge_settings(defaults, {"data": _FAST_MASKING})
    if is_masked and not schedule.get("causal_fraction"):
        steps = {"neighbor_bias_steps": _FAST_NEIGHBOR_BIAS_STEPS}
        defaults = merge_settings(defaults, {"schedule": steps})
    return merge_settings(defaults, {"model": dict(model)})


def find_max_seqlen(settings: PretrainSettings) -> tuple[str, int]:
    """Return the setting with the maximum sequence length of all phases, and its value."""
    lengths = {
        "data.max_seqlen": settings.data.max_seqlen,
        "schedule.phase2_max_seqlen": settings.schedule.phase2_max_seqlen or 0,
    }
    return max(lengths.items(), key=lambda item: item[1])


def resolve_steps(settings: PretrainSettings, steps: int) -> PretrainSettings:
    """Return the settings with this number of steps, and default intervals if they are unset."""
    interval = get_default_interval(steps)
    checkpoint_every = settings.checkpoint.steps or interval
    eval_every = settings.run.eval_every or interval
    return settings.model_copy(
        update={
            "schedule": settings.schedule.model_copy(update={"steps": steps}),
            "run": settings.run.model_copy(update={"eval_every": eval_every}),
            "checkpoint": settings.checkpoint.model_copy(update={"steps": checkpoint_every}),
        }
    )


def limit_evaluation(settings: PretrainSettings, cost: Cost, seconds: float) -> PretrainSettings:
    """Limit the sequences per evaluation, so that it takes at most a fraction of a time budget.

    The fraction is SINGLE_EVALUATION_SHARE.

    Args:
        settings: Settings of the run.
        cost: Measured cost.
        seconds: The time budget.
    """
    run = settings.run
    max_eval_seconds = SINGLE_EVALUATION_SHARE * seconds
    if cost.evaluation_seconds <= max_eval_seconds:
        return settings
    max_sequences = cost.num_eval_sequences * max_eval_seconds / cost.evaluation_seconds
    num_sequences = max(1, int(max_sequences))
    run = run.model_copy(update={"max_eval_sequences": num_sequences})
    return settings.model_copy(update={"run": run})


def estimate_num_steps(settings: PretrainSettings, cost: Cost, seconds: float) -> tuple[int, int]:
    """Return the expected numbers of steps and evaluations of a run with a time budget.

    Args:
        settings: Settings of the run, with limited evaluations.
        cost: Measured cost.
        seconds: Time for steps and evaluations.
    """
    evaluation_seconds = cost.estimate_evaluation_seconds(settings.run.max_eval_sequences)
    max_evaluations = EVALUATION_SHARE * seconds / max(evaluation_seconds, 1e-9)
    eval_every = settings.run.eval_every
    if eval_every is None:
        expected_evaluations = float(DEFAULT_NUM_EVALUATIONS)
    else:
        expected_evaluations = seconds / (eval_every * cost.step_seconds + evaluation_seconds)
    num_evaluations = max(1, int(min(expected_evaluations, max_evaluations)))
    # The start model is evaluated, too.
    num_evaluations += settings.run.start_from is not None
    training_seconds = seconds - num_evaluations * evaluation_seconds
    steps = max(settings.schedule.min_steps, int(training_seconds / cost.step_seconds))
    return steps, num_evaluations
