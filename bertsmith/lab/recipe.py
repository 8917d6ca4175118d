"""The pre-training recipes of the experiments.

The recipe `fast` of the experiments is that of version 0.2. It does not change when the default
recipe of `bertsmith pretrain` does, so that all results of the lab remain comparable.
"""

from collections.abc import Mapping
from typing import Any

from bertsmith.compatibility.recipes import UNCHANGED_SETTINGS, get_old_fast_defaults
from bertsmith.settings import merge_settings
from bertsmith.train.pretraining.recipes import RecipeName, get_recipe_defaults


def get_experiment_settings(recipe: RecipeName, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe that are part of the key of a pre-training stage.

    Args:
        recipe: Name of the recipe.
        model: Fields of the model config, such as layers and width.
    """
    return get_recipe_defaults(recipe, model) if recipe == "paper" else get_old_fast_defaults(model)


def add_recipe_defaults(recipe: RecipeName, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stage with those of the recipe that are not part of its key."""
    return merge_settings(UNCHANGED_SETTINGS if recipe == "fast" else {}, settings)
