"""The task families (classify, answer, choose, tag) and the settings that each family uses."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle, TaskKind
from bertsmith.bundle.metadata import get_recorded_task
from bertsmith.compatibility import upgrade_settings
from bertsmith.errors import ModelError, SettingsError
from bertsmith.plurals import count_noun
from bertsmith.settings import get_table
from bertsmith.tasks import classification, multiple_choice, question_answering, tagging
from bertsmith.tasks.entities import find_non_entity_tags
from bertsmith.tasks.inputs import TaskFamily
from bertsmith.tasks.metrics import PER_LABEL_SCORES, parse_label_metric
from bertsmith.tasks.questions import has_question_rows
from bertsmith.tasks.settings import (
    FAMILY_DEFAULTS,
    SQUAD_FIELDS,
    TaskSettings,
    get_default_max_seqlen,
    get_family_name,
)
from bertsmith.tasks.text_files import UTF8, reject_ignored_settings

FAMILIES: dict[str, TaskFamily] = {
    "classify": classification,
    "answer": question_answering,
    "choose": multiple_choice,
    "tag": tagging,
}
#: Kinds of task with scores for each label.
_KINDS_WITH_LABEL_SCORES: tuple[TaskKind, ...] = ("single", "multi", "entities", "tags")
#: Field of ``TaskSettings`` -> the families that use it. All families use the fields that are not
#: listed.
_FAMILIES_USING_FIELD: dict[str, tuple[str, ...]] = {
    "pair_column": ("classify", "answer", "choose"),
    **dict.fromkeys(("header", "delimiter"), ("classify", "choose")),
    "id_column": ("classify", "choose", "tag"),
    **dict.fromkeys(("ending_columns", "label_file_suffix"), ("choose",)),
    **dict.fromkeys(("tag_level", "tagged_token", "context"), ("tag",)),
    **dict.fromkeys(("window_stride", "window_overlap", "max_question_length", "max_answer_length",
                     "null_threshold"), ("answer",)),
}  # fmt: skip
#: Fields of ``TaskSettings`` that only the kind "multi" uses, with their options.
_MULTI_LABEL_FIELDS = {
    "label_columns": " (--label-columns)", "label_separator": "",
    "label_threshold": " (--threshold)",
}  # fmt: skip


def get_family(kind: TaskKind) -> TaskFamily:
    """Return the family of a kind of task."""
    return FAMILIES[get_family_name(kind)]


def reject_unused_fields(
    kind: TaskKind,
    user_settings: Mapping[str, Any],
    files: Iterable[Path],
) -> None:
    """Raise SettingsError if the user set a field that has no effect.

    The kind of task does not use the field, or it does not apply to the format of any data file.

    Args:
        kind: The kind of task.
        user_settings: The ``TaskSettings`` fields that the user set.
        files: The data files.
    """
    family = get_family_name(kind)
    for name, value in user_settings.items():
        if value == TaskSettings.model_fields[name].get_default(call_default_factory=True):
            continue
        families = _FAMILIES_USING_FIELD.get(name, (family,))
        if family not in families:
            raise SettingsError(
                f"task.{name}: not used by {family}, only by {', '.join(families)}; remove it",
            )
        if name in _MULTI_LABEL_FIELDS and kind != "multi":
            raise SettingsError(
                f"task.{name}{_MULTI_LABEL_FIELDS[name]}: only for several labels per text (the "
                f"kind 'multi'), but the kind is {kind!r}; remove it"
            )
    if user_settings.get("label_column") and user_settings.get("label_columns"):
        raise SettingsError(
            "task.label_column (--label) and task.label_columns (--label-columns) both name the "
            "labels; give only one of them"
        )
    if (
        user_settings.get("window_stride") is not None
        and user_settings.get("window_overlap") is not None
    ):
        raise SettingsError(
            "task.window_stride and task.window_overlap both set the distance between "
            "windows of a context; give only one of them",
        )
    files = list(files)
    reject_ignored_settings("task", user_settings, files)
    for file in files:
        column_fields = sorted(user_settings.keys() & SQUAD_FIELDS.keys())
        if family == "answer" and column_fields and not has_question_rows(file):
            raise SettingsError(
                f"task.{column_fields[0]}: {file} has SQuAD's format, whose field names are fixed; "
                "remove the setting, or give one question per row in a file whose name ends in "
                ".jsonl or .parquet",
            )


def resolve_metrics(task: TaskSettings) -> list[str]:
    """Return ``task.metrics`` or, if the list is empty, the default metrics of the kind.

    Raises:
        SettingsError: A metric is unknown.
    """
    defaults, supported = get_family(task.kind).list_metrics(task)
    if task.kind in _KINDS_WITH_LABEL_SCORES:
        supported = (*supported, *(f"{score}:LABEL" for score in PER_LABEL_SCORES))
    for name in task.metrics:
        if name not in supported and not _is_label_metric(name, task):
            with_labels = f" with {count_noun(len(task.labels), 'label')}" if task.labels else ""
            raise SettingsError(
                f"task.metrics: {name!r} is not a metric of the kind {task.kind!r}{with_labels}; "
                f"supported are {', '.join(supported)}",
            )
    return task.metrics or list(defaults)


def _is_label_metric(name: str, task: TaskSettings) -> bool:
    """Return whether a metric is the score of one of the task's labels, such as "f1:LOC".

    Before the training file is read, the labels may be unknown; then any label is accepted.
    """
    score_and_label = parse_label_metric(name)
    if task.kind not in _KINDS_WITH_LABEL_SCORES or score_and_label is None:
        return False
    labels = set(task.labels)
    if task.kind == "entities":
        labels = {label[2:] for label in labels}
    return not labels or score_and_label[1] in labels


def _require_entity_tags(bundle: FineTunedBundle) -> None:
    """Raise ModelError if an entity model has a label that is not an entity tag."""
    if bundle.head.kind != "entities":
        return
    invalid_tags = find_non_entity_tags(bundle.head.labels)
    if invalid_tags:
        raise ModelError(
            f"{bundle.path}: the label {invalid_tags[0]!r} is not an entity tag; expected O, B-…, "
            "I-…; if it marks tokens outside entities, rename it to O in id2label of config.json",
        )


def get_task_settings(
    bundle: FineTunedBundle,
    overrides: Mapping[str, Any] | None = None,
) -> TaskSettings:
    """Return the task settings that a model was fine-tuned with.

    Args:
        bundle: A fine-tuned model.
        overrides: Fields of ``TaskSettings`` to replace.

    Raises:
        SettingsError: An override is invalid, or task.max_seqlen exceeds the model's maximum.
        ModelError: A label of an entity model is not an entity tag, or a regression model has
            several outputs.
    """
    _require_entity_tags(bundle)
    if bundle.head.kind == "regression" and bundle.head.num_outputs > 1:
        raise ModelError(
            f"{bundle.path}: this regression model has {bundle.head.num_outputs} outputs; only one "
            "output is supported"
        )
    overrides = upgrade_settings({**bundle.task_overrides, **(overrides or {})}, "task")
    recorded_settings = get_recorded_task(bundle.info)
    values = FAMILY_DEFAULTS.get(get_family_name(bundle.head.kind), {}).copy()
    reranking = get_table(get_table(bundle.info, "provenance"), "reranking")
    # Models trained with other tools, such as a CrossEncoder, have it in the tokenizer's config.
    other_max_seqlen = bundle.max_seqlen or bundle.config.max_positions
    values["max_seqlen"] = reranking.get("max_seqlen") or other_max_seqlen
    if bundle.head.kind == "span" and not recorded_settings:
        # Models trained with other tools get the default windows of transformers.
        length = min(get_default_max_seqlen(bundle.head.kind), other_max_seqlen)
        overlap = min(question_answering.DEFAULT_WINDOW_OVERLAP, length // 2)
        values |= {"max_seqlen": length, "window_overlap": overlap}
    values |= recorded_settings
    heldout_metrics = bundle.info.get("heldout_metrics", {})
    if "null_threshold" in heldout_metrics:
        # The threshold was tuned on the validation file and is stored with that file's metrics.
        values["null_threshold"] = heldout_metrics["null_threshold"]
    values["labels"] = list(bundle.head.labels)
    # The format of the training files does not apply to other files.
    values |= {"skip_invalid": False, "encoding": UTF8, "delimiter": ""}
    if overrides.get("label_column") is not None:
        values["label_columns"] = []
    if overrides.get("window_stride") is not None:
        values["window_overlap"] = None
    values |= {"kind": bundle.head.kind, **overrides}
    task = TaskSettings.parse(values, "the model")
    if task.max_seqlen is not None:
        bundle.config.check_max_seqlen("task.max_seqlen", task.max_seqlen)
    return task.model_copy(update={"metrics": resolve_metrics(task)})
