"""The ``reranking`` settings: training pairs and loss of a cross-encoder that orders documents.

Importing this module does not load torch.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import SettingsTable
from bertsmith.tasks.embedding_settings import PositiveFloat, TextColumns

LossName = Literal["bce", "ranknet", "margin_mse", "listnet", "mnrl"]
#: Default queries per optimizer step; pairs for the loss ``bce``.
DEFAULT_BATCH_SIZES: Final[dict[LossName, int]] = {
    "bce": 32, "ranknet": 16, "margin_mse": 16, "listnet": 16, "mnrl": 16
}  # fmt: skip
#: Default maximum number of tokens of a query and a document.
DEFAULT_MAX_SEQLEN: Final = 512
#: Default number of random negatives if the training data have no negatives.
DEFAULT_RANDOM_NEGATIVES: Final = 4
#: Settings that only some losses use, and these losses.
LOSSES_USING_SETTING: Final[dict[str, tuple[LossName, ...]]] = {
    "max_score": ("bce",),
    "positive_weight": ("bce",),
    "temperature": ("mnrl",),
    "max_documents": ("ranknet", "margin_mse", "listnet", "mnrl"),
}


class RerankingSettings(SettingsTable):
    """Pairs of a query and a document, and the loss of a reranker."""

    table: ClassVar[str] = "reranking"

    #: Training tables.
    train_files: list[str] = Field(default_factory=list)
    #: Validation tables by name. With run.model_selection = "best", the first one selects the best
    #: checkpoint.
    validation_files: dict[str, str] = Field(default_factory=dict)
    #: Hash of all data files, computed when the run starts.
    fingerprint: str = ""
    #: Columns of the training tables: `text` is the query and `pair` the document. Without any,
    #: they are found by their standard names.
    columns: TextColumns = TextColumns()
    #: Columns of the validation tables. Without any, those of the training tables if the validation
    #: table has them, else standard names.
    validation_columns: TextColumns = TextColumns()
    #: Fraction of the queries that is held out if there are no validation files.
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    #: Maximum number of queries that are held out.
    max_validation_queries: Annotated[int, Field(ge=1)] = 1000
    #: Whether the first line of a table contains the column names; otherwise columns are numbered
    #: from 0.
    header: bool = True
    #: Text encoding of the files.
    encoding: str = "utf-8"
    #: Delimiter of CSV; "": detected.
    delimiter: str = ""
    #: Whether invalid rows are skipped and counted; otherwise an invalid row is an error.
    skip_invalid: bool = False
    #: Pointwise: `bce` (binary cross-entropy). Pairwise: `ranknet` or `margin_mse`. Listwise:
    #: `listnet` or `mnrl` (multiple negatives ranking).
    loss: LossName = "bce"
    #: bce: the score of a perfect document; scores are divided by it.
    max_score: PositiveFloat = 1.0
    #: bce: weight of relevant documents in the loss, such as the number of negatives per positive.
    positive_weight: PositiveFloat = 1.0
    #: mnrl: probabilities of relevance are divided by it. sentence-transformers has scale = 1 /
    #: temperature.
    temperature: PositiveFloat = 0.1
    #: Documents with a higher score are relevant, for mnrl, random negatives, MRR and MAP.
    relevance_threshold: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    #: Random documents of other queries that are added to each query with a relevant document in
    #: each step, with the score 0 (to each relevant pair for bce). None: 4 if all documents of the
    #: training data are relevant, else 0.
    random_negatives: Annotated[int, Field(ge=0)] | None = None
    #: Documents of a query in a step, without random negatives. Of more documents, one with the
    #: highest score, one with the lowest, and random others are used.
    max_documents: Annotated[int, Field(ge=2)] = 16
    #: Maximum tokens of a query and a document, including [CLS] and two [SEP]. None: 512, limited
    #: by the model.
    max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: Queries per optimizer step, with all their documents; pairs for bce. None: 16 queries or 32
    #: pairs.
    batch_size: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for name, columns in (
            ("columns", self.columns),
            ("validation_columns", self.validation_columns),
        ):
            if columns.label is not None:
                raise ValueError(
                    f"{name}.label is {columns.label!r}, but the relevance of a document is its "
                    "score; set score (--score)"
                )
            if columns.list_columns() and columns.pair is None:
                raise ValueError(f"{name} has no column of the document; set pair (--pair)")
        return self

    def list_files(self) -> list[Path]:
        """Return all data files."""
        return [Path(file) for file in (*self.train_files, *self.validation_files.values())]

    def get_batch_size(self) -> int:
        """Return the batch size, or the default of the loss."""
        return self.batch_size or DEFAULT_BATCH_SIZES[self.loss]
