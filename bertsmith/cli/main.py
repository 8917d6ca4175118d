"""The entry point ``bertsmith``: runs a command and turns exceptions into messages."""

import os
import sys
import warnings
from pathlib import Path

from bertsmith.cli import error_messages as failures
from bertsmith.cli import streams
from bertsmith.cli.app import app
from bertsmith.files import add_error_filename

#: The exit status after Ctrl-C (128 + SIGINT).
EXIT_INTERRUPTED = 130


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the code that raised it."""
    sys.stderr.write(f"warning: {message}\n")


def main() -> None:
    """Run the program; a failure prints one message, and a traceback only with --debug."""
    warnings.showwarning = _show_warning
    streams.configure_streams()
    try:
        failures.check_arguments(sys.argv[1:])
        # Inside the try block: Ctrl-C while the commands load must not print a traceback.
        from bertsmith.cli import commands  # noqa: F401 (registers them)

        try:
            app()
        except SystemExit:
            with add_error_filename(Path("standard output")):
                sys.stdout.flush()
            raise
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): leave quietly, as other tools do.
        streams.discard_stdout()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("BERTSMITH_DEBUG"):
            raise
        message, status = failures.explain_error(error)
        sys.stderr.write(f"{message}\n")
        try:
            sys.stdout.flush()
        except OSError:
            streams.discard_stdout()
        sys.exit(status)
