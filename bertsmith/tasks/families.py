"""The families of tasks by what their models say.

It never knows how any of them works.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle, TaskKind
from bertsmith.errors import ModelError, SettingsError
from bertsmith.tasks import classification, multiple_choice, question_answering, tagging
from bertsmith.tasks.entities import find_invalid_tags
from bertsmith.tasks.inputs import TaskFamily
from bertsmith.tasks.metrics import PER_LABEL_SCORES, parse_label_metric
from bertsmith.tasks.questions import is_flat_file
from bertsmith.tasks.settings import FAMILY_DEFAULTS, FAMILY_KINDS, SQUAD_FIELDS, TaskSettings
from bertsmith.tasks.text_files import UTF8

FAMILIES: dict[str, TaskFamily] = {
    "classify": classification,
    "answer": question_answering,
    "choose": multiple_choice,
    "tag": tagging,
}
#: Kinds that have scores of each label.
_OF_LABELS: tuple[TaskKind, ...] = ("single", "multi", "entities", "tags")
#: Fields of ``TaskSettings`` that not every family reads, and those that do.
_READ_BY: dict[str, tuple[str, ...]] = {
    "pair": ("classify", "answer", "choose"),
    **dict.fromkeys(("header", "delimiter"), ("classify", "choose")),
    "id": ("classify", "choose", "tag"),
    **dict.fromkeys(("endings", "answers"), ("choose",)),
    **dict.fromkeys(("unit", "context"), ("tag",)),
    **dict.fromkeys(("stride", "overlap", "max_question_length", "max_answer_length", "null_threshold"),
                    ("answer",)),
}  # fmt: skip


def get_family_name(kind: TaskKind) -> str:
    """Return the name of the family of a kind of task."""
    return next(name for name, kinds in FAMILY_KINDS.items() if kind in kinds)


def get_family(kind: TaskKind) -> TaskFamily:
    """Return the family of a kind of task."""
    return FAMILIES[get_family_name(kind)]


def reject_unused_fields(
    kind: TaskKind, user_settings: Mapping[str, Any], files: Iterable[Path]
) -> None:
    """Raise SettingsError for a field of a task that was said and that nothing would read.

    files: the task's tables.
    """
    family = get_family_name(kind)
    for name, value in user_settings.items():
        readers = _READ_BY.get(name, (family,))
        if family not in readers and value != TaskSettings.model_fields[name].default:
            raise SettingsError(
                f"task.{name}: {family} does not read it, only {', '.join(readers)}; leave it out"
            )
    if user_settings.get("stride") is not None and user_settings.get("overlap") is not None:
        raise SettingsError(
            "task.stride and task.overlap both say how windows of a context follow each other; "
            "give only one of them"
        )
    for file in files:
        named = sorted(user_settings.keys() & SQUAD_FIELDS.keys())
        if family == "answer" and named and not is_flat_file(file):
            raise SettingsError(
                f"task.{named[0]}: the fields of SQuAD's form, as in {file}, have names of their "
                "own; leave it out, or give questions in a file whose name ends in .jsonl or "
                ".parquet"
            )


def resolve_metrics(task: TaskSettings) -> list[str]:
    """Return the metrics that are asked for, or the usual ones; SettingsError for unknown ones."""
    usual, known = get_family(task.kind).list_metrics(task)
    if task.kind in _OF_LABELS:
        known = (*known, *(f"{score}:LABEL" for score in PER_LABEL_SCORES))
    for name in task.metrics:
        if name not in known and not _is_label_metric(name, task):
            raise SettingsError(
                f"task.metrics: {name!r} is no metric of the kind {task.kind!r}"
                + (f" with {len(task.labels)} labels" if task.labels else "")
                + f"; known are {', '.join(known)}"
            )
    return task.metrics or list(usual)


def _is_label_metric(name: str, task: TaskSettings) -> bool:
    """Tell whether a metric is a score of one label, such as "f1:LOC", that the task has.

    Before the training file is read, its labels are not known.
    """
    found = parse_label_metric(name)
    if task.kind not in _OF_LABELS or found is None:
        return False
    labels = set(task.labels)
    if task.kind == "entities":
        labels = {label[2:] for label in labels}
    return not labels or found[1] in labels


def get_task_settings(
    bundle: FineTunedBundle, overrides: Mapping[str, Any] | None = None
) -> TaskSettings:
    """Return how the files were read that a model was fine-tuned on, as far as it is known.

    ``overrides``: fields of ``TaskSettings`` that are to be others. Raises SettingsError,
    and ModelError where a model of entities has labels that are none of theirs.
    """
    wrong = find_invalid_tags(bundle.head.labels) if bundle.head.kind == "entities" else []
    if wrong:
        raise ModelError(
            f"{bundle.path}: the label {wrong[0]!r} is no entity's tag; expected O, B-…, I-…; if "
            "it marks nothing, name it O in id2label of config.json"
        )
    said = bundle.info.get("provenance", {}).get("task", {})
    # What the held-out file has tuned is a figure of the run.
    tuned = {name: value for name, value in bundle.info.get("heldout", {}).items()
             if name == "null_threshold"}  # fmt: skip
    usual = {
        **FAMILY_DEFAULTS.get(get_family_name(bundle.head.kind), {}),
        "length": bundle.config.max_positions,
    }
    if bundle.head.kind == "span" and not said:
        # Made elsewhere: windows as transformers cuts them where nothing is said.
        length = min(question_answering.DEFAULT_LENGTH, bundle.config.max_positions)
        usual |= {"length": length, "overlap": min(question_answering.DEFAULT_OVERLAP, length // 2)}
    base = {**usual, **said, **tuned, "labels": list(bundle.head.labels)}
    # How the training files were written says nothing of other files.
    base |= {"skip_bad": False, "encoding": UTF8, "delimiter": ""}
    if overrides and overrides.get("stride") is not None:
        base["overlap"] = None
    task = TaskSettings.parse({**base, "kind": bundle.head.kind, **(overrides or {})}, "the model")
    return task.model_copy(update={"metrics": resolve_metrics(task)})
