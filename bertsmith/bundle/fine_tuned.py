"""The model directory of a fine-tuned model, and the encoder that fine-tuning starts from.

It never knows how a task's texts are read, nor how they are scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.config import (
    CONFIG_FILE,
    TaskKind,
    get_architectures,
    read_json,
    to_hf_config,
)
from bertsmith.bundle.directory import WEIGHTS_FILE, locate_model
from bertsmith.bundle.metadata import INFO_FILE, read_metadata
from bertsmith.bundle.model_card import MODEL_CARD_FILE, build_model_card
from bertsmith.bundle.pretrained import describe_unused_rows
from bertsmith.bundle.tensor_files import save_tensors
from bertsmith.bundle.weight_names import to_hf_state_dict
from bertsmith.bundle.weights import (
    allocate_on_cpu,
    build_with_weights,
    copy_weights,
    describe_names,
    match_weights,
    open_weights,
)
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, write_atomic, write_json
from bertsmith.model.bert import initialize_weights
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.task_models import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    TaskModel,
)
from bertsmith.text.wordpiece import Tokenizer

_PROBLEMS: dict[TaskKind, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
#: The class that `transformers` has for each kind, less "BertFor", and ours.
_SEQUENCE, _TOKENS = (
    ("SequenceClassification", BertForSequenceClassification),
    ("TokenClassification", BertForTokenClassification),
)
_CLASSES: dict[TaskKind, tuple[str, type[BertForSequenceClassification | BertForTokenClassification | BertForQuestionAnswering]]] = {
    "single": _SEQUENCE, "multi": _SEQUENCE, "regression": _SEQUENCE,
    "choice": ("MultipleChoice", BertForSequenceClassification),
    "span": ("QuestionAnswering", BertForQuestionAnswering),
    "entities": _TOKENS, "tags": _TOKENS,
}  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """What the outputs of a model mean. ``labels`` are in the order of the outputs."""

    kind: TaskKind
    labels: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """The number of outputs C: one for each label; start and end of a span; else one."""
        return 2 if self.kind == "span" else len(self.labels) or 1

    def build_model(
        self, config: ModelConfig, features: FeatureSettings | None = None
    ) -> TaskModel:
        """Return a model with these outputs; its weights are drawn from the default generator.

        ``features``: a BiLSTM stands on the encoder. Raises ModelError where that cannot be.
        """
        form = _CLASSES[self.kind][1]
        if features is None:
            return form(config, self.num_outputs)
        if self.kind == "choice":
            raise ModelError("features: there are none for choose, only for the other families")
        try:
            return BertWithBiLSTM(
                config,
                self.num_outputs,
                features,
                is_sequence_level=form is BertForSequenceClassification,
            )
        except ValueError as error:
            raise ModelError(f"{error}; choose other layers") from None


@dataclass(frozen=True)
class FineTunedBundle:
    """A fine-tuned model directory in memory. ``info`` is what ``bertsmith.json`` says.

    unused_weights: names in the files that this model has no place for.
    """

    model: TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    head: HeadConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    unused_weights: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Return what a user should know of the files: what was left out, what fits."""
        notes = describe_names(
            self.path, "left out, since the model has no place for it", self.unused_weights
        )
        return notes + describe_unused_rows(self.path, self.config, self.tokenizer)


def save_fine_tuned(
    directory: Path,
    model: TaskModel,
    tokenizer: Tokenizer,
    head: HeadConfig,
    info: Mapping[str, Any],
) -> None:
    """Write the directory of a fine-tuned model, whole or not at all."""
    raw = to_hf_config(model.config)
    if isinstance(model, BertWithBiLSTM):
        # What no class of theirs has: they refuse it rather than load a part.
        raw |= {"model_type": "bertsmith", "bertsmith": raw.get("bertsmith", {})}
        info = {**info, "features": model.features.model_dump()}
    plain = raw["model_type"] == "bert"
    raw["architectures"] = [f"{'Bert' if plain else 'Bertsmith'}For{_CLASSES[head.kind][0]}"]
    raw["pad_token_id"] = tokenizer.pad_id
    if head.kind not in ("choice", "span"):
        names = head.labels or ("score",)
        raw["id2label"] = {str(number): name for number, name in enumerate(names)}
        raw["label2id"] = {name: number for number, name in enumerate(names)}
    if head.kind in _PROBLEMS:
        raw["problem_type"] = _PROBLEMS[head.kind]
    with atomic_directory(directory) as new:
        save_tensors(
            to_hf_state_dict(model.state_dict()), new / WEIGHTS_FILE, metadata={"format": "pt"}
        )
        write_json(new / CONFIG_FILE, raw)
        own = {"kind": head.kind, "positions": model.config.positions}
        write_json(new / INFO_FILE, {**info, **own})
        tokenizer.save(new, model.config.max_positions)
        write_atomic(
            new / MODEL_CARD_FILE,
            build_model_card(model.config, tokenizer, info, head.kind, head.labels),
        )


