"""The program ``bertsmith``: its verbs, and what becomes of an error.

It never knows what a verb does, and loads none of their libraries (``--help`` must be quick).
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli import failures, streams
from bertsmith.files import with_filename
from bertsmith.version import __version__

app = typer.Typer(
    name="bertsmith",
    help="Make your own BERT: from text to vocabulary, pre-training and use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

#: The exit status after Ctrl-C (128 + SIGINT).
INTERRUPTED = 130


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


def main() -> None:
    """Run the program; a failure prints one message, and a traceback only with --debug."""
    streams.prepare()
    try:
        failures.check_arguments(sys.argv[1:])
        import_module("bertsmith.cli.verbs")
        try:
            app()
        except SystemExit:
            with with_filename(Path("standard output")):
                sys.stdout.flush()
            raise
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): leave quietly, as other tools do.
        streams.discard_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("BERTSMITH_DEBUG"):
            raise
        message, status = failures.explain(error)
        sys.stderr.write(f"{message}\n")
        try:
            sys.stdout.flush()
        except OSError:
            streams.discard_stdout()
        sys.exit(status)
