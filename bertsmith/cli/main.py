"""Entry point of the program: runs a command and turns exceptions into error messages."""

import atexit
import gc
import os
import signal
import sys
import warnings
from pathlib import Path

from bertsmith.cli import error_messages, launcher, streams
from bertsmith.cli.app import app
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET, Interrupted, Terminated, raise_terminated
from bertsmith.compatibility import upgrade_arguments
from bertsmith.errors import PeerError, StoppedError
from bertsmith.files import add_error_filename
from bertsmith.runtime.process_rank import read_process_rank

#: Exit status after Ctrl-C (SIGINT).
EXIT_INTERRUPTED = SIGNAL_EXIT_OFFSET + signal.SIGINT


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on one line, without the line of code that issued it."""
    sys.stderr.write(f"warning: {message}\n")


def main() -> None:
    """Run the program; print one message if it fails, and a traceback only with --debug.

    Of several processes that torchrun has started, only process 0 prints. Another process prints
    only the error with which it ends all processes.
    """
    warnings.showwarning = _print_warning
    streams.configure_streams()
    error_stream = sys.stderr
    # PyTorch reads this at its first allocation. Huge pages for tensors of at least 2 MiB make
    # training on a CPU faster where the kernel has the usual setting "madvise".
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    process_rank = read_process_rank()
    if process_rank.world_size > 1:
        # PyTorch would warn in each process that find_unused_parameters may be unnecessary.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if process_rank.rank > 0:
        streams.discard_output()
    # Without this, the collection at exit visits all objects of torch, which takes up to seconds.
    atexit.register(gc.freeze)
    try:
        error_messages.check_arguments(sys.argv[1:])
        # Inside the try block so that Ctrl-C while importing prints no traceback.
        from bertsmith.cli import commands  # noqa: F401 (registers them)

        try:
            with raise_terminated():
                app(upgrade_arguments(sys.argv[1:]))
        except SystemExit as system_exit:
            with add_error_filename(Path("standard output")):
                sys.stdout.flush()
            if process_rank.rank > 0 and system_exit.code == error_messages.EXIT_USER_ERROR:
                # An invalid option, which process 0 reports.
                launcher.wait_for_report()
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
        if os.environ.get("BERTSMITH_DEBUG") and not isinstance(error, StoppedError):
            sys.stderr = error_stream
            raise
        message, status = error_messages.explain_error(error)
        if isinstance(error, PeerError):
            launcher.wait_for_report()
        else:
            # Below a progress bar, sys.stderr starts a new line. In processes other than 0, it
            # discards what is written.
            (sys.stderr if isinstance(error, StoppedError) else error_stream).write(f"{message}\n")
            launcher.send_error_to_launcher(message)
        _flush_stdout()
        sys.exit(status)


def _flush_stdout() -> None:
    """Flush stdout; discard the output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        streams.discard_stdout()