def load_fine_tuned(path: Path | str, *, device: torch.device | str = "cpu") -> FineTunedBundle:
    """Read a fine-tuned model ready for use (eval mode): a directory, a RUN, a file or a hub id.

    Raises ModelError if something is missing or broken, or the model is not fine-tuned.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    head = _head(directory, info)
    weights = open_weights(directory, config)
    told = info.get("features")
    features = FeatureSettings.parse(told, f"{directory / INFO_FILE}") if told else None
    model, left_out = build_with_weights(lambda: head.build_model(config, features), weights)
    return FineTunedBundle(
        model.to(device).eval(), tokenizer, config, head, directory, info, left_out
    )


def load_for_fine_tuning(
    path: Path | str,
    head: HeadConfig,
    config_overrides: Mapping[str, Any] | None = None,
    features: FeatureSettings | None = None,
) -> FineTunedBundle:
    """Return the encoder of a model directory with a new output layer, drawn from the generator.

    ``config_overrides``: fields of the config that are to differ, such as its dropout. ``features``: a
    BiLSTM stands on the encoder.
    Any BERT's directory does, with or without heads; a pooler that is not there is new, too.
    ``info["new"]`` names the weights that are.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    config = ModelConfig.parse(config.model_dump() | dict(config_overrides or {}), "the settings")
    # A BiLSTM's weights are drawn as it is built. Elsewhere only those of the new layers are: to
    # draw an encoder that the files then replace takes seconds.
    with torch.device("meta" if features is None else "cpu"):
        model = head.build_model(config, features)
    # What belongs to another task is no start for this one.
    own = set(model.state_dict())
    other = {name for name in own if not name.startswith(("bert.", "pooler."))}
    optional = {name for name in own if name.startswith("pooler.")}
    plan = match_weights(model, weights, optional, excluded=other)
    new = sorted(own - set(plan))
    if features is None:
        model = allocate_on_cpu(model, directory)
        for name in sorted({name.rpartition(".")[0] for name in new}):
            initialize_weights(model.get_submodule(name), config.init_range)
    left_out = copy_weights(model, plan, weights)
    info = {**info, "new": new}
    return FineTunedBundle(model, tokenizer, config, head, directory, info, left_out)


def is_fine_tuned(directory: Path) -> bool:
    """Tell whether the config of a model directory names a class with a task's output layer."""
    return _kind(get_architectures(read_json(directory / CONFIG_FILE))) is not None


def _kind(classes: Sequence[str]) -> TaskKind | None:
    """Return the kind of task that the classes of a config are for, the first of equals."""
    known = {name: kind for kind, (name, _) in reversed(_CLASSES.items())}
    return next(
        (own for name, own in known.items() if any(one.endswith(f"For{name}") for one in classes)),
        None,
    )


def _head(directory: Path, info: Mapping[str, Any]) -> HeadConfig:
    raw = read_json(directory / CONFIG_FILE)
    classes = get_architectures(raw)
    kind = _kind(classes)
    if kind is None:
        raise ModelError(
            f"{directory}: this is a {', '.join(classes) or 'bare encoder'}, not "
            "fine-tuned on a task; `bertsmith finetune` makes such a model from it"
        )
    if kind in ("choice", "span"):
        return HeadConfig(kind)
    labels = _labels(raw, directory / CONFIG_FILE)
    if kind == "single":
        problem = raw.get("problem_type")
        kind = next(
            (own for own, name in _PROBLEMS.items() if name == problem),
            "regression" if len(labels) == 1 else "single",
        )
    elif info.get("kind") == "tags" or not (
        {"B", "I"} <= set(labels) or any(name.startswith("B-") for name in labels)
    ):
        kind = "tags"
    assert kind is not None
    return HeadConfig(kind, () if kind == "regression" and len(labels) == 1 else labels)


def _labels(raw: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the labels in the order of the outputs; two without a table, as `transformers` has."""
    table = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    known = (
        isinstance(table, dict)
        and set(table) == {str(number) for number in range(len(table))}
        and all(isinstance(name, str) for name in table.values())
    )
    if not known:
        raise ModelError(f'{path}: id2label is no table of names for "0", "1", "2" and so on')
    return tuple(table[str(number)] for number in range(len(table)))
