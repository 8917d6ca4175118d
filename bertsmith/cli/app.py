"""The program ``bertsmith``: its verbs, and what becomes of an error.

It never knows what a verb does, and loads none of their libraries (``--help`` must be quick).
"""

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from bertsmith.errors import BertsmithError

app = typer.Typer(
    name="bertsmith",
    help="Make your own BERT: from text to vocabulary, pre-training and use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

#: The exit status of a user's mistake, as of a wrong option.
MISTAKE = 2
#: The exit status after Ctrl-C (128 + SIGINT).
INTERRUPTED = 130


@app.callback()
def options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Make your own BERT: from text to vocabulary, pre-training and use."""
    if debug:
        os.environ["BERTSMITH_DEBUG"] = "1"


def main() -> None:
    """Run the program; a user's mistake prints one message and exits with 2."""
    import_module("bertsmith.cli.verbs")
    try:
        try:
            app()
        except SystemExit:
            if sys.stdout is not None:
                sys.stdout.flush()
            raise
    except BertsmithError as error:
        if os.environ.get("BERTSMITH_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): leave quietly, as other tools do.
        _drop_stdout()
        sys.exit(1)
    except OSError as error:
        # A full disk, a folder that may not be written: nothing of ours, and no traceback helps.
        if os.environ.get("BERTSMITH_DEBUG"):
            raise
        place = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"error: {place}{error.strerror or error}\n")
        _drop_stdout()
        sys.exit(MISTAKE)


def _drop_stdout() -> None:
    """Have what is still to be written go nowhere, lest Python complain of it at its end."""
    # There may be no stdout, or no file behind it.
    with suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
