"""``bertsmith similar``: compare a word's vectors in different sentences."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json, print_table
from bertsmith.cli.embed import LayerOption, parse_vector_settings
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    LinesFormatOption,
    Model,
    check_device,
    find_embedding_model,
    open_lines,
    resolve_device,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.use.similar import WordDistances

#: Maximum number of occurrences for which all pairwise distances are printed.
_MAX_COLUMNS = 12


@app.command(
    epilog=format_examples(
        "bertsmith similar my-run sentences.txt --word bank",
        "bertsmith similar my-run sentences.txt --word bank --plot bank.png",
    )
)
def similar(
    model: Model,
    word: Annotated[
        str, typer.Option(help="The word; all its occurrences in a line are compared.")
    ],
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A text file with one text per line; may be compressed. Default or -: standard "
            "input.",
            show_default=False,
        ),
    ] = None,
    layer: LayerOption = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Skip and count lines without the word.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the distances to this file, such as bank.png.")
    ] = None,
    lines_format: LinesFormatOption = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare a word's vectors in different sentences.

    Prints cosine distances: 0 means identical, 1 means orthogonal. The vector of a word that
    consists of several pieces is the mean of their vectors. If a line does not contain the word,
    words that start with it are used, such as a Korean noun with a particle.
    """
    settings = parse_vector_settings(layer)
    if not word.strip():
        raise InputError("--word is empty; give a word that occurs in the texts")
    check_device(device)
    input_lines = open_lines(file or STDIN, lines_format)
    model = find_embedding_model(model)
    from bertsmith.use import similar as similarity
    from bertsmith.use.embed import Embedder

    if plot is not None:
        similarity.check_plot_path(plot)
    unknown = UnknownTokenWarning()
    embedder = Embedder.load(model, device=resolve_device(device))
    embedder = embedder.with_token_counter(unknown.counts)
    lines = list(input_lines)
    distances = similarity.similar(embedder, lines, word, layer=settings.layers, skip=skip_invalid)
    num_lines_with_word = len({occurrence.text_index for occurrence in distances.occurrences})
    num_skipped = len(lines) - num_lines_with_word
    if num_skipped:
        log(f"skipped {count_noun(num_skipped, 'line')} without the word {word!r}")
    if as_json:
        print_json(distances.to_json())
    else:
        _print_distances(distances)
    if plot is not None:
        similarity.plot_distances(distances, plot)
        log(f"wrote {plot}")
    unknown.warn()


def _print_distances(distances: "WordDistances") -> None:
    """Print all distances; of many occurrences, only the nearest and the farthest of each."""
    num_occurrences = len(distances.occurrences)
    rows = []
    for number, (context, row) in enumerate(
        zip(distances.contexts, distances.distances, strict=True), 1
    ):
        if num_occurrences <= _MAX_COLUMNS:
            rows.append((str(number), context, *(f"{distance:.4f}" for distance in row)))
            continue
        # Indices of the other occurrences, from the nearest to the farthest.
        others = [index for index in row.argsort(kind="stable") if index != number - 1]
        nearest, farthest = others[0], others[-1]
        nearest_cell = f"{row[nearest]:.4f} to {nearest + 1}"
        farthest_cell = f"{row[farthest]:.4f} to {farthest + 1}"
        rows.append((str(number), context, nearest_cell, farthest_cell))
    if num_occurrences <= _MAX_COLUMNS:
        print_table(("", "", *map(str, range(1, num_occurrences + 1))), rows)
    else:
        print_table(("", "", "nearest", "farthest"), rows)
        log(f"{count_noun(num_occurrences, 'occurrence')}; --json prints all distances")
