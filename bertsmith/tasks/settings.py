"""The settings of a task: its files and columns, and how a text becomes an input.

It never knows how a run trains.
"""

import math
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bertsmith.bundle import TaskKind
from bertsmith.settings import SettingsTable

#: What its fields are called in SQuAD's form, and in a flat file where nobody says: the question,
#: its context and its answers, as ``TaskSettings`` names columns.
SQUAD_FIELDS = {"text": "question", "pair": "context", "label": "answers"}
#: The kinds of each family; the first one where nobody says.
FAMILY_KINDS: dict[str, tuple[TaskKind, ...]] = {
    "classify": ("single", "multi", "regression"),
    "answer": ("span",),
    "choose": ("choice",),
    "tag": ("entities", "tags"),
}
#: Fields of ``TaskSettings`` that stand differently in a family: the fields of flat questions, the
#: columns of CoNLL's form.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "answer": SQUAD_FIELDS,
    "tag": {"text": "0", "label": "-1"},
}


def _named(value: Any) -> Any:
    return str(value) if type(value) is int else value


#: The name of a column; its number where columns have none, said as a number or as text.
Column = Annotated[str, BeforeValidator(_named)]


def is_column_number(name: str) -> bool:
    """Tell whether a column is said by its number, from 0, or from the end: -1."""
    return name.removeprefix("-").isdecimal()


class TaskSettings(SettingsTable):
    """Which task, where its data stands, and how a text becomes an input."""

    table: ClassVar[str] = "task"

    #: A public task's name, or a family with files of one's own.
    name: str = "classify"
    kind: TaskKind = "single"
    #: In the order of the outputs; resolved from the training file where nobody says them.
    labels: list[str] = Field(default_factory=list)
    train: str = ""
    #: Held-out files by name; the first one decides.
    heldout: dict[str, str] = Field(default_factory=dict)
    #: A hash of all these files; the run finds it out.
    fingerprint: str = ""
    #: Only so many of the training examples; None: all.
    examples: Annotated[int, Field(ge=2)] | None = None
    #: Which ones: a random subset, the same for each ``run.seed``, or the first ones of the file.
    #: Where documents are the context, whole documents are drawn, the last one up to the number.
    examples_draw: Literal["random", "first"] = "random"
    examples_seed: Annotated[int, Field(ge=0)] = 0
    #: The share of the training file that is held out where there is no held-out file, and which
    #: one of the 1/share that there are (for cross-validation).
    heldout_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    heldout_fold: Annotated[int, Field(ge=0)] = 0
    #: Columns: the text (a question, a prompt), a second text (answer: the context; choose: what
    #: each ending begins with), the label (the answers, the right ending). Of CoNLL's form they are
    #: numbers.
    text: Column = "text"
    pair: Column | None = None
    label: Column = "label"
    #: The column that names the rows, where there is one: no name may stand twice. "": no matter.
    id: Column = "id"
    header: bool = True
    #: Of the files: their encoding, and what separates the columns of CSV ("": detected).
    encoding: str = "utf-8"
    delimiter: str = ""
    #: choose: the columns of the endings, or the one whose cells are lists of them.
    endings: list[Column] = Field(default_factory=list)
    #: choose: how the name of the file goes on that holds "id,label" of each row; "" where the
    #: label is a column.
    answers: str = ""
    #: tag: what a tag belongs to, a word of a line or a single character.
    unit: Literal["word", "character"] = "word"
    #: tag: whether an input is a sentence alone or has its neighbours in the document around it;
    #: of tables, those rows that have the same value in a column "document".
    context: Literal["sentence", "document"] = "sentence"
    #: The first one decides which weights are the best. Empty: the usual ones of the kind.
    metrics: list[str] = Field(default_factory=list)
    #: Tokens of an input, [CLS] and [SEP] counted; what is longer is cut at its end (answer: comes
    #: in several windows). None: the family's own, or as many as the model takes.
    length: Annotated[int, Field(ge=8)] | None = None
    #: answer: tokens from the start of one window of a context to that of the next; the most tokens
    #: of a question and of an answer. The original's run_squad.py.
    stride: Annotated[int, Field(ge=1)] = 128
    #: answer: tokens that neighbouring windows of a context share, which transformers calls
    #: ``doc_stride`` or ``stride``. Where it is set, ``stride`` is not read, and a span may come
    #: from any window, not only from the one with the most context around its first token.
    overlap: Annotated[int, Field(ge=0)] | None = None
    max_question_length: Annotated[int, Field(ge=1)] = 64
    max_answer_length: Annotated[int, Field(ge=1)] = 30
    #: answer: by how much no answer must score more than the best span to be given. None: what the
    #: held-out file says is best, or, if each of its questions has an answer, never.
    null_threshold: float | None = None
    batch: Annotated[int, Field(ge=1)] = 32
    skip_bad: bool = False
    #: "balanced": an example counts the more, the rarer its label is.
    class_weights: Literal["none", "balanced"] = "none"

    @model_validator(mode="after")
    def _threshold_is_a_number(self) -> Self:
        if self.null_threshold is not None and math.isnan(self.null_threshold):
            raise ValueError("null_threshold is NaN; give a number, or inf to always give a span")
        return self

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        named = {"text": self.text, "pair": self.pair, "label": self.label}
        if self.answers:
            # In a file of its own.
            del named["label"]
        for (first, own), (second, other) in combinations(named.items(), 2):
            if own == other:
                raise ValueError(f"the column {own!r} is both {first} and {second}")
        return self

    def answers_file(self, path: Path) -> Path | None:
        """Return the file with the labels of the table ``path``; None where they are a column."""
        return path.with_stem(path.stem + self.answers) if self.answers else None

    def files(self) -> list[Path]:
        """Return every file of the task: tables, and those of their answers."""
        tables = [Path(file) for file in (self.train, *self.heldout.values())]
        answers = [self.answers_file(table) for table in tables]
        return tables + [file for file in answers if file is not None]
