"""``bertsmith pair``: predict whether one text follows another."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import tee
from typing import Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json, print_line
from bertsmith.cli.model_options import STDIN, Device, Fast, Json, Model, load_model, read_lines
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError


@app.command(
    epilog=format_examples(
        'bertsmith pair my-run "He opened the door." "The room was empty."',
        "bertsmith pair my-run - --json < pairs.tsv",
    )
)
def pair(
    model: Model,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="The first text; - reads one tab-separated pair of A and B per line of standard "
            "input.",
            show_default=False,
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The second text.", show_default=False)
    ] = None,
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Predict whether text B follows text A.

    The model needs a next-sentence head. If a pair is too long, tokens are removed one by one from
    the longer text: from the start of A or from the end of B.
    """
    if b is None and a != STDIN:
        raise InputError("only one text: expected A and B, or - for standard input")
    if b is not None and STDIN in (a, b):
        raise InputError(
            f"A is {a!r} and B is {b!r}, but - reads both texts from standard input; give only -"
        )
    # The model reads pairs in batches, ahead of those that are printed.
    model_pairs, printed_pairs = tee(_read_pairs(a, b))
    unknown = UnknownTokenWarning()
    bundle = unknown.with_token_counter(load_model(model, device, fast=fast))
    from bertsmith.use.pair import iter_pair_predictions

    num_truncated = 0
    predictions = iter_pair_predictions(bundle, model_pairs)
    for (first, second), prediction in zip(printed_pairs, predictions, strict=True):
        num_truncated += prediction.num_removed_tokens > 0
        if as_json:
            print_json({"a": first, "b": second} | asdict(prediction))
        elif a == STDIN:
            print_line(f"{prediction.next_sentence_probability:.6f}\t{first}\t{second}")
        else:
            print_line(f"B follows A with probability {prediction.next_sentence_probability:.4f}")
        if a == STDIN:
            unknown.warn()
    if num_truncated:
        log(
            "pairs truncated to the model's length (A at its start, B at its end): "
            f"{num_truncated:,}"
        )
    unknown.warn()


def _read_pairs(a: str, b: str | None) -> Iterator[tuple[str, str]]:
    """Yield the pair (a, b), or the pairs on standard input if ``b`` is None."""
    if b is not None:
        yield a, b
        return
    for number, line in enumerate(read_lines(STDIN), 1):
        first, tab, second = line.partition("\t")
        if not tab:
            raise InputError(
                f"standard input, line {number:,}: no tab in {line[:60]!r}; "
                "expected A, a tab, and B"
            )
        yield first, second
