"""Entry point of the program: runs a command and turns exceptions into error messages."""

import atexit
import gc
import os
import signal
import sys
import warnings
from pathlib import Path

from bertsmith.cli import error_messages, streams
from bertsmith.cli.app import app
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET, Interrupted, Terminated, raise_terminated
from bertsmith.compatibility import upgrade_arguments
from bertsmith.files import add_error_filename

#: Exit status after Ctrl-C (SIGINT).
EXIT_INTERRUPTED = SIGNAL_EXIT_OFFSET + signal.SIGINT


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on one line, without the line of code that issued it."""
    sys.stderr.write(f"warning: {message}\n")


def main() -> None:
    """Run the program; print one message if it fails, and a traceback only with --debug."""
    warnings.showwarning = _print_warning
    streams.configure_streams()
    # Without this, the collection at exit visits all objects of torch, which takes up to seconds.
    atexit.register(gc.freeze)
    try:
        error_messages.check_arguments(sys.argv[1:])
        # Inside the try block so that Ctrl-C while importing prints no traceback.
        from bertsmith.cli import commands  # noqa: F401 (registers them)

        try:
            with raise_terminated():
                app(upgrade_arguments(sys.argv[1:]))
        except SystemExit:
            with add_error_filename(Path("standard output")):
                sys.stdout.flush()
            raise
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(EXIT_INTERRUPTED)
    except Interrupted as interrupted:
        sys.stderr.write(f"{interrupted.explain()}\n")
        _flush_stdout()
        sys.exit(EXIT_INTERRUPTED)
    except Terminated as terminated:
        # Flushing stdout would block if its reader has stopped reading.
        streams.discard_stdout()
        sys.stderr.write(f"terminated by {terminated}\n")
        sys.exit(SIGNAL_EXIT_OFFSET + terminated.number)
    except BrokenPipeError:
        # The reader of stdout exited (as in `| head`).
        streams.discard_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("BERTSMITH_DEBUG"):
            raise
        message, status = error_messages.explain_error(error)
        sys.stderr.write(f"{message}\n")
        _flush_stdout()
        sys.exit(status)


def _flush_stdout() -> None:
    """Flush stdout; discard the output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        streams.discard_stdout()
