"""The tasks of the panel, their measures, and the fine-tuning settings that all models share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.public import PUBLIC_TASK_FOLDERS, find_task_folder

#: How a task is evaluated: on unlabeled text, on minimal pairs, by fine-tuning, or by logistic
#: regression on frozen features.
Evaluation = Literal["held-out", "minimal-pairs", "finetune", "probe"]
#: Names that select several tasks: the fast tasks of a language, or the eight tasks of GLUE that
#: Devlin et al. report (without WNLI).
Group = Literal["english", "korean", "glue"]

#: Default peak learning rate, suited to models of width 256 to 512 with the epochs below. At higher
#: rates, small tasks depend on the seed. Larger models need a lower rate; the paper's range for
#: width 768 and more is 2e-5 to 5e-5.
LEARNING_RATE = 1e-4
#: Examples per fine-tuning step.
BATCH_SIZE = 32
#: Training examples of the frozen probe.
NUM_PROBE_EXAMPLES = 4000


@dataclass(frozen=True)
class Measure:
    """A number that a task yields, one row of the table.

    Attributes:
        key: The name in the result of a cell.
        label: The name in the table.
    """

    key: str
    label: str


@dataclass(frozen=True, kw_only=True)
class PanelTask:
    """A task of the panel.

    Attributes:
        name: The name on the command line.
        evaluation: How the task is evaluated.
        measures: The rows of the table.
        groups: The groups that the task belongs to, none for texts of the user.
        public_task: The name in ``PUBLIC_TASKS``, "" for texts of the user.
        max_train_examples: Maximum training examples, drawn at random for each seed; None for all.
        epochs: Fine-tuning epochs.
    """

    name: str
    evaluation: Evaluation
    measures: tuple[Measure, ...]
    groups: tuple[Group, ...] = ()
    public_task: str = ""
    max_train_examples: int | None = None
    epochs: float = 0.0

    @property
    def is_seeded(self) -> bool:
        """Whether the result depends on a seed."""
        return self.evaluation in ("finetune", "probe")

    @property
    def folders(self) -> tuple[str, ...]:
        """Possible subfolders of the data folder; none for texts of the user."""
        return PUBLIC_TASK_FOLDERS[self.public_task] if self.public_task else ()


_TASKS = (
    PanelTask(
        name="held-out",
        evaluation="held-out",
        measures=(
            Measure("mlm_loss", "held-out masked-LM loss, nats"),
            Measure("bits_per_character", "held-out bits per character"),
        ),
    ),
    PanelTask(
        name="minimal-pairs",
        evaluation="minimal-pairs",
        measures=(
            Measure("original", "minimal pairs, accuracy"),
            Measure("within_word", "minimal pairs, accuracy (within-word)"),
        ),
    ),
    PanelTask(
        name="sst-2-1k", evaluation="finetune", groups=("english",), public_task="sst-2",
        max_train_examples=1000, epochs=16,
        measures=(Measure("accuracy", "SST-2, 1,000 examples, accuracy"),),
    ),
    PanelTask(
        name="sst-2-10k", evaluation="finetune", groups=("english",), public_task="sst-2",
        max_train_examples=10_000, epochs=6,
        measures=(Measure("accuracy", "SST-2, 10,000 examples, accuracy"),),
    ),
    PanelTask(
        name="cola", evaluation="finetune", groups=("english", "glue"), public_task="cola",
        epochs=8, measures=(Measure("matthews", "CoLA, Matthews"),),
    ),
    PanelTask(
        name="mrpc", evaluation="finetune", groups=("english", "glue"), public_task="mrpc",
        epochs=8, measures=(Measure("f1", "MRPC, F1"), Measure("accuracy", "MRPC, accuracy")),
    ),
    PanelTask(
        name="rte", evaluation="finetune", groups=("english", "glue"), public_task="rte",
        epochs=8, measures=(Measure("accuracy", "RTE, accuracy"),),
    ),
    PanelTask(
        name="sts-b", evaluation="finetune", groups=("english", "glue"), public_task="sts-b",
        epochs=8, measures=(Measure("spearman", "STS-B, Spearman"),),
    ),
    PanelTask(
        name="sst-2", evaluation="finetune", groups=("glue",), public_task="sst-2",
        epochs=3, measures=(Measure("accuracy", "SST-2, accuracy"),),
    ),
    PanelTask(
        name="qnli", evaluation="finetune", groups=("glue",), public_task="qnli",
        epochs=3, measures=(Measure("accuracy", "QNLI, accuracy"),),
    ),
    PanelTask(
        name="qqp", evaluation="finetune", groups=("glue",), public_task="qqp",
        epochs=3, measures=(Measure("f1", "QQP, F1"), Measure("accuracy", "QQP, accuracy")),
    ),
    PanelTask(
        name="mnli", evaluation="finetune", groups=("glue",), public_task="mnli",
        epochs=3, measures=(Measure("accuracy", "MNLI matched, accuracy"),),
    ),
    PanelTask(
        name="conll2003", evaluation="finetune", groups=("english",), public_task="conll2003",
        epochs=6, measures=(Measure("f1", "CoNLL-2003, entity F1"),),
    ),
    PanelTask(
        name="probe", evaluation="probe", groups=("english",), public_task="sst-2",
        max_train_examples=NUM_PROBE_EXAMPLES,
        measures=(
            Measure("cls", "frozen [CLS], SST-2, accuracy"),
            Measure("mean", "frozen mean, SST-2, accuracy"),
        ),
    ),
    PanelTask(
        name="nsmc", evaluation="finetune", groups=("korean",), public_task="nsmc",
        max_train_examples=10_000, epochs=6, measures=(Measure("accuracy", "NSMC, accuracy"),),
    ),
    PanelTask(
        name="korsts", evaluation="finetune", groups=("korean",), public_task="korsts",
        epochs=8, measures=(Measure("spearman", "KorSTS, Spearman"),),
    ),
    PanelTask(
        name="klue-ner", evaluation="finetune", groups=("korean",), public_task="klue-ner",
        max_train_examples=10_000, epochs=6, measures=(Measure("f1", "KLUE-NER, entity F1"),),
    ),
)  # fmt: skip
#: The tasks by name, in the order of the table.
TASKS: dict[str, PanelTask] = {task.name: task for task in _TASKS}
GROUPS: tuple[Group, ...] = get_args(Group)


def select_tasks(
    names: Sequence[str], *, has_text: bool, has_minimal_pairs: bool
) -> list[PanelTask]:
    """Return the selected tasks in the order of the table.

    Args:
        names: Names of tasks or groups. A group also stands for the tasks on held-out text and
            minimal pairs if the user has specified them.
        has_text: Whether the user has specified a held-out text.
        has_minimal_pairs: Whether the user has specified minimal pairs.

    Raises:
        SettingsError: A name is unknown, or no task is selected.
    """
    selected = set()
    for name in names:
        if name in GROUPS:
            selected |= {task.name for task in _TASKS if name in task.groups}
            selected |= {"held-out"} if has_text else set()
            selected |= {"minimal-pairs"} if has_minimal_pairs else set()
        elif name in TASKS:
            selected.add(name)
        else:
            raise SettingsError(
                f"--tasks: unknown task {name!r}; expected: {', '.join((*GROUPS, *TASKS))}"
            )
    if not selected:
        raise SettingsError("--tasks: no task; name at least one, such as sst-2-1k")
    return [task for task in _TASKS if task.name in selected]


def split_by_data(
    tasks: Sequence[PanelTask], data: Path
) -> tuple[list[PanelTask], list[PanelTask]]:
    """Return the tasks that can run with a data folder, and those without a folder in it.

    Tasks on texts of the user need no folder.

    Raises:
        TaskError: No task can run.
    """
    missing = [
        task for task in tasks
        if task.public_task and find_task_folder(data, task.public_task) is None
    ]  # fmt: skip
    if len(missing) == len(tasks):
        folders = ", ".join(dict.fromkeys(task.folders[0] for task in tasks))
        raise TaskError(
            f"--data {data}: no folder of a task ({folders}); add at least one, or name other "
            "tasks with --tasks"
        )
    return [task for task in tasks if task not in missing], missing
