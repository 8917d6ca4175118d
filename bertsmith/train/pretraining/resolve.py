"""From wishes to the one resolved file of a run, and the refusal of a file that says otherwise.

It never knows how to train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith import bundle
from bertsmith.bundle.metadata import read_metadata
from bertsmith.data.store import MANIFEST_FILE, Store
from bertsmith.errors import RunError, SettingsError
from bertsmith.files import sha256_of_file
from bertsmith.model.config import SIZES, size_preset
from bertsmith.settings import merge_settings, user_settings
from bertsmith.train.pretraining import recipes as recipe
from bertsmith.train.pretraining.recipes import PretrainSettings, RecipeName

#: What decides the shapes of a model's weights.
_SHAPE = (
    "vocab_size", "layers", "width", "heads", "feed_forward", "max_positions", "segments",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user said; None and empty where nothing was said.

    ``values`` are nested settings laid over the file ``config``; ``assignments`` are "a.b=v".
    """

    data: Path
    size: str | None = None
    recipe: RecipeName = "fast"
    config: Path | None = None
    assignments: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    start_from: str | None = None
    cuda: bool = False


def resolve_settings(overrides: Overrides, store: Store) -> PretrainSettings:
    """Lay recipe, size, file and assignments over each other, in that order.

    Raises SettingsError for anything unknown or contradictory.
    """
    said = user_settings(overrides.config, overrides.values, overrides.assignments)
    if overrides.start_from and overrides.size:
        raise SettingsError("--size and --from exclude each other: the model's own size counts")
    if overrides.start_from:
        model = _start(overrides.start_from, store)
    else:
        model = _resized(_size(overrides.size or "mini"), said.get("model"))
    data = said.get("data")
    # A recipe does not say whether there are pairs.
    nsp = data.get("nsp", True) if isinstance(data, Mapping) else True
    base = recipe.recipe_defaults(overrides.recipe, model, nsp=nsp is not False)
    if overrides.cuda and overrides.recipe == "fast":
        # A batch that keeps the device busy; on the CPU, more steps learn more in a short time.
        base = merge_settings(base, {"data": {"batch": 256}})
    facts = {"data": str(overrides.data.resolve()), "store": store_id(store)}
    if overrides.start_from:
        facts["start_from"] = str(bundle.pin_model_path(overrides.start_from))
        # The model's own shape counts, not the recipe's choices for a new one.
        base = merge_settings(base, {"model": model})
    else:
        base = merge_settings(base, {"model": {"vocab_size": store.manifest.vocab_size}})
    base = merge_settings(base, {"run": facts})
    base["model"]["nsp"] = nsp
    source = str(overrides.config) if overrides.config else "the settings"
    settings = _parse(base, user_settings(overrides.config), said, source)
    if overrides.start_from:
        _check_shape(settings, model, overrides.start_from)
    _check(settings, store, source)
    return settings


def resolve_run_settings(
    overrides: Overrides, store: Store, lengths: Mapping[str, float | None]
) -> PretrainSettings:
    """Return resolved settings with the length of the run; ``lengths``: steps, epochs, minutes.

    Raises RunError for more than one length, else as ``resolve_settings``.
    """
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise RunError(f"only one of {', '.join('--' + name for name in given)} can be given")
    settings = resolve_settings(overrides, store)
    length = settings.schedule
    if given:
        cleared = {"steps": None, "epochs": None, "minutes": None}
        length = length.model_copy(update={**cleared, **given})
    elif length.steps is None and length.epochs is None and length.minutes is None:
        paper = settings.run.recipe == "paper"
        default = {"steps": recipe.PAPER_STEPS} if paper else {"epochs": 1.0}
        length = length.model_copy(update=default)
    settings = settings.model_copy(update={"schedule": length})
    return PretrainSettings.parse(settings.model_dump(), "the settings")


def _parse(
    base: dict[str, Any], file: dict[str, Any], said: dict[str, Any], source: str
) -> PretrainSettings:
    """Parse base and all that was said; a fault that the file alone has is told as the file's."""
    try:
        return PretrainSettings.parse(merge_settings(base, said), "the settings given beside the file"
                                      if file else source)  # fmt: skip
    except SettingsError:
        PretrainSettings.parse(merge_settings(base, file), source)
        raise


def _check_shape(settings: PretrainSettings, model: Mapping[str, Any], path: str) -> None:
    for name in _SHAPE:
        wished = getattr(settings.model, name)
        if wished != model[name]:
            raise SettingsError(
                f"model.{name} is {wished}, but the model at {path} has {model[name]}; leave it "
                "out, or start from scratch without --from"
            )


def store_id(store: Store) -> str:
    """Return what tells a store from another one: the hash of its manifest, shortened."""
    return sha256_of_file(store.path / MANIFEST_FILE)[:16]


def _size(name: str) -> dict[str, Any]:
    if name not in SIZES:
        raise SettingsError(f"--size {name!r}: the sizes are {', '.join(SIZES)}")
    return dict(size_preset(name))


def _resized(model: dict[str, Any], said: Any) -> dict[str, Any]:
    """Return the sizes with those that were said, so that the recipe's choices follow them.

    A width alone brings its feed-forward width with it. What is no number is left to the parser.
    """
    if not isinstance(said, Mapping):
        return model
    sizes = {name: value for name, value in said.items()
             if name in model and type(value) is int and value > 0}  # fmt: skip
    if "width" in sizes:
        model = model | {"feed_forward": 4 * sizes["width"]}
    return model | sizes


def _start(path: str, store: Store) -> dict[str, Any]:
    """Return the shape of the model that a run goes on from; its tokenizer must be the store's."""
    _, config, tokenizer = read_metadata(bundle.locate_model(path))
    store.check_tokenizer(tokenizer)
    return config.model_dump()


def _check(settings: PretrainSettings, store: Store, source: str) -> None:
    model, words = settings.model, store.manifest.vocab_size
    longest = max(settings.data.length, settings.schedule.long_length or 0)
    if longest > model.max_positions:
        raise SettingsError(
            f"{source}: sequences of {longest} tokens, but model.max_positions is "
            f"{model.max_positions}; shorten data.length or raise model.max_positions"
        )
    if model.vocab_size < words:
        raise SettingsError(
            f"{source}: model.vocab_size is {model.vocab_size}, but the store's vocabulary has "
            f"{words} words; leave model.vocab_size out, the store says it"
        )
    if settings.data.objective == "left-to-right" and model.attention != "causal":
        raise SettingsError(
            f"{source}: data.objective is 'left-to-right', but model.attention is "
            f"{model.attention!r}: the model would see the word that it predicts; set "
            "model.attention=causal"
        )
    if model.nsp != settings.data.nsp:
        raise SettingsError(
            f"{source}: model.nsp is {model.nsp} and data.nsp is {settings.data.nsp}; "
            "set data.nsp alone, the model follows"
        )
    if model.nsp and model.attention == "causal":
        raise SettingsError(
            f"{source}: data.nsp is true, but model.attention is 'causal': [CLS], from which next "
            "sentence is told, sees only itself; set data.nsp=false"
        )
