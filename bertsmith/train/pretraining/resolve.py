"""Resolves the settings of a pre-training run: recipe, model size, settings file, overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from bertsmith.data.store import MANIFEST_FILE, Store
from bertsmith.errors import RunError, SettingsError
from bertsmith.files import compute_file_sha256
from bertsmith.model.config import SIZES, get_size_preset
from bertsmith.runtime.process_rank import read_process_rank
from bertsmith.settings import (
    get_table,
    load_user_settings,
    merge_settings,
    read_stored_settings,
)
from bertsmith.train.engine.finetuning_overrides import MUTABLE_MODEL_FIELDS
from bertsmith.train.engine.run_directory import (
    FINETUNING_TABLES,
    SETTINGS_FILE,
    check_run_directory,
)
from bertsmith.train.engine.schedule import LENGTH_SETTINGS
from bertsmith.train.pretraining import recipes
from bertsmith.train.pretraining.recipes import PretrainSettings, RecipeName
from bertsmith.train.pretraining.repeated_run import drop_computed_values
from bertsmith.train.pretraining.start_model import resolve_start_model
from bertsmith.train.pretraining.unused_settings import check_unused_settings

_DEFAULT_SIZE = "mini"


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The user's arguments for a pre-training run.

    Attributes:
        data: Token store.
        size: Name of a model size; None: "mini", or the size of the model ``start_from``.
        recipe: Name of the recipe; None: "fast", or the recipe of the run whose settings are
            ``config``.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings; override ``config``.
        start_from: Model directory for continued pre-training.
        out: Run directory. If ``start_from`` does not exist, its config is read from the settings
            of this run.
        cuda: Whether a CUDA device is available, which ``run.device = "auto"`` then selects. True
            if this is not known, because the checks of the settings for a GPU are weaker.
    """

    data: Path
    size: str | None = None
    recipe: RecipeName | None = None
    config: Path | str | None = None
    assignments: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    start_from: str | None = None
    out: Path | None = None
    cuda: bool = False


def resolve_settings(overrides: Overrides, store: Store) -> PretrainSettings:
    """Return the settings of a run, without default values for steps, epochs and minutes.

    Later sources override earlier ones: recipe, size, settings file, values, assignments.

    Raises:
        SettingsError: If a setting is unknown or contradicts another one.
    """
    file_values = load_user_settings(overrides.config)
    if any(name in file_values for name in FINETUNING_TABLES):
        raise SettingsError(
            f"{overrides.config}: these are the settings of a fine-tuning or distillation run; "
            "give those of a pre-training run, or use --set"
        )
    new_values = _load_new_values(overrides)
    is_run = bool(get_table(file_values, "run").get("store_id"))
    if is_run:
        overrides = _adopt_recipe_and_start_model(overrides, new_values)
        overrides, file_values = _adopt_run_settings(overrides, file_values, store)
    file_values = _drop_replaced_length(file_values, new_values)
    user_values = load_user_settings(file_values, overrides.values, overrides.assignments)
    if not is_run:
        overrides = _adopt_recipe_and_start_model(overrides, user_values)
    user_values = _drop_start_model(user_values)
    if overrides.start_from is not None and overrides.size is not None:
        raise SettingsError("--size and --from are mutually exclusive: the model has its own size")
    if overrides.start_from is not None:
        start = resolve_start_model(overrides.start_from, overrides.out, store)
        model = start.config
    else:
        start = None
        size = _DEFAULT_SIZE if overrides.size is None else overrides.size
        model = _override_sizes(_get_size_preset(size), user_values.get("model"))
    recipe = recipes.DEFAULT_RECIPE if overrides.recipe is None else overrides.recipe
    if recipe not in get_args(RecipeName):
        raise SettingsError(
            f"run.recipe is {recipe!r}; expected one of {', '.join(get_args(RecipeName))}"
        )
    data = get_table(user_values, "data")
    nsp = recipes.trains_nsp(recipe, data, {} if start is None else model)
    if start is not None:
        user_values = merge_settings({"data": start.get_objectives(nsp=nsp)}, user_values)
    base = recipes.get_recipe_defaults(
        recipe, model, user_values, nsp=nsp, is_continued=start is not None
    )
    if recipe == "fast":
        device = str(get_table(user_values, "run").get("device", "auto"))
        batch_size = _get_default_batch_size(overrides, device)
        base = merge_settings(base, {"data": {"batch_size": batch_size}})
    run_values = {"store_path": str(overrides.data.resolve()), "store_id": compute_store_id(store)}
    if start is not None:
        run_values |= start.run_values
        # The config of the start model replaces the model settings of the recipe, and its attention
        # is already trained.
        base = merge_settings(base, {"model": model, "schedule": {"neighbor_bias_steps": 0}})
    else:
        base = merge_settings(base, {"model": {"vocab_size": store.manifest.vocab_size}})
    base = merge_settings(base, {"run": run_values})
    base = merge_settings(base, {"model": {"nsp": nsp}, "data": {"nsp": nsp}})
    source = str(overrides.config) if overrides.config else "the settings"
    settings = _parse_settings(base, file_values, user_values, source)
    if overrides.start_from is not None:
        _check_start_config(settings, model, overrides.start_from)
    _check_consistency(settings, store, source)
    return settings


