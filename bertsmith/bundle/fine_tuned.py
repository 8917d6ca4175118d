"""Model directories of fine-tuned models, and loading an encoder for fine-tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from bertsmith.bundle.config import (
    CONFIG_FILE,
    HF_CLASS_SUFFIXES,
    TaskKind,
    is_fine_tuned,
    read_json,
    require_task_kind,
    to_hf_config,
)
from bertsmith.bundle.directory import WEIGHTS_FILE, locate_model
from bertsmith.bundle.metadata import INFO_FILE, read_max_seqlen, read_metadata
from bertsmith.bundle.model_card import MODEL_CARD_FILE, RERANKING, build_model_card
from bertsmith.bundle.pretrained import describe_unused_rows
from bertsmith.bundle.single_segment import reject_pairs
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

#: Task kind -> ``problem_type`` in config.json.
_PROBLEM_TYPES: dict[TaskKind, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
#: Maximum number of labels without names, for which a damaged config must not fill the memory.
_MAX_LABELS: Final = 2**20
_TaskModelClass = type[
    BertForSequenceClassification | BertForTokenClassification | BertForQuestionAnswering
]
#: Task kind -> Bertsmith's class.
_MODEL_CLASSES: dict[TaskKind, _TaskModelClass] = {
    "single": BertForSequenceClassification,
    "multi": BertForSequenceClassification,
    "regression": BertForSequenceClassification,
    "choice": BertForSequenceClassification,
    "span": BertForQuestionAnswering,
    "entities": BertForTokenClassification,
    "tags": BertForTokenClassification,
}


@dataclass(frozen=True)
class HeadConfig:
    """The task kind and the labels of a task head.

    Attributes:
        kind: The task kind.
        labels: The label of each output; empty for kinds without labels.
    """

    kind: TaskKind
    labels: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        """C, the number of outputs: 2 for spans (start and end), 1 without labels."""
        if self.kind == "span":
            return 2
        return max(len(self.labels), 1)

    def build_model(
        self,
        config: ModelConfig,
        features: BiLSTMSettings | None = None,
    ) -> TaskModel:
        """Build a randomly initialized model with this head.

        Args:
            config: The encoder's config.
            features: Settings of a BiLSTM between the encoder and the output layer; None for no
                BiLSTM.

        Raises:
            ModelError: The task kind or the encoder does not support a BiLSTM.
        """
        model_class = _MODEL_CLASSES[self.kind]
        if features is None:
            return model_class(config, self.num_outputs)
        if self.kind == "choice":
            raise ModelError(
                "features: a BiLSTM is not supported for multiple choice; remove the table features"
            )
        try:
            return BertWithBiLSTM(
                config,
                self.num_outputs,
                features,
                is_sequence_level=model_class is BertForSequenceClassification,
            )
        except ValueError as error:
            raise ModelError(str(error)) from None


@dataclass(frozen=True)
class FineTunedBundle:
    """A fine-tuned model in memory.

    Attributes:
        path: The model directory.
        info: The content of bertsmith.json.
        unused_weights: Names of stored tensors that this model does not have.
        task_overrides: Task settings that replace those in ``info``.
        max_seqlen: Number of tokens to which other libraries truncate inputs; None if it is not
            stored.
    """

    model: TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    head: HeadConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    unused_weights: tuple[str, ...] = ()
    task_overrides: Mapping[str, Any] = field(default_factory=dict)
    max_seqlen: int | None = None

    def notes(self) -> list[str]:
        """Return messages about unused weights and unused embedding rows."""
        notes = describe_names(self.path, "unused weights", self.unused_weights)
        return notes + describe_unused_rows(self.path, self.config, self.tokenizer)


def save_fine_tuned(
    directory: Path,
    model: TaskModel,
    tokenizer: Tokenizer,
    head: HeadConfig,
    info: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    max_seqlen: int | None = None,
    config_extras: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the directory of a fine-tuned model atomically, replacing an existing one.

    Args:
        directory: The directory to write.
        model: The model.
        tokenizer: The model's tokenizer.
        head: The model's task kind and labels.
        info: Content of bertsmith.json, such as provenance.
        dtype: The dtype of the stored weights.
        max_seqlen: Maximum tokens of an input, to which other toolkits truncate; None: the maximum
            of the model.
        config_extras: Keys of config.json that are added, or replace the values of the model.
    """
    hf_config = to_hf_config(model.config)
    if isinstance(model, BertWithBiLSTM):
        # No class of transformers has a BiLSTM. With this model_type, transformers rejects the
        # directory instead of loading only the encoder.
        hf_config |= {"model_type": "bertsmith", "bertsmith": hf_config.get("bertsmith", {})}
        info = {**info, "features": model.features.model_dump()}
    prefix = "Bert" if hf_config["model_type"] == "bert" else "Bertsmith"
    hf_config["architectures"] = [f"{prefix}For{HF_CLASS_SUFFIXES[head.kind]}"]
    hf_config["pad_token_id"] = tokenizer.pad_id
    if head.kind not in ("choice", "span"):
        labels = head.labels or ("score",)
        hf_config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        hf_config["label2id"] = {label: index for index, label in enumerate(labels)}
    if head.kind in _PROBLEM_TYPES:
        hf_config["problem_type"] = _PROBLEM_TYPES[head.kind]
    hf_config |= config_extras
    with atomic_directory(directory) as new:
        state = to_hf_state_dict(model.state_dict(), dtype)
        save_tensors(state, new / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / CONFIG_FILE, hf_config)
        write_json(
            new / INFO_FILE,
            {**info, "kind": head.kind, "positions": model.config.positions},
        )
        tokenizer.save(new, max_seqlen or model.config.max_positions)
        card_kind = RERANKING if info.get("task") == "rerank" else head.kind
        model_card = build_model_card(model.config, tokenizer, info, card_kind, head.labels)
        write_atomic(new / MODEL_CARD_FILE, model_card)


