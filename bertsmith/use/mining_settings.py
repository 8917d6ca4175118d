"""Settings of mining hard negatives; does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bertsmith.settings import Settings
from bertsmith.tasks.embedding_settings import TextColumns

Margin = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Similarity = Annotated[float, Field(allow_inf_nan=False)]


class MiningSettings(Settings):
    """Which lines of an index are hard negatives of a query."""

    #: Columns of the table: `text` is the query and `pair` its positive. Without any, they are
    #: found by their standard names.
    columns: TextColumns = TextColumns()
    #: Whether the first line of a table contains the column names.
    header: bool = True
    #: Text encoding of the table.
    encoding: str = "utf-8"
    #: Delimiter of CSV; "": detected.
    delimiter: str = ""
    #: Whether invalid rows are skipped and counted; otherwise an invalid row is an error.
    skip_invalid: bool = False
    #: Maximum number of negatives of a query.
    num_negatives: Annotated[int, Field(ge=1)] = 3
    #: Number of most similar lines that are considered for each query.
    candidates: Annotated[int, Field(ge=1)] = 50
    #: Number of most similar negatives that are left out, because they are often relevant.
    skip: Annotated[int, Field(ge=0)] = 0
    #: A negative has at most the similarity of the positive minus this fraction of it. None: no
    #: such limit.
    relative_margin: Margin | None = 0.05
    #: A negative has at most the similarity of the positive minus this. None: no such limit.
    absolute_margin: Margin | None = None
    #: Maximum similarity of a negative.
    max_score: Similarity | None = None
    #: Minimum similarity of a negative.
    min_score: Similarity | None = None
    #: Whether the most similar negatives are used, or random ones of all candidates.
    sampling: Literal["top", "random"] = "top"
    #: Random seed of the sampling.
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns.list_columns() and self.columns.kind != "pairs":
            raise ValueError("mining needs the columns of a query and its positive: text and pair")
        if self.candidates <= self.skip:
            raise ValueError(
                f"candidates is {self.candidates} and skip is {self.skip}; give more candidates"
            )
        return self
