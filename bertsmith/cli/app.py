"""The Typer application and its global options."""

import os
from typing import Annotated

import typer

from bertsmith.version import __version__

SUMMARY = "Train your own BERT from text, fine-tune it, and use or serve it."

app = typer.Typer(
    name="bertsmith",
    help=SUMMARY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def format_examples(*commands: str) -> str:
    r"""Return the Examples section at the end of a command's help.

    The leading ``\b`` keeps Click from rewrapping the lines.
    """
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExamples:\n{lines}"


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"bertsmith {__version__}")
        raise typer.Exit


@app.callback(
    help=SUMMARY,
    epilog=format_examples(
        "bertsmith demo",
        "bertsmith fill bertsmith-demo/run-0 'Return the [MASK] of the list.'",
        "bertsmith pretrain --help",
    ),
)
def main_options(
    debug: Annotated[bool, typer.Option(help="Show the traceback if a command fails.")] = False,
    version: Annotated[  # noqa: ARG001 - handled by the callback
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Set the global options."""
    if debug:
        os.environ["BERTSMITH_DEBUG"] = "1"
