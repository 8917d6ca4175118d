"""The Typer application that every command registers itself with."""

import os
from typing import Annotated

import typer

from bertsmith.version import __version__

app = typer.Typer(
    name="bertsmith",
    help="Make your own BERT: from text to vocabulary, pre-training and use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"bertsmith {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback does it all
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Make your own BERT: from text to vocabulary, pre-training and use."""
    if debug:
        os.environ["BERTSMITH_DEBUG"] = "1"