def _get_default_batch_size(overrides: Overrides, device: str) -> int:
    """Return the batch size of `fast` for a device, or that of the run if it exists already.

    A run keeps its batch size on another device.
    """
    settings_file = None if overrides.out is None else overrides.out / SETTINGS_FILE
    if settings_file is not None and settings_file.exists():
        stored = get_table(read_stored_settings(settings_file), "data").get("batch_size")
        if type(stored) is int:
            return stored
    is_cuda = overrides.cuda if device == "auto" else device.startswith("cuda")
    return recipes.FAST_CUDA_BATCH_SIZE if is_cuda else recipes.FAST_CPU_BATCH_SIZE


def resolve_run_settings(
    overrides: Overrides,
    store: Store,
    budget: Mapping[str, float | None],
    *,
    is_main: bool = True,
) -> PretrainSettings:
    """Return the settings of ``resolve_settings``, with steps, epochs or minutes of the run.

    Args:
        overrides: Arguments of the user.
        store: Token store.
        budget: The values of steps, epochs and minutes; None for a value that is not set. If none
            is set, the settings or the recipe determine the steps, epochs or minutes.
        is_main: Whether this is the main process of the run, which checks for settings without
            effect. Only this process needs access to the run directory, and a run that exists is
            not checked, because earlier versions accepted such settings.

    Raises:
        RunError: If more than one value of the budget is set.
        SettingsError: See ``resolve_settings``, or if a setting has no effect.
    """
    user_budget = {name: value for name, value in budget.items() if value is not None}
    if len(user_budget) > 1:
        options = ", ".join("--" + name for name in user_budget)
        raise RunError(f"only one of {options} can be given")
    settings = resolve_settings(overrides, store)
    schedule = settings.schedule
    if user_budget:
        unset = dict.fromkeys(LENGTH_SETTINGS, None)
        schedule = schedule.model_copy(update={**unset, **user_budget})
    elif schedule.steps is None and schedule.epochs is None and schedule.minutes is None:
        is_paper = settings.run.recipe == "paper"
        default_budget = {"steps": recipes.PAPER_STEPS} if is_paper else {"epochs": 1.0}
        schedule = schedule.model_copy(update=default_budget)
    settings = settings.model_copy(update={"schedule": schedule})
    # model_copy does not validate the user's values.
    settings = PretrainSettings.parse(settings.model_dump(), "the settings")
    out = overrides.out
    if is_main and not (out is not None and (out / SETTINGS_FILE).exists()):
        check_unused_settings(
            settings, overrides.config, overrides.values, overrides.assignments, user_budget
        )
    return settings


def check_pretrain_arguments(
    data: Path, out: Path | None, budget: Mapping[str, float | None], overrides: Mapping[str, Any]
) -> None:
    """Check the arguments of ``pretrain`` without importing torch; ``pretrain`` checks them again.

    Only process 0 of several needs access to ``out``, so only process 0 checks it.

    Args:
        data: Token store.
        out: Run directory; None if no run is written.
        budget: The values of steps, epochs and minutes; None for a value that is not set.
        overrides: Keyword arguments of ``Overrides``.

    Raises:
        BertsmithError: If ``pretrain`` would reject these arguments.
    """
    is_main = read_process_rank().rank == 0
    if out is not None and is_main:
        check_run_directory(out)
    arguments = Overrides(data=data, out=out, cuda=True, **overrides)
    resolve_run_settings(arguments, Store.open(data), budget, is_main=is_main)


