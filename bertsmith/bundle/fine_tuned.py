"""Model directories of fine-tuned models, and loading an encoder for fine-tuning."""

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
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.task_models import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    TaskModel,
)
from bertsmith.text.wordpiece import Tokenizer

#: ``problem_type`` in config.json.
_PROBLEM_TYPES: dict[TaskKind, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
_TaskModelClass = type[
    BertForSequenceClassification | BertForTokenClassification | BertForQuestionAnswering
]
_SEQUENCE = ("SequenceClassification", BertForSequenceClassification)
_TOKENS = ("TokenClassification", BertForTokenClassification)
#: Kind -> name of the class in transformers without "BertFor", and the model class.
_CLASSES: dict[TaskKind, tuple[str, _TaskModelClass]] = {
    "single": _SEQUENCE, "multi": _SEQUENCE, "regression": _SEQUENCE,
    "choice": ("MultipleChoice", BertForSequenceClassification),
    "span": ("QuestionAnswering", BertForQuestionAnswering),
    "entities": _TOKENS, "tags": _TOKENS,
}  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """Kind and labels of a task head. ``labels`` are in the order of the outputs."""

    kind: TaskKind
    labels: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """C: 2 for spans (start and end), else the number of labels, or 1 without labels."""
        return 2 if self.kind == "span" else len(self.labels) or 1

    def build_model(
        self,
        config: ModelConfig,
        features: BiLSTMSettings | None = None,
    ) -> TaskModel:
        """Build a randomly initialized model with this head.

        Args:
            config: The encoder's config.
            features: If set, a BiLSTM on the hidden states of the encoder replaces the linear
                output layer.

        Raises:
            ModelError: The kind or the encoder does not support ``features``.
        """
        model_class = _CLASSES[self.kind][1]
        if features is None:
            return model_class(config, self.num_outputs)
        if self.kind == "choice":
            raise ModelError("features: not supported for choose, only for the other task families")
        try:
            return BertWithBiLSTM(
                config,
                self.num_outputs,
                features,
                is_sequence_level=model_class is BertForSequenceClassification,
            )
        except ValueError as error:
            raise ModelError(f"{error}; choose other layers") from None


@dataclass(frozen=True)
class FineTunedBundle:
    """A fine-tuned model in memory.

    Attributes:
        info: The content of bertsmith.json.
        unused_weights: Names of stored tensors that this model does not have.
    """

    model: TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    head: HeadConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    unused_weights: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Return messages about unused weights and unused embedding rows."""
        notes = describe_names(
            self.path,
            "not used",
            self.unused_weights,
        )
        return notes + describe_unused_rows(self.path, self.config, self.tokenizer)


def save_fine_tuned(
    directory: Path,
    model: TaskModel,
    tokenizer: Tokenizer,
    head: HeadConfig,
    info: Mapping[str, Any],
) -> None:
    """Write the directory of a fine-tuned model atomically."""
    hf_config = to_hf_config(model.config)
    if isinstance(model, BertWithBiLSTM):
        # No class of transformers has a BiLSTM. This model_type makes transformers reject the
        # directory instead of loading the encoder alone.
        hf_config |= {"model_type": "bertsmith", "bertsmith": hf_config.get("bertsmith", {})}
        info = {**info, "features": model.features.model_dump()}
    prefix = "Bert" if hf_config["model_type"] == "bert" else "Bertsmith"
    hf_config["architectures"] = [f"{prefix}For{_CLASSES[head.kind][0]}"]
    hf_config["pad_token_id"] = tokenizer.pad_id
    if head.kind not in ("choice", "span"):
        labels = head.labels or ("score",)
        hf_config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        hf_config["label2id"] = {label: index for index, label in enumerate(labels)}
    if head.kind in _PROBLEM_TYPES:
        hf_config["problem_type"] = _PROBLEM_TYPES[head.kind]
    with atomic_directory(directory) as new:
        state = to_hf_state_dict(model.state_dict())
        save_tensors(state, new / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / CONFIG_FILE, hf_config)
        write_json(
            new / INFO_FILE,
            {**info, "kind": head.kind, "positions": model.config.positions},
        )
        tokenizer.save(new, model.config.max_positions)
        model_card = build_model_card(model.config, tokenizer, info, head.kind, head.labels)
        write_atomic(new / MODEL_CARD_FILE, model_card)


def load_fine_tuned(path: Path | str, *, device: torch.device | str = "cpu") -> FineTunedBundle:
    """Load a fine-tuned model in eval mode.

    Args:
        path: A model directory, a run directory, a file of a model directory, or a hub id.
        device: The device of the weights.

    Raises:
        ModelError: A file is missing or damaged, or the model is not fine-tuned.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    head = _read_head(directory, info)
    weights = open_weights(directory, config)
    feature_values = info.get("features")
    features = None
    if feature_values:
        features = BiLSTMSettings.parse(feature_values, f"{directory / INFO_FILE}")
    model, unused = build_with_weights(lambda: head.build_model(config, features), weights)
    return FineTunedBundle(
        model.to(device).eval(),
        tokenizer,
        config,
        head,
        directory,
        info,
        unused,
    )


def load_for_fine_tuning(
    path: Path | str,
    head: HeadConfig,
    config_overrides: Mapping[str, Any] | None = None,
    features: BiLSTMSettings | None = None,
) -> FineTunedBundle:
    """Load the encoder of any BERT and add a newly initialized head.

    A missing pooler is newly initialized too. ``info["newly_initialized"]`` lists the new weights.

    Args:
        path: A model directory, a run directory, a file of a model directory, or a hub id.
        head: Kind and labels of the new head.
        config_overrides: ``ModelConfig`` fields to replace, such as dropout.
        features: Settings of a BiLSTM on the hidden states of the encoder, None for a linear layer.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    config = ModelConfig.parse(config.model_dump() | dict(config_overrides or {}), "the settings")
    # A BiLSTM is initialized when it is built. Otherwise only the new layers are initialized,
    # because initializing an encoder that is then overwritten takes seconds.
    with torch.device("meta" if features is None else "cpu"):
        model = head.build_model(config, features)
    # The head of another task is not reused.
    parameter_names = set(model.state_dict())
    head_names = {name for name in parameter_names if not name.startswith(("bert.", "pooler."))}
    pooler_names = {name for name in parameter_names if name.startswith("pooler.")}
    stored = match_weights(model, weights, pooler_names, excluded=head_names)
    new_names = sorted(parameter_names - set(stored))
    if features is None:
        model = allocate_on_cpu(model, directory)
        for module_name in sorted({name.rpartition(".")[0] for name in new_names}):
            initialize_weights(model.get_submodule(module_name), config.init_range)
    unused = copy_weights(model, stored, weights)
    info = {**info, "newly_initialized": new_names}
    return FineTunedBundle(model, tokenizer, config, head, directory, info, unused)


def is_fine_tuned(directory: Path) -> bool:
    """Return whether the config of a model directory names a class with a task head."""
    return _find_kind(get_architectures(read_json(directory / CONFIG_FILE))) is not None


def _find_kind(class_names: Sequence[str]) -> TaskKind | None:
    """Return the task kind of the classes in a config, None for a pre-trained model.

    Kinds that share a class are represented by the first one.
    """
    kinds = {suffix: kind for kind, (suffix, _) in reversed(_CLASSES.items())}
    for suffix, kind in kinds.items():
        if any(name.endswith(f"For{suffix}") for name in class_names):
            return kind
    return None


def _read_head(directory: Path, info: Mapping[str, Any]) -> HeadConfig:
    """Read kind and labels of the head from config.json and the content of bertsmith.json."""
    hf_config = read_json(directory / CONFIG_FILE)
    class_names = get_architectures(hf_config)
    kind = _find_kind(class_names)
    if kind is None:
        raise ModelError(
            f"{directory}: this is a {', '.join(class_names) or 'bare encoder'}, not "
            "fine-tuned on a task; `bertsmith finetune` makes such a model from it",
        )
    if kind in ("choice", "span"):
        return HeadConfig(kind)
    labels = _read_labels(hf_config, directory / CONFIG_FILE)
    if kind == "single":
        problem_type = hf_config.get("problem_type")
        kind = next(
            (candidate for candidate, name in _PROBLEM_TYPES.items() if name == problem_type),
            "regression" if len(labels) == 1 else "single",
        )
    elif info.get("kind") == "tags" or not (
        {"B", "I"} <= set(labels) or any(label.startswith("B-") for label in labels)
    ):
        kind = "tags"
    assert kind is not None
    return HeadConfig(kind, () if kind == "regression" and len(labels) == 1 else labels)


def _read_labels(hf_config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the labels in the order of the outputs.

    Without ``id2label`` there are two labels, the default of transformers.
    """
    id2label = hf_config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    is_valid = (
        isinstance(id2label, dict)
        and set(id2label) == {str(index) for index in range(len(id2label))}
        and all(isinstance(label, str) for label in id2label.values())
    )
    if not is_valid:
        raise ModelError(f'{path}: id2label must map "0", "1", "2" and so on to names')
    return tuple(id2label[str(index)] for index in range(len(id2label)))
