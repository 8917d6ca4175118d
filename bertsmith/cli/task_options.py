"""Command-line options for the labels and answers of fine-tuned models."""

from typing import Annotated

import typer

from bertsmith.errors import SettingsError


def parse_columns(option: str, value: str | None) -> list[str] | None:
    """Return the column names of an option, separated by commas; None without a value.

    Raises:
        SettingsError: A name is empty.
    """
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise SettingsError(
            f"{option} {value!r}: a column name is empty; give names separated by commas, such as "
            "a,b"
        )
    return names


def _check_threshold(value: float | None) -> float | None:
    """Return a threshold; raise an error unless it is between 0 and 1."""
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter(f"{value:g} is not between 0 and 1; expected a number such as 0.3")
    return value


LabelColumns = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN,...",
        help="Several labels per text: the columns of the labels, each with 0 or 1.",
    ),
]
LabelThreshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        callback=_check_threshold,
        help="Several labels per text: predict a label if its probability is higher than this. "
        "Default: as in fine-tuning (0.5).",
    ),
]
NullThreshold = Annotated[
    float | None,
    typer.Option(
        help="Question answering: predict no answer if the no-answer score exceeds the score of "
        "the best span by more than this; inf always predicts a span. Default: as tuned in "
        "fine-tuning."
    ),
]
