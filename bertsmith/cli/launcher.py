"""Commands in the processes that torchrun has started."""

from collections.abc import Iterator
from contextlib import contextmanager

from bertsmith.errors import BertsmithError, PeerError, SettingsError
from bertsmith.runtime.process_rank import read_process_rank

#: Commands that divide their work among the processes.
_PARALLEL_COMMANDS = ("pretrain",)


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
    world_size = read_process_rank().world_size
    if world_size == 1 or command is None or command in _PARALLEL_COMMANDS:
        return
    with report_once():
        raise SettingsError(
            f"`{command}` runs in one process, but torchrun has started {world_size}; run it "
            f"without torchrun, which supports {', '.join(_PARALLEL_COMMANDS)}"
        )
