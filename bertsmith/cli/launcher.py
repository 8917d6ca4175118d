"""Commands in the processes that torchrun has started."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertsmith.errors import BertsmithError, PeerError, SettingsError
from bertsmith.runtime.process_rank import read_process_rank

#: Commands that divide their work among the processes.
_PARALLEL_COMMANDS = ("pretrain", "finetune", "embed")
#: Environment variable with the file from which torchrun takes the error for its report.
_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
#: Environment variable that torchrun sets.
_RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
#: Maximum seconds that a process waits for another one to report an error.
_MAX_REPORT_SECONDS = 30.0


@contextmanager
def report_once() -> Iterator[None]:
    """Let only the first process of a machine report an error that all of its processes have."""
    try:
        yield
    except BertsmithError as error:
        if read_process_rank().local_rank > 0:
            raise PeerError(str(error)) from None
        raise


def check_command(command: str | None) -> None:
    """Raise SettingsError if torchrun has started several processes of another command."""
    if command is not None and command not in _PARALLEL_COMMANDS:
        check_single_process(f"`{command}`")


def check_single_process(description: str) -> None:
    """Raise SettingsError if torchrun has started several processes.

    Args:
        description: What runs in a single process, as the subject of a sentence.
    """
    world_size = read_process_rank().world_size
    if world_size == 1:
        return
    with report_once():
        raise SettingsError(
            f"{description} runs in one process, but torchrun has started {world_size}; run it "
            f"without torchrun, which supports {', '.join(_PARALLEL_COMMANDS)}"
        )


def wait_for_report() -> None:
    """Wait until torchrun ends this process, after another one has reported the error.

    torchrun ends all processes as soon as one of them exits with an error. Without waiting, it
    would often end the process that reports the error before the error is printed.
    """
    if _RUN_ID_VARIABLE in os.environ:
        time.sleep(_MAX_REPORT_SECONDS)


def send_error_to_launcher(message: str) -> None:
    """Write an error message for the report of torchrun, if it has started this process.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``.
    """
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if not path:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": details}}
    # The message is printed anyway.
    with suppress(OSError):
        Path(path).write_text(json.dumps(content), encoding="utf-8")
