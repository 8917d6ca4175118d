"""The ``embedding`` settings: training texts, loss, and output of a sentence-embedding model.

Importing this module does not load torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertsmith.errors import SettingsError
from bertsmith.model.config import PoolingMode
from bertsmith.settings import Settings, SettingsTable
from bertsmith.tasks.settings import Column

#: What a row of a table has: a text and its positive (and negatives), two texts and a similarity
#: score, a text and its class, or only a text.
ExampleKind = Literal["pairs", "scored_pairs", "labeled_texts", "texts"]
LossName = Literal["mnrl", "cosent", "cosine", "triplet", "tsdae"]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

#: The losses of each kind of examples; the first one is the default.
LOSSES: Final[dict[ExampleKind, tuple[LossName, ...]]] = {
    "pairs": ("mnrl", "triplet"),
    "scored_pairs": ("cosent", "cosine"),
    "labeled_texts": ("mnrl", "triplet"),
    "texts": ("mnrl", "tsdae"),
}
#: Settings that only some losses use, and these losses.
LOSSES_USING_SETTING: Final[dict[str, tuple[LossName, ...]]] = {
    "temperature": ("mnrl", "cosent"),
    "triplet_distance": ("triplet",),
    "triplet_margin": ("triplet",),
    "deletion_ratio": ("tsdae",),
    "max_score": ("cosine",),
}
#: Default maximum number of tokens of a text, if the start model does not specify one.
DEFAULT_MAX_SEQLEN: Final = 128
#: Default margin of the triplet loss: for distances of at most 2, which are the cosine distance and
#: the Euclidean distance of normalized vectors, and for other distances.
BOUNDED_MARGIN, UNBOUNDED_MARGIN = 0.5, 5.0


class TextColumns(Settings):
    """The columns of a table of texts. None: the row has no such value."""

    #: Column of the text: the anchor (query), or the first of two texts.
    text: Column | None = None
    #: Column of the positive, or of the second of two texts.
    pair: Column | None = None
    #: Columns of the negatives; a column may also hold a list of texts.
    negatives: list[Column] = Field(default_factory=list)
    #: Column of the similarity of the two texts.
    score: Column | None = None
    #: Column of the class of the text.
    label: Column | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Raise ValueError if a column occurs twice or two columns exclude each other."""
        columns = self.list_columns()
        for column in columns:
            if columns.count(column) > 1:
                raise ValueError(f"the column {column!r} is given twice; give different columns")
        if not columns:
            return self
        if self.text is None:
            raise ValueError("the column of the text is missing; set text (--text)")
        if self.score is not None and self.pair is None:
            raise ValueError("score needs the column of a second text; set pair (--pair)")
        if self.negatives and self.pair is None:
            raise ValueError("negatives need the column of the positive; set pair (--pair)")
        if self.negatives and self.score is not None:
            raise ValueError("negatives and score exclude each other; give one of them")
        if self.label is not None and self.pair is not None:
            raise ValueError("label and pair exclude each other; give one of them")
        return self

    def list_columns(self) -> list[str]:
        """Return the names of all columns."""
        single_columns = (self.text, self.pair, self.score, self.label)
        return [*(name for name in single_columns if name is not None), *self.negatives]

    @property
    def kind(self) -> ExampleKind:
        """The kind of examples that a row with these columns is."""
        if self.score is not None:
            return "scored_pairs"
        if self.pair is not None:
            return "pairs"
        return "texts" if self.label is None else "labeled_texts"


