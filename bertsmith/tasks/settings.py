"""The ``task`` settings: files, columns, and how text is encoded."""

import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bertsmith.bundle import TaskKind
from bertsmith.settings import SettingsTable
from bertsmith.text.archives import COMPRESSION_SUFFIXES

#: ``TaskSettings`` field -> its name in SQuAD's format, also the default in files with one question
#: per row.
SQUAD_FIELDS = {"text_column": "question", "pair_column": "context", "label_column": "answers"}
#: The kinds of each task family; the first one is the default.
FAMILY_KINDS: dict[str, tuple[TaskKind, ...]] = {
    "classify": ("single", "multi", "regression"),
    "answer": ("span",),
    "choose": ("choice",),
    "tag": ("entities", "tags"),
}
#: Default maximum number of tokens of an input. Those of run_squad.py (answer) and
#: run_classifier.py in the original BERT code.
_DEFAULT_MAX_SEQLENS = {"classify": 128, "answer": 384, "choose": 128, "tag": 128}
#: Defaults of ``TaskSettings`` fields that differ in a family.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "answer": SQUAD_FIELDS,
    "tag": {"text_column": "0", "label_column": "-1"},
}


def _convert_column(value: Any) -> Any:
    """Convert an integer column number to text."""
    return str(value) if type(value) is int else value


#: A column name, or a column number for files without a header.
Column = Annotated[str, BeforeValidator(_convert_column)]


def is_column_number(name: str) -> bool:
    """Return whether a column is given by number: from 0, or negative from the end."""
    return name.removeprefix("-").isdecimal()


def get_family_name(kind: TaskKind) -> str:
    """Return the name of the family of a kind of task."""
    return next(name for name, kinds in FAMILY_KINDS.items() if kind in kinds)


def get_default_max_seqlen(kind: TaskKind) -> int:
    """Return the default maximum number of tokens of an input for a kind of task."""
    return _DEFAULT_MAX_SEQLENS[get_family_name(kind)]


