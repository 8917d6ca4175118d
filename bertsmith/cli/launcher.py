"""Commands in the processes that torchrun has started."""

from collections.abc import Iterator
from contextlib import contextmanager

from bertsmith.errors import BertsmithError, PeerError, SettingsError
from bertsmith.runtime.process_rank import read_process_rank

#: Commands that divide their work among the processes.
_PARALLEL_COMMANDS = ("pretrain", "finetune", "embed")


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
