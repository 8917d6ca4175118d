"""Command-line options for the labels and answers of fine-tuned models."""

from typing import Annotated

import typer

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