class TaskSettings(SettingsTable):
    """Task, data files, and how text is encoded."""

    table: ClassVar[str] = "task"

    #: A public task, or a family for custom files.
    name: str = "classify"
    #: What is predicted. classify: `single` (one label), `multi` (several) or `regression` (a
    #: number); tag: `entities` or `tags`; answer: `span`; choose: `choice`.
    kind: TaskKind = "single"
    #: Labels in the order of the outputs; collected from the training file if empty.
    labels: list[str] = Field(default_factory=list)
    #: Training file.
    train_file: str = ""
    #: Validation files by name. With run.model_selection = "best", the first one selects the best
    #: checkpoint.
    validation_files: dict[str, str] = Field(default_factory=dict)
    #: Hash of all data files, computed when the run starts.
    fingerprint: str = ""
    #: Maximum number of training examples, None for all.
    max_train_examples: Annotated[int, Field(ge=2)] | None = None
    #: With max_train_examples: a random subset of the training file, or its first examples. With
    #: document context, whole documents are drawn; the last one may be cut.
    train_subset: Literal["random", "first"] = "random"
    #: Seed of the random subset.
    train_subset_seed: Annotated[int, Field(ge=0)] = 0
    #: Fraction of the training file that is held out for validation if there are no validation
    #: files.
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    #: Index of the part of the training file that is held out, from 0 (the cross-validation fold).
    validation_fold: Annotated[int, Field(ge=0)] = 0
    #: Column of the text (answer: question; choose: prompt; tag: the words). Columns of CoNLL files
    #: are numbers.
    text_column: Column = "text"
    #: Column of a second text (answer: context; choose: the start of each ending).
    pair_column: Column | None = None
    #: Column of the label (answer: the answers; choose: the correct ending).
    label_column: Column = "label"
    #: kind multi: a column of 0 and 1 for each label, instead of label_column. The names of the
    #: columns are the labels.
    label_columns: list[Column] = Field(default_factory=list)
    #: kind multi: separates the labels in a cell of text of label_column.
    label_separator: Annotated[str, Field(min_length=1)] = "|"
    #: kind multi: a label is predicted if its probability is higher than this.
    label_threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    #: Column of the row ids, which must be unique; "" if there is no such column.
    id_column: Column = "id"
    #: Whether the first line of a table contains the column names; otherwise columns are numbered
    #: from 0.
    header: bool = True
    #: Text encoding of the files.
    encoding: str = "utf-8"
    #: Delimiter of CSV; "": detected.
    delimiter: str = ""
    #: choose: one column for each ending, or a single column of lists.
    ending_columns: list[Column] = Field(default_factory=list)
    #: choose: suffix of the name of a separate file with "id,label" rows; "" if the label is a
    #: column.
    label_file_suffix: str = ""
    #: tag: whether a tag belongs to a word or to a character. In plain text, each Chinese or
    #: Japanese character is a word.
    tag_level: Literal["word", "character"] = "word"
    #: tag: whether the first or the last token of a word predicts its tag. None: the first one
    #: (section 5.3 of the paper), or the last one if attention is causal.
    tagged_token: Literal["first", "last"] | None = None
    #: tag: whether an input is a single sentence, or is filled with the neighboring sentences of
    #: its document. In tables, consecutive rows with the same "document" form a document.
    context: Literal["sentence", "document"] = "sentence"
    #: Validation metrics. The first one selects the best run of several and, with
    #: run.model_selection = "best", the best checkpoint. Empty: the defaults of the kind.
    metrics: list[str] = Field(default_factory=list)
    #: Maximum tokens per input, including [CLS] and [SEP]. Longer texts are truncated, or split
    #: into windows (answer). None: the default of the family, limited by the model.
    max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: answer: tokens between the starts of consecutive windows of a long context (``doc_stride`` in
    #: the original run_squad.py).
    window_stride: Annotated[int, Field(ge=1)] = 128
    #: answer: tokens shared by consecutive windows (``doc_stride`` or ``stride`` in transformers).
    #: If set, ``window_stride`` is ignored, and a span may come from any window, not only from the
    #: one with the most context around its first token.
    window_overlap: Annotated[int, Field(ge=0)] | None = None
    #: answer: maximum tokens of a question; longer ones are truncated.
    max_question_length: Annotated[int, Field(ge=1)] = 64
    #: answer: maximum tokens of a predicted answer.
    max_answer_length: Annotated[int, Field(ge=1)] = 30
    #: answer: no answer is predicted if the score of no answer exceeds that of the best span by
    #: more than this. None: tuned on the validation file, or infinite if all its questions have
    #: answers.
    null_threshold: float | None = None
    #: Examples per optimizer step.
    batch_size: Annotated[int, Field(ge=1)] = 32
    #: Whether invalid rows are skipped and counted; otherwise an invalid row is an error.
    skip_invalid: bool = False
    #: "balanced": examples are weighted inversely to the frequency of their label.
    class_weights: Literal["none", "balanced"] = "none"

    @model_validator(mode="after")
    def _check_null_threshold(self) -> Self:
        if self.null_threshold is not None and math.isnan(self.null_threshold):
            raise ValueError(
                "null_threshold is NaN; give a number, or inf to always predict a span",
            )
        return self

    @model_validator(mode="after")
    def _check_names_differ(self) -> Self:
        columns = {"text": self.text_column, "pair": self.pair_column, "label": self.label_column}
        if self.label_file_suffix or self.label_columns:
            # The labels are in a separate file or in other columns.
            del columns["label"]
        columns |= {f"the label {name!r}": name for name in self.label_columns}
        for (role, column), (other_role, other_column) in combinations(columns.items(), 2):
            if column == other_column:
                raise ValueError(
                    f"the column {column!r} is both {role} and {other_role}; give different columns"
                )
        for field, noun in (("labels", "label"), ("label_columns", "column")):
            for name, count in Counter(getattr(self, field)).items():
                if count > 1:
                    raise ValueError(f"{field} has {name!r} twice; give each {noun} once")
        if len(self.label_columns) == 1:
            raise ValueError(
                "label_columns has one column; give at least two, or select the column with "
                "label_column (--label)"
            )
        for column in self.ending_columns:
            if self.ending_columns.count(column) > 1:
                raise ValueError(
                    f"the column {column!r} is given for several endings; give different columns"
                )
        return self

    def get_label_file(self, path: Path) -> Path | None:
        """Return the file with the labels of the table ``path``, None if they are a column.

        The suffix is added to the name without its endings: the labels of train.csv.gz are in
        train-answers.csv.gz.
        """
        if not self.label_file_suffix:
            return None
        end = path.suffix if path.suffix.lower() in COMPRESSION_SUFFIXES else ""
        table = Path(path.name.removesuffix(end))
        return path.with_name(f"{table.stem}{self.label_file_suffix}{table.suffix}{end}")

    def list_files(self) -> list[Path]:
        """Return all data files, including the separate files with labels."""
        tables = [Path(file) for file in (self.train_file, *self.validation_files.values())]
        label_files = [self.get_label_file(table) for table in tables]
        return tables + [file for file in label_files if file is not None]
