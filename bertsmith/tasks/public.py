"""Files, columns, labels and metrics of public benchmark tasks.

GLUE: Wang et al. 2018 (arXiv:1804.07461), with the metrics of its table 1. NSMC: Naver sentiment
movie corpus. KorSTS: Ham et al. 2020 (arXiv:2004.03289). CoNLL-2003: Tjong Kim Sang and De Meulder
2003. KLUE: Park et al. 2021 (arXiv:2105.09680). SQuAD: Rajpurkar et al. 2016 (arXiv:1606.05250)
and 2018 (arXiv:1806.03822). SWAG: Zellers et al. 2018 (arXiv:1808.05326). CODAH: Chen et al. 2019
(arXiv:1904.04365). ComVE: Wang et al. 2020 (arXiv:2007.00236), subtask B.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings


@dataclass(frozen=True, kw_only=True)
class PublicTask:
    """A public benchmark task.

    Attributes:
        fixed_settings: Values of ``TaskSettings`` fields. The first metric selects the best
            checkpoint.
        train_file: Name of the training file.
        dev_files: Validation files by name. The first one selects the best checkpoint.
        test_file: The unlabeled test file, None if there is none.
        test_settings: ``TaskSettings`` fields that differ in the test file.
    """

    fixed_settings: Mapping[str, Any]
    train_file: str = "train.tsv"
    dev_files: Mapping[str, str] = field(default_factory=lambda: {"dev": "dev.tsv"})
    test_file: str | None = "test.tsv"
    test_settings: Mapping[str, Any] = field(default_factory=dict)

    def resolve_settings(self, path: Path) -> dict[str, Any]:
        """Return the ``TaskSettings`` fields for the task's files.

        Args:
            path: The folder with the files, or a training file. Part of a single training file is
            held out for validation.
        """
        if path.is_file():
            return {
                "train_file": str(path.resolve()),
                "validation_files": {},
                **self.fixed_settings,
            }
        dev_files = {name: str((path / file).resolve()) for name, file in self.dev_files.items()}
        train_file = str((path / self.train_file).resolve())
        return {"train_file": train_file, "validation_files": dev_files, **self.fixed_settings}

    def describe_expected_data(self, name: str) -> str:
        """Return a message that describes the expected value of ``--data``."""
        files = " and ".join([self.train_file, *self.dev_files.values()])
        return f"{name} expects a folder with {files}, or its training file"

    def parse_test_settings(self) -> TaskSettings:
        """Return the settings for reading the test file, which always has a header."""
        values = {**self.fixed_settings, "header": True, **self.test_settings}
        return TaskSettings.parse(values, "the task")


_ENTAILMENT_LABELS = ("entailment", "not_entailment")
_BINARY_LABELS = ("0", "1")


def _make_classification_settings(
    text: str,
    pair: str | None = None,
    *,
    label: str = "label",
    labels: tuple[str, ...] = _BINARY_LABELS,
    metrics: tuple[str, ...] = ("accuracy",),
    header: bool = True,
) -> dict[str, Any]:
    """Return the settings for classifying texts or text pairs.

    Args:
        text: Column of the text.
        pair: Column of the second text, None for single texts.
        label: Column of the label.
        labels: Labels in the order of the outputs.
        metrics: Names of the metrics.
        header: Whether the first line names the columns.
    """
    return {
        "kind": "single",
        "text_column": text,
        "pair_column": pair,
        "label_column": label,
        "labels": list(labels),
        "metrics": list(metrics),
        "header": header,
    }


_SIMILARITY_SETTINGS = {
    "kind": "regression",
    "text_column": "sentence1",
    "pair_column": "sentence2",
    "label_column": "score",
    "metrics": ["spearman", "pearson"],
}
_SQUAD_SETTINGS = {"kind": "span", **SQUAD_FIELDS, "metrics": ["f1", "exact"]}

_ENTITY_SETTINGS = {
    "kind": "entities",
    "text_column": "0",
    "metrics": ["f1", "precision", "recall"],
}
_CONLL_FILES: dict[str, Any] = {
    "train_file": "train.txt",
    "dev_files": {"dev": "valid.txt", "test": "test.txt"},
    "test_file": None,
}

PUBLIC_TASKS: dict[str, PublicTask] = {
    "cola": PublicTask(
        fixed_settings=_make_classification_settings(
            "3",
            label="1",
            header=False,
            metrics=("matthews", "accuracy"),
        ),
        test_settings={"text_column": "sentence"},
    ),
    "sst-2": PublicTask(fixed_settings=_make_classification_settings("sentence")),
    "mrpc": PublicTask(
        fixed_settings=_make_classification_settings(
            "#1 String",
            "#2 String",
            label="Quality",
            metrics=("f1", "accuracy"),
        ),
    ),
    "sts-b": PublicTask(fixed_settings=_SIMILARITY_SETTINGS),
    "qqp": PublicTask(
        # Some texts of the official training file have line breaks, so that their rows are split.
        fixed_settings={
            **_make_classification_settings(
                "question1",
                "question2",
                label="is_duplicate",
                metrics=("f1", "accuracy"),
            ),
            "skip_invalid": True,
        },
        # A submission needs all rows.
        test_settings={"skip_invalid": False},
    ),
    "mnli": PublicTask(
        fixed_settings=_make_classification_settings(
            "sentence1",
            "sentence2",
            label="gold_label",
            labels=("contradiction", "entailment", "neutral"),
        ),
        dev_files={"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
        test_file="test_matched.tsv",
    ),
    "qnli": PublicTask(
        fixed_settings=_make_classification_settings(
            "question", "sentence", labels=_ENTAILMENT_LABELS
        )
    ),
    "rte": PublicTask(
        fixed_settings=_make_classification_settings(
            "sentence1", "sentence2", labels=_ENTAILMENT_LABELS
        )
    ),
    "wnli": PublicTask(fixed_settings=_make_classification_settings("sentence1", "sentence2")),
    # A few reviews have no text; they are skipped and reported.
    "nsmc": PublicTask(
        fixed_settings={**_make_classification_settings("document"), "skip_invalid": True},
        train_file="ratings_train.txt",
        dev_files={"test": "ratings_test.txt"},
        test_file=None,
    ),
    "korsts": PublicTask(
        fixed_settings={**_SIMILARITY_SETTINGS, "id_column": ""},
        train_file="sts-train.tsv",
        dev_files={"dev": "sts-dev.tsv"},
        test_file=None,
    ),
    "conll2003": PublicTask(
        fixed_settings={**_ENTITY_SETTINGS, "label_column": "3"}, **_CONLL_FILES
    ),
    "conll2003-pos": PublicTask(
        fixed_settings={
            "kind": "tags",
            "text_column": "0",
            "label_column": "1",
            "metrics": ["accuracy"],
        },
        **_CONLL_FILES,
    ),
    "klue-ner": PublicTask(
        fixed_settings={**_ENTITY_SETTINGS, "label_column": "1", "tag_level": "character"},
        train_file="klue-ner-v1.1_train.tsv",
        dev_files={"dev": "klue-ner-v1.1_dev.tsv"},
        test_file=None,
    ),
    "squad": PublicTask(
        fixed_settings=_SQUAD_SETTINGS,
        train_file="train-v1.1.json",
        dev_files={"dev": "dev-v1.1.json"},
        test_file=None,
    ),
    "squad2": PublicTask(
        fixed_settings=_SQUAD_SETTINGS,
        train_file="train-v2.0.json",
        dev_files={"dev": "dev-v2.0.json"},
        test_file=None,
    ),
    "swag": PublicTask(
        fixed_settings={
            "kind": "choice",
            "text_column": "sent1",
            "pair_column": "sent2",
            "label_column": "label",
            "metrics": ["accuracy"],
            "ending_columns": ["ending0", "ending1", "ending2", "ending3"],
        },
        train_file="train.csv",
        dev_files={"val": "val.csv"},
        test_file=None,
    ),
    # CODAH has a single file. A fifth of it is held out; task.validation_fold (0 to 4) selects the
    # fifth.
    "codah": PublicTask(
        fixed_settings={
            "kind": "choice",
            "text_column": "1",
            "ending_columns": ["2", "3", "4", "5"],
            "label_column": "6",
            "header": False,
            "validation_fraction": 0.2,
            "metrics": ["accuracy"],
        },
        train_file="full_data.tsv",
        dev_files={},
        test_file=None,
    ),
    # Three rows of the training table have no third ending; they are skipped and reported.
    "comve-b": PublicTask(
        fixed_settings={
            "kind": "choice",
            "text_column": "FalseSent",
            "ending_columns": ["OptionA", "OptionB", "OptionC"],
            "label_file_suffix": "-answers",
            "skip_invalid": True,
            "metrics": ["accuracy"],
        },
        train_file="train.csv",
        dev_files={"dev": "dev.csv"},
        test_file=None,
    ),
}

#: Names of the folders in which users store public tasks, in order of preference.
PUBLIC_TASK_FOLDERS: dict[str, tuple[str, ...]] = {
    "cola": ("CoLA", "glue/CoLA"),
    "sst-2": ("SST-2", "glue/SST-2"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "sts-b": ("STS-B", "glue/STS-B"),
    "qqp": ("QQP", "glue/QQP"),
    "mnli": ("MNLI", "glue/MNLI"),
    "qnli": ("QNLI", "glue/QNLI"),
    "rte": ("RTE", "glue/RTE"),
    "nsmc": ("nsmc", "NSMC", "korean/nsmc"),
    "korsts": ("KorSTS", "korean/KorSTS"),
    "conll2003": ("conll2003", "CoNLL-2003"),
    "klue-ner": ("klue-ner", "klue-ner-v1.1", "korean/klue-ner"),
    "squad": ("squad", "SQuAD"),
}


def find_task_folder(data: Path, name: str) -> Path | None:
    """Return the folder of a public task in a data folder, None if there is none."""
    folders = (data / folder for folder in PUBLIC_TASK_FOLDERS[name])
    return next((folder for folder in folders if folder.is_dir()), None)
