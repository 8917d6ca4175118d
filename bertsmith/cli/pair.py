"""``bertsmith pair``: how probable it is that one text follows another.

It never knows how the answer is found.
"""

from collections.abc import Iterator
from itertools import tee
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log, print_json, print_line
from bertsmith.cli.model_options import STDIN, Device, Json, Model, load_model, read_lines
from bertsmith.cli.unknown_warning import UnknownWarning
from bertsmith.errors import InputError


@app.command()
def pair(
    model: Model,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="The first text; - reads pairs from standard input, A and B on a line with a "
            "tab between them.",
            show_default=False,
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The second text.", show_default=False)
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell how probable it is that the text B follows the text A.

    Needs a model that was trained on pairs. A pair too long for the model loses tokens one by one
    from the longer text: A from its front, B from its end.
    """
    if b is None and a != STDIN:
        raise InputError("one text was given; expected two, A and B, or - for standard input")
    asked, shown = tee(_pairs(a, b))
    unknown = UnknownWarning()
    bundle = unknown.with_token_counts(load_model(model, device))
    from bertsmith.use.pair import iter_pair_predictions

    cut = 0
    for (first, second), answer in zip(shown, iter_pair_predictions(bundle, asked), strict=True):
        cut += answer.left_out > 0
        if as_json:
            texts = {"a": first, "b": second}
            print_json(texts | {"follows": answer.follows, "left_out": answer.left_out})
        elif a == STDIN:
            print_line(f"{answer.follows:.6f}\t{first}\t{second}")
        else:
            print_line(f"B follows A with probability {answer.follows:.4f}")
        if a == STDIN:
            unknown.warn()
    if cut:
        log(f"pairs cut to the model's length (A's front, B's end): {cut:,}")
    unknown.warn()


def _pairs(a: str, b: str | None) -> Iterator[tuple[str, str]]:
    if b is None:
        for number, line in enumerate(read_lines(STDIN), 1):
            first, tab, second = line.partition("\t")
            if not tab:
                raise InputError(
                    f"standard input, line {number:,}: no tab in {line[:60]!r}; "
                    "expected A, a tab, and B"
                )
            yield first, second
    else:
        yield a, b
