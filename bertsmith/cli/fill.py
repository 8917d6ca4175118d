"""``bertsmith fill``: predict the words at the [MASK] tokens of a text."""

import sys
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import print_json, print_line
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Fast,
    Json,
    LinesFormatOption,
    Model,
    check_device,
    find_model,
    load_model,
    open_texts,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning

if TYPE_CHECKING:
    from bertsmith.use.fill import Filling

_BAR_WIDTH = 30


@app.command(
    epilog=format_examples(
        'bertsmith fill my-run "The cat sat on the [MASK]."',
        'bertsmith fill google-bert/bert-base-uncased "my [MASK] is [MASK]" --top 3',
        "bertsmith fill my-run - --json < masked.txt",
    )
)
def fill(
    model: Model,
    text: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT",
            help='Text with one or more [MASK] tokens, such as "my dog is [MASK]"; '
            "- reads one text per line of standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(help="Number of words per mask.", min=1)] = 5,
    lines_format: LinesFormatOption = None,
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Predict the words at the [MASK] tokens of a text.

    Each [MASK] is predicted independently of the others, so the best words of several masks may
    not fit together. A word that starts with ## continues the word before it. [SEP] in the text
    separates two segments.
    """
    # The model reads texts in batches, ahead of those that are printed.
    model_texts, printed_texts = tee(open_texts(text, lines_format))
    unknown = UnknownTokenWarning()
    check_device(device)
    path = find_model(model)
    if text != [STDIN]:
        _check_masks(path, text)
    bundle = unknown.with_token_counter(load_model(path, device, fast=fast, needs_mlm_head=True))
    from bertsmith.use.fill import iter_fillings

    settings: dict[str, Any] = {"chunk_size": 1} if text == [STDIN] and sys.stdin.isatty() else {}
    all_fillings = iter_fillings(bundle, model_texts, top, **settings)
    for masked_text, fillings in zip(printed_texts, all_fillings, strict=True):
        if as_json:
            masks = [_filling_to_json(filling) for filling in fillings]
            print_json({"text": masked_text, "masks": masks})
        else:
            _print_fillings(masked_text, fillings)
        if text == [STDIN]:
            unknown.warn()
    unknown.warn()


def _filling_to_json(filling: "Filling") -> dict[str, Any]:
    """Return the position of a [MASK] in its text, and its words with their probabilities."""
    predictions = [[word, probability] for word, probability in filling.predictions]
    return {"start": filling.start, "predictions": predictions}


def _check_masks(model: Path, texts: list[str]) -> None:
    """Raise InputError if a text has no [MASK], without loading torch."""
    from bertsmith.bundle.directory import locate_model
    from bertsmith.text.mask import check_mask
    from bertsmith.text.wordpiece import Tokenizer

    tokenizer = Tokenizer.load(locate_model(model))
    encoded = tokenizer.encode_batch(texts, allow_special=True)
    for number, (text, ids) in enumerate(zip(texts, encoded, strict=True), 1):
        check_mask(tokenizer, text, ids, number)


def _print_fillings(text: str, fillings: "list[Filling]") -> None:
    """Print the probabilities and words of each mask, with bars on a terminal."""
    console = Console(highlight=False)
    print_line(text)
    for number, filling in enumerate(fillings, 1):
        if len(fillings) > 1:
            print_line(f"[MASK] {number} of {len(fillings)}, predicted independently")
        if not console.is_terminal:
            for word, probability in filling.predictions:
                print_line(f"  {probability:7.2%}  {word}")
            continue
        table = Table.grid(padding=(0, 2))
        for word, probability in filling.predictions:
            bar = Bar(1.0, 0.0, probability, width=_BAR_WIDTH, color="cyan")
            table.add_row(Text(f"  {probability:7.2%}"), Text(word, style="bold"), bar)
        console.print(table)
