"""The models of a panel: those of the user, and an untrained model for each architecture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files, locate_model
from bertsmith.bundle.directory import get_hub_id, get_model_name
from bertsmith.bundle.metadata import read_metadata
from bertsmith.bundle.mlm_head import check_mlm_head
from bertsmith.errors import ModelError
from bertsmith.files import write_directory_once
from bertsmith.lab.panel.stage_functions import UNTRAINED_KIND
from bertsmith.lab.stage import Stage
from bertsmith.model.config import ModelConfig
from bertsmith.settings import get_table
from bertsmith.text.wordpiece import Tokenizer

#: Length of the hash in the names of tokenizer folders, and of the commit in labels.
_HASH_LENGTH = 12


@dataclass(frozen=True)
class PanelModel:
    """A column of the table: a model of the user, or untrained models of an architecture.

    Attributes:
        label: The name in the table.
        path: The model directory of a user's model; for untrained models, that of the first
            user's model with this architecture.
        config: The model settings.
        tokenizer: The tokenizer.
        is_untrained: Whether the models are untrained, one for each seed.
        initialization: The value of run.initialization before the model was pre-trained.
        has_mlm_head: Whether the model predicts masked tokens.
    """

    label: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    is_untrained: bool = False
    initialization: str = "random"
    has_mlm_head: bool = True

    @cached_property
    def hash(self) -> str:
        """The hash of the files that determine the model; its model card is not one of them."""
        return hash_model_files(self.path)

    def create_untrained_stage(self, seed: int, work_dir: Path) -> Stage:
        """Return the stage that initializes the untrained model of a seed.

        Args:
            seed: The seed.
            work_dir: The folder for a copy of the tokenizer.
        """
        # Stages hash the contents of their files. Models with equal tokenizers share a copy of the
        # tokenizer's files, so that they share the untrained model too.
        folder = work_dir / "tokenizers" / self.tokenizer.hash[:_HASH_LENGTH]
        write_directory_once(folder, self.tokenizer.save)
        # Unset fields are left out, so that new ones do not change the hashes of existing results.
        settings: dict[str, Any] = {
            "model": self.config.model_dump(exclude_none=True),
            "seed": seed,
        }
        if self.initialization != "random":
            settings["initialization"] = self.initialization
        return Stage(UNTRAINED_KIND, settings, {}, {"tokenizer": folder})


def load_models(paths: Sequence[Path | str], *, with_untrained: bool) -> list[PanelModel]:
    """Return the models, followed by one untrained model for each distinct architecture.

    Models that Bertsmith trained started with the initialization of their run, and are compared
    with it. Other models, and models continued from another one, are compared with random weights.
    The next-sentence head is not part of an architecture.

    Args:
        paths: Model directories, run directories, or names of models.
        with_untrained: Whether to add untrained models.

    Raises:
        ModelError: A model cannot be read.
    """
    directories = list(dict.fromkeys(locate_model(path).resolve() for path in paths))
    labels = _make_labels(directories)
    models = [_read_model(*entry) for entry in zip(directories, labels, strict=True)]
    if not with_untrained:
        return models
    untrained: dict[Any, PanelModel] = {}
    for model in models:
        config = model.config.model_copy(update={"nsp": False})
        key = (model.tokenizer.hash, tuple(config.model_dump().items()), model.initialization)
        if key not in untrained:
            size = f"{config.layers} x {config.width}"
            label = f"untrained, {size}, {model.tokenizer.vocab_size:,} tokens"
            if model.initialization != "random":
                label += f", {model.initialization}"
            untrained[key] = replace(model, label=label, config=config, is_untrained=True)
    counts = Counter(model.label for model in untrained.values())
    return models + [
        model if counts[model.label] == 1 else _add_model_name(model, models)
        for model in untrained.values()
    ]


def _add_model_name(untrained: PanelModel, models: Sequence[PanelModel]) -> PanelModel:
    """Return an untrained model whose label names a user's model with the same architecture."""
    name = next(model.label for model in models if model.path == untrained.path)
    return replace(untrained, label=f"{untrained.label} (as {name})")


def _read_model(directory: Path, label: str) -> PanelModel:
    """Read the config and the tokenizer of a model, and check whether it has a masked-LM head."""
    info, config, tokenizer = read_metadata(directory)
    has_mlm_head = True
    try:
        check_mlm_head(directory)
    except ModelError:
        has_mlm_head = False
    return PanelModel(
        label,
        directory,
        config,
        tokenizer,
        initialization=_find_initialization(info),
        has_mlm_head=has_mlm_head,
    )


def _find_initialization(info: Mapping[str, Any]) -> str:
    """Return the initialization in the content of bertsmith.json; "random" if it has none."""
    settings = get_table(get_table(info, "provenance"), "settings")
    run = get_table(settings, "run")
    return "random" if run.get("start_from") else str(run.get("initialization", "random"))


def _make_labels(directories: Sequence[Path]) -> list[str]:
    """Return a distinct label for each model.

    The label is the name of the model. If several models have the same name, it is the end of the
    path, as long as necessary; for models on the hub, it is the name and the commit.
    """
    labels = [get_model_name(directory) for directory in directories]
    for length in range(2, max(len(directory.parts) for directory in directories) + 1):
        counts = Counter(labels)
        labels = [
            label if counts[label] == 1 else _make_longer_label(directory, length)
            for directory, label in zip(directories, labels, strict=True)
        ]
    return labels


def _make_longer_label(directory: Path, length: int) -> str:
    """Return the last ``length`` parts of a path, or the name and the commit of a hub model."""
    hub_id = get_hub_id(directory)
    if hub_id is not None:
        return f"{hub_id}@{directory.name[:_HASH_LENGTH]}"
    folder = directory.parent if directory.name == "model" else directory
    return "/".join(folder.parts[-length:])
