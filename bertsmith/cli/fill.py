"""``bertsmith fill``: the words that a model expects at the masks of a text.

It never knows how they are found.
"""

from itertools import tee
from typing import TYPE_CHECKING, Annotated

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertsmith.cli.app import app
from bertsmith.cli.console import print_json, print_line
from bertsmith.cli.model_options import STDIN, Device, Json, Model, load_model, read_texts
from bertsmith.cli.unknown_warning import UnknownWarning

if TYPE_CHECKING:
    from bertsmith.use.fill import Filling

#: Columns of a bar on a terminal.
_BAR = 30


@app.command()
def fill(
    model: Model,
    text: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT",
            help='Text with one [MASK] or several, such as "my dog is [MASK]"; '
            "- reads a text from each line of standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(help="Words for each mask.", min=1)] = 5,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Fill in the masks of a text with the most probable words.

    Each [MASK] is predicted by itself while the others stay masks, so with several the best words
    need not fit together. A word that begins with ## is a piece that continues the word before it.
    [SEP] in the text divides two sentences.
    """
    unknown = UnknownWarning()
    bundle = unknown.with_token_counts(load_model(model, device))
    from bertsmith.use.fill import iter_fillings

    asked, shown = tee(read_texts(text))
    for one, fillings in zip(shown, iter_fillings(bundle, asked, top), strict=True):
        if as_json:
            masks = [
                {"place": mask.place, "words": [[word, share] for word, share in mask.words]}
                for mask in fillings
            ]
            print_json({"text": one, "masks": masks})
        else:
            _show(one, fillings)
        if text == [STDIN]:
            unknown.warn()
    unknown.warn()


def _show(text: str, fillings: "list[Filling]") -> None:
    """Show a text's fillings: probability, word, and on a terminal a bar."""
    console = Console(highlight=False)
    print_line(text)
    for number, filling in enumerate(fillings, 1):
        if len(fillings) > 1:
            print_line(f"[MASK] {number} of {len(fillings)}, by itself")
        if not console.is_terminal:
            for word, share in filling.words:
                print_line(f"  {share:7.2%}  {word}")
            continue
        table = Table.grid(padding=(0, 2))
        for word, share in filling.words:
            bar = Bar(1.0, 0.0, share, width=_BAR, color="cyan")
            table.add_row(Text(f"  {share:7.2%}"), Text(word, style="bold"), bar)
        console.print(table)
