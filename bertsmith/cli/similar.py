"""``bertsmith similar``: one word in several sentences, and how far its vectors are apart.

It never knows how a vector is made.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log, print_json, print_table
from bertsmith.cli.embed import FileArgument, LayerOption, parse_vector_settings
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Model,
    check_device,
    check_readable,
    read_lines,
    resolve_device,
)
from bertsmith.cli.models import find_model
from bertsmith.cli.unknown_warning import UnknownWarning

if TYPE_CHECKING:
    from bertsmith.use.similar import WordDistances

#: Places up to which a table has all distances.
_COLUMNS = 12


@app.command()
def similar(
    model: Model,
    word: Annotated[
        str, typer.Option(help="The word; where it stands twice in a line, both are compared.")
    ],
    file: FileArgument = None,
    layer: LayerOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave lines without the word out, counted.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distances into this file, such as bank.png.")
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Compare one word's vectors in several sentences: 0 is the same, 1 unlike (cosine distance).

    A word of several pieces has their mean. Where a line has no such word, words that begin with it
    count: a Korean noun carries its particle.
    """
    settings = parse_vector_settings(layer)
    check_device(device)
    check_readable(file)
    model = find_model(model)
    from bertsmith.use import similar as comparing
    from bertsmith.use.embed import Embedder

    if plot is not None:
        comparing.check_plot_path(plot)
    unknown = UnknownWarning()
    embedder = Embedder.load(model, device=resolve_device(device)).with_token_counter(
        unknown.counts
    )
    lines = list(read_lines(file or STDIN))
    found = comparing.similar(embedder, lines, word, layer=settings.layers, skip=skip_bad)
    if left := len(lines) - len({place.text for place in found.occurrences}):
        log(f"left out {left:,} lines without the word {word!r}")
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if plot is not None:
        comparing.plot_distances(found, plot)
        log(f"wrote {plot}")
    unknown.warn()


def _show(found: "WordDistances") -> None:
    """Put a row for each place: all distances, or the nearest and the farthest place."""
    count = len(found.occurrences)
    rows = []
    for number, (context, own) in enumerate(zip(found.contexts, found.distances, strict=True)):
        if count <= _COLUMNS:
            rows.append((str(number + 1), context, *(f"{value:.4f}" for value in own)))
            continue
        order = [place for place in own.argsort(kind="stable") if place != number]
        told = (f"{own[place]:.4f} to {place + 1}" for place in (order[0], order[-1]))
        rows.append((str(number + 1), context, *told))
    if count <= _COLUMNS:
        print_table(("", "", *map(str, range(1, count + 1))), rows)
    else:
        print_table(("", "", "nearest", "farthest"), rows)
        log(f"{count:,} places; --json has the distances of all")