class EmbeddingSettings(SettingsTable):
    """Texts, loss and output of a sentence-embedding model."""

    table: ClassVar[str] = "embedding"

    #: Training tables. All have the same columns.
    train_files: list[str] = Field(default_factory=list)
    #: How many times each example of a training table is used per epoch; 0.5: a random half. Empty:
    #: once.
    file_weights: list[PositiveFloat] = Field(default_factory=list)
    #: Validation tables, or folders in BEIR's format, by name. With run.model_selection = "best",
    #: the first one selects the best checkpoint.
    validation_files: dict[str, str] = Field(default_factory=dict)
    #: Hash of all data files, computed when the run starts.
    fingerprint: str = ""
    #: Columns of the training tables. Without any, they are found by their standard names.
    columns: TextColumns = TextColumns()
    #: Columns of the validation tables. Without any, those of the training tables if the validation
    #: table has them, else standard names.
    validation_columns: TextColumns = TextColumns()
    #: Fraction of the training examples that is held out if there are no validation files.
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    #: Maximum number of training examples that are held out.
    max_validation_examples: Annotated[int, Field(ge=1)] = 1000
    #: Whether the first line of a table contains the column names; otherwise columns are numbered
    #: from 0.
    header: bool = True
    #: Text encoding of the files.
    encoding: str = "utf-8"
    #: Delimiter of CSV; "": detected.
    delimiter: str = ""
    #: Whether invalid rows are skipped and counted; otherwise an invalid row is an error.
    skip_invalid: bool = False
    #: `mnrl` (multiple negatives ranking, InfoNCE), `triplet`, `cosent`, `cosine` (squared error of
    #: the cosine) or `tsdae` (denoising autoencoder). None: mnrl, or cosent for scored pairs.
    loss: LossName | None = None
    #: mnrl, cosent: cosine similarities are divided by it. sentence-transformers has scale =
    #: 1 / temperature.
    temperature: PositiveFloat = 0.05
    #: triplet: 1 - cosine similarity, or the Euclidean distance.
    triplet_distance: Literal["cosine", "euclidean"] = "cosine"
    #: triplet: the negative is to be this much farther from the anchor than the positive. None:
    #: 0.5, or 5 for the Euclidean distance of vectors that are not normalized.
    triplet_margin: PositiveFloat | None = None
    #: tsdae: fraction of the words of a text that are deleted.
    deletion_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    #: cosine: the score of two texts of equal meaning; scores are divided by it.
    max_score: PositiveFloat = 1.0
    #: Matryoshka: numbers of first dimensions that have a loss, such as [384, 128, 64]. One of them
    #: is the width of the vectors.
    matryoshka_dims: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    #: Weight of the loss of each of these dimensions. Empty: 1.
    matryoshka_weights: list[PositiveFloat] = Field(default_factory=list)
    #: How token vectors are combined: `mean`, `cls`, `max` and so on. None: as the start model
    #: specifies, else mean.
    pooling: PoolingMode | None = None
    #: Whether vectors have length 1. None: as the start model specifies, else true.
    normalize: bool | None = None
    #: Prefix of every text. None: that of the start model.
    prompt: str | None = None
    #: Pairs: prefix of the anchors (queries), such as "query: ". None: `prompt`, or that of the
    #: start model.
    query_prompt: str | None = None
    #: Pairs: prefix of the positives and negatives (documents). None: `prompt`, or that of the
    #: start model.
    document_prompt: str | None = None
    #: Maximum tokens per text, including [CLS] and [SEP]. None: that of the start model, else 128.
    max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: Examples per optimizer step. Each pair has the other pairs of its batch as negatives.
    batch_size: Annotated[int, Field(ge=2)] = 64

    @model_validator(mode="after")
    def _check_lists_have_equal_length(self) -> Self:
        lists = (
            ("file_weights", self.file_weights, "train_files", self.train_files),
            ("matryoshka_weights", self.matryoshka_weights, "matryoshka_dims",
             self.matryoshka_dims),
        )  # fmt: skip
        for name, values, other_name, others in lists:
            if values and len(values) != len(others):
                raise ValueError(
                    f"{name} has {len(values)} values and {other_name} has {len(others)}; give "
                    "one for each"
                )
        if self.loss == "tsdae" and self.matryoshka_dims:
            raise ValueError(
                "matryoshka_dims has no effect on the loss tsdae; remove it, or use the loss mnrl"
            )
        if len(set(self.matryoshka_dims)) < len(self.matryoshka_dims):
            raise ValueError(f"matryoshka_dims has a duplicate: {self.matryoshka_dims}; remove it")
        return self

    def list_files(self) -> list[Path]:
        """Return all data files."""
        return [Path(file) for file in (*self.train_files, *self.validation_files.values())]


def check_loss_settings(
    settings: SettingsTable, losses_using_setting: Mapping[str, Sequence[str]]
) -> None:
    """Raise SettingsError if a setting without effect on the loss differs from its default.

    Args:
        settings: A table with the setting ``loss``.
        losses_using_setting: The names of such settings, and the losses that use them.
    """
    loss = vars(settings)["loss"]
    for name, losses in losses_using_setting.items():
        value = getattr(settings, name)
        if loss not in losses and value != type(settings).model_fields[name].default:
            raise SettingsError(
                f"{settings.table}.{name} is {value!r}, which has no effect on the loss {loss!r}; "
                f"leave it out, or use the loss {' or '.join(losses)}"
            )