def load_fine_tuned(path: Path | str, *, device: torch.device | str = "cpu") -> FineTunedBundle:
    """Load a fine-tuned model in eval mode.

    Args:
        path: A model directory, a run directory, a file of a model directory, the name of a
            reference model, or a hub id.
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
        features = BiLSTMSettings.parse(feature_values, str(directory / INFO_FILE))
    model, unused = build_with_weights(lambda: head.build_model(config, features), weights)
    reject_pairs(model.bert, directory)
    return FineTunedBundle(
        model.to(device).eval(),
        tokenizer,
        config,
        head,
        directory,
        info,
        unused,
        max_seqlen=read_max_seqlen(directory, config),
    )


def load_for_fine_tuning(
    path: Path | str,
    head: HeadConfig,
    config_overrides: Mapping[str, Any] | None = None,
    features: BiLSTMSettings | None = None,
    *,
    keep_head: bool = False,
) -> FineTunedBundle:
    """Load the encoder of any BERT and add a newly initialized head.

    A missing pooler is newly initialized too. ``info["newly_initialized"]`` contains the names of
    all newly initialized weights.

    Args:
        path: A model directory, a run directory, a file of a model directory, the name of a
            reference model, or a hub id.
        head: Task kind and labels of the new head.
        config_overrides: ``ModelConfig`` fields to replace, such as dropout.
        features: Settings of a BiLSTM between the encoder and the output layer; None for no BiLSTM.
        keep_head: Whether to load the stored head if it has the same kind and labels, and neither
            model has a BiLSTM.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
    """
    directory = locate_model(path)
    info, config, tokenizer = read_metadata(directory)
    weights = open_weights(directory, config)
    config = ModelConfig.parse(config.model_dump() | dict(config_overrides or {}), "the settings")
    # Initializing all weights of a large encoder takes seconds. On the meta device nothing is
    # initialized, and the new layers are initialized below. Models with a BiLSTM initialize all of
    # their weights here.
    with torch.device("meta" if features is None else "cpu"):
        model = head.build_model(config, features)
    parameter_names = set(model.state_dict())
    head_names = {name for name in parameter_names if not name.startswith(("bert.", "pooler."))}
    # The output layer of a BiLSTM has other inputs than that of a model without one.
    has_same_layers = features is None and not info.get("features")
    if keep_head and has_same_layers and is_fine_tuned(directory):
        head_names = set() if _read_head(directory, info) == head else head_names
    pooler_names = {name for name in parameter_names if name.startswith("pooler.")}
    # A head of another task is not loaded.
    stored = match_weights(model, weights, pooler_names, excluded=head_names)
    new_names = sorted(parameter_names - set(stored))
    if features is None:
        model = allocate_on_cpu(model, directory)
        for module_name in sorted({name.rpartition(".")[0] for name in new_names}):
            initialize_weights(model.get_submodule(module_name), config.init_range)
    unused = copy_weights(model, stored, weights)
    info = {**info, "newly_initialized": new_names}
    max_seqlen = read_max_seqlen(directory, config)
    return FineTunedBundle(
        model, tokenizer, config, head, directory, info, unused, max_seqlen=max_seqlen
    )


def _read_head(directory: Path, info: Mapping[str, Any]) -> HeadConfig:
    """Return the task kind and the labels of a model.

    Args:
        directory: The model directory, with config.json.
        info: Content of bertsmith.json.
    """
    kind = require_task_kind(directory)
    hf_config = read_json(directory / CONFIG_FILE)
    if kind in ("choice", "span"):
        return HeadConfig(kind)
    labels = _read_labels(hf_config, directory / CONFIG_FILE)
    if kind == "single":
        kind = _find_sequence_kind(hf_config.get("problem_type"), labels)
    elif info.get("kind") == "tags" or not _has_bio_tags(labels):
        kind = "tags"
    # The label of a single score has no meaning.
    if kind == "regression" and len(labels) == 1:
        return HeadConfig(kind)
    return HeadConfig(kind, labels)


def _find_sequence_kind(problem_type: object, labels: Sequence[str]) -> TaskKind:
    """Return the kind of a sequence classification model from config.json's ``problem_type``.

    Without a known ``problem_type``, a model with one label is a regression model.
    """
    for kind, name in _PROBLEM_TYPES.items():
        if name == problem_type:
            return kind
    return "regression" if len(labels) == 1 else "single"


def _has_bio_tags(labels: Sequence[str]) -> bool:
    """Return whether the labels are BIO tags, such as B-PER, or only B, I and O."""
    return {"B", "I"} <= set(labels) or any(label.startswith("B-") for label in labels)


def _read_labels(hf_config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the label of each output, from ``id2label`` in config.json.

    Without ``id2label`` there are as many labels as ``num_labels``, or two, as in transformers.
    """
    id2label = hf_config.get("id2label")
    if not id2label:
        num_labels = hf_config.get("num_labels")
        if type(num_labels) is not int or num_labels < 1:
            num_labels = 2
        if num_labels > _MAX_LABELS:
            raise ModelError(
                f"{path}: num_labels is {num_labels:,}, but the maximum is {_MAX_LABELS:,}; set it "
                "to the number of outputs of the model"
            )
        id2label = {str(index): f"LABEL_{index}" for index in range(num_labels)}
    is_valid = (
        isinstance(id2label, dict)
        and set(id2label) == {str(index) for index in range(len(id2label))}
        and all(isinstance(label, str) for label in id2label.values())
    )
    if not is_valid:
        raise ModelError(
            f'{path}: id2label is not valid; it must map "0", "1", "2" and so on to names'
        )
    return tuple(id2label[str(index)] for index in range(len(id2label)))