def _drop_replaced_length(
    file_values: Mapping[str, Any], new_values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a file without the length of its run, if the user sets another one."""
    schedule = get_table(file_values, "schedule")
    if schedule and not get_table(new_values, "schedule").keys().isdisjoint(LENGTH_SETTINGS):
        schedule = {name: value for name, value in schedule.items() if name not in LENGTH_SETTINGS}
        return {**file_values, "schedule": schedule}
    return dict(file_values)


def _adopt_recipe_and_start_model(overrides: Overrides, settings: Mapping[str, Any]) -> Overrides:
    """Return the arguments with ``run.recipe`` and ``run.start_from`` of the settings.

    Raises:
        SettingsError: If a setting contradicts the argument.
    """
    run = get_table(settings, "run")
    for name, option in (("recipe", "--recipe"), ("start_from", "--from")):
        value, argument = run.get(name), getattr(overrides, name)
        if not isinstance(value, str):
            continue  # The parser reports other values than None.
        if argument not in (None, value):
            raise SettingsError(
                f"run.{name} is {value!r}, but {option} is {argument!r}; give only one of them"
            )
        changes: dict[str, Any] = {name: value}
        overrides = replace(overrides, **changes)
    if overrides.start_from == "":
        raise SettingsError(
            "--from is empty, perhaps because a shell variable is not set; give the path or name "
            "of a model, or leave out --from"
        )
    return overrides


def _drop_start_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without ``run.start_from``, which is an argument."""
    run = get_table(settings, "run")
    if not isinstance(run.pop("start_from", None), str):
        return settings
    run.pop("start_id", None)
    return {**settings, "run": run}


def _adopt_run_settings(
    overrides: Overrides, settings: Mapping[str, Any], store: Store
) -> tuple[Overrides, dict[str, Any]]:
    """Return arguments and settings for a new run that repeats another run.

    The recipe and the start model of the other run become arguments.

    Args:
        overrides: Arguments whose ``config`` is the settings.toml of the other run.
        settings: The settings in that file.
        store: Token store of the new run.

    Raises:
        SettingsError: If the arguments contradict the file.
    """
    run = get_table(settings, "run")
    if overrides.size is not None:
        raise SettingsError(
            f"{overrides.config}: --size has no effect, because these are the settings of a run, "
            "with its model size; leave out --size"
        )
    recipe = run.get("recipe", recipes.DEFAULT_RECIPE)
    if overrides.recipe not in (recipe, None):
        raise SettingsError(
            f"{overrides.config}: --recipe {overrides.recipe} has no effect, because these are the "
            f"settings of a run with the recipe {recipe!r}; leave out --recipe"
        )
    start_from = overrides.start_from or run.get("start_from") or None
    overrides = replace(overrides, recipe=recipe, start_from=start_from)
    file_values = drop_computed_values(
        settings,
        _load_new_values(overrides),
        compute_store_id(store),
        start_from=start_from,
        has_cuda=overrides.cuda,
    )
    return overrides, file_values


def _load_new_values(overrides: Overrides) -> dict[str, Any]:
    """Return the settings that the user gives in addition to the settings file."""
    return load_user_settings(None, overrides.values, overrides.assignments)


def _parse_settings(
    base: dict[str, Any], file_values: dict[str, Any], user_values: dict[str, Any], source: str
) -> PretrainSettings:
    """Parse the merged settings; an error message names the settings file if it has the error."""
    merged_source = "the settings given in addition to the file" if file_values else source
    try:
        return PretrainSettings.parse(merge_settings(base, user_values), merged_source)
    except SettingsError:
        PretrainSettings.parse(merge_settings(base, file_values), source)
        raise


def _check_start_config(settings: PretrainSettings, model: Mapping[str, Any], path: str) -> None:
    """Raise SettingsError if the settings change the network of the start model at ``path``.

    Only the dropout rates and the next-sentence head can change.
    """
    for name, value in settings.model.model_dump().items():
        if name not in (*MUTABLE_MODEL_FIELDS, "nsp") and value != model[name]:
            raise SettingsError(
                f"model.{name} is {value!r}, but the model at {path} has {model[name]!r}; leave it "
                "out, or start from scratch without --from"
            )


def compute_store_id(store: Store) -> str:
    """Return a truncated SHA-256 of the store's manifest, which identifies the store."""
    return compute_file_sha256(store.path / MANIFEST_FILE)[:16]


def _get_size_preset(name: str) -> dict[str, Any]:
    """Return the model settings of a size; raise SettingsError if the size is unknown."""
    if name not in SIZES:
        raise SettingsError(f"unknown --size {name!r}; the sizes are {', '.join(SIZES)}")
    return dict(get_size_preset(name))


def _override_sizes(model: dict[str, Any], user_model: Any) -> dict[str, Any]:
    """Return a size preset with the sizes that the user has set.

    The defaults of a recipe depend on these sizes. If only the width is set, the feed-forward width
    is 4 times the width. Invalid values are ignored, because the parser reports them later.
    """
    if not isinstance(user_model, Mapping):
        return model
    sizes = {
        name: value
        for name, value in user_model.items()
        if name in model and type(value) is int and value > 0
    }
    if "width" in sizes:
        model = model | {"feed_forward": 4 * sizes["width"]}
    return model | sizes


def _check_consistency(settings: PretrainSettings, store: Store, source: str) -> None:
    """Raise SettingsError if model, data and store contradict each other."""
    model = settings.model
    vocab_size = store.manifest.vocab_size
    name, max_seqlen = recipes.find_max_seqlen(settings)
    if max_seqlen > model.max_positions:
        # The start model determines model.max_positions.
        alternative = "" if settings.run.start_from else " or raise model.max_positions"
        raise SettingsError(
            f"{source}: {name} is {max_seqlen}, but model.max_positions is "
            f"{model.max_positions}; reduce {name}{alternative}"
        )
    if model.vocab_size < vocab_size:
        raise SettingsError(
            f"{source}: model.vocab_size is {model.vocab_size}, but the store's vocabulary has "
            f"{vocab_size} tokens; leave model.vocab_size out to use the store's"
        )
    phase2_max_seqlen = settings.schedule.phase2_max_seqlen
    if phase2_max_seqlen is not None and phase2_max_seqlen < settings.data.max_seqlen:
        raise SettingsError(
            f"{source}: schedule.phase2_max_seqlen is {phase2_max_seqlen}, but data.max_seqlen is "
            f"{settings.data.max_seqlen}; the second phase cannot have shorter sequences"
        )
    if settings.data.objective == "left-to-right" and model.attention != "causal":
        raise SettingsError(
            f"{source}: data.objective is 'left-to-right', but model.attention is "
            f"{model.attention!r}, so the model would see the token that it predicts; set "
            "model.attention=causal"
        )
    schedule = settings.schedule
    if schedule.causal_fraction and settings.data.objective == "left-to-right":
        raise SettingsError(
            f"{source}: schedule.causal_fraction is {schedule.causal_fraction:g}, but "
            "data.objective is 'left-to-right', so the entire run is left to right; leave out one "
            "of them"
        )
    if schedule.neighbor_bias_steps and settings.data.objective == "left-to-right":
        raise SettingsError(
            f"{source}: schedule.neighbor_bias_steps is {schedule.neighbor_bias_steps}, but "
            "data.objective is 'left-to-right', which has no such bias; set "
            "schedule.neighbor_bias_steps=0"
        )
    if schedule.neighbor_bias_steps and schedule.causal_fraction:
        raise SettingsError(
            f"{source}: schedule.neighbor_bias_steps is {schedule.neighbor_bias_steps}, but the "
            f"run starts left to right (schedule.causal_fraction is {schedule.causal_fraction:g}), "
            "without such a bias; set one of them to 0"
        )
    _check_pairs(settings, source)


def _check_pairs(settings: PretrainSettings, source: str) -> None:
    """Raise SettingsError if the settings of pairs of segments contradict each other."""
    model = settings.model
    if model.nsp != settings.data.nsp:
        raise SettingsError(
            f"{source}: model.nsp is {model.nsp}, but data.nsp is {settings.data.nsp}; set only "
            "data.nsp, which determines model.nsp"
        )
    if settings.data.pair_objective == "sop" and not settings.data.nsp:
        raise SettingsError(
            f"{source}: data.pair_objective is 'sop', but data.nsp is false, so there are no "
            "pairs; leave out one of them"
        )
    if model.nsp and model.segments < 2:
        # The start model determines model.segments.
        alternative = "" if settings.run.start_from else " or model.segments=2"
        raise SettingsError(
            f"{source}: data.nsp is true, but model.segments is {model.segments}, and sentence "
            f"pairs need 2 segments; set data.nsp=false{alternative}"
        )
    if model.nsp and model.attention == "causal":
        raise SettingsError(
            f"{source}: data.nsp is true, but model.attention is 'causal', so [CLS] sees only "
            "itself and cannot predict the next sentence; set data.nsp=false"
        )
