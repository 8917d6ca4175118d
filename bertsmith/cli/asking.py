"""What the verbs that ask a model share: loading it, and reading lines to ask about.

It never knows what is asked.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.console import say
from bertsmith.cli.models import find_model
from bertsmith.errors import ModelError, QuestionError

if TYPE_CHECKING:
    from bertsmith.bundle import Bundle, TaskBundle

#: What stands for standard input, and what it is called.
STDIN, STDIN_NAME = "-", "standard input"

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a RUN, or a model of the hub (OWNER/NAME or OWNER/NAME@REVISION).",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Results as lines of JSON on stdout.")]


def load_model(path: Path, device: str) -> "Bundle":
    """Load a model onto a device; ``auto`` takes CUDA where there is one."""
    check_device(device)
    path = find_model(path)
    from bertsmith.bundle import load

    bundle = load(path, device=resolved_device(device))
    tell_notes(bundle)
    return bundle


def load_fine_tuned(path: Path, device: str) -> "TaskBundle":
    """Load a fine-tuned model onto a device; ``auto`` takes CUDA where there is one."""
    check_device(device)
    path = find_model(path)
    from bertsmith.bundle import load_task

    bundle = load_task(path, device=resolved_device(device))
    tell_notes(bundle)
    return bundle


def tell_notes(bundle: "Bundle | TaskBundle") -> None:
    """Say what a user should know of a model's files."""
    for note in bundle.notes():
        say(note)


def check_device(device: str) -> None:
    """Raise ModelError for what is no name of a device, before torch is loaded."""
    kind, colon, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (
        colon and not (kind == "cuda" and number.isdecimal())
    ):
        raise ModelError(f"--device {device}: expected auto, cpu, cuda or cuda:N")


def resolved_device(device: str) -> str:
    """Return the device that is meant; ``auto`` is CUDA where there is one. Raises ModelError."""
    check_device(device)
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ModelError(
            f"--device {device}: PyTorch finds {found} CUDA devices here; "
            "leave --device at auto, or install a PyTorch build with CUDA"
        )
    return device


def check_input(name: Path | str | None) -> None:
    """Raise QuestionError for a file that cannot be read, before torch is loaded."""
    if name is None or str(name) == STDIN:
        return
    path = Path(name)
    reason = None
    if not path.exists():
        reason = "No such file or directory"
    elif path.is_dir():
        reason = "Is a directory"
    elif not os.access(path, os.R_OK):
        reason = "Permission denied"
    if reason:
        raise QuestionError(f"{name}: cannot be read: {reason}")


def lines_of(name: str) -> Iterator[str]:
    """Yield the lines of a text file (packed or not) or of standard input, ends taken off.

    Raises QuestionError where it cannot be read, or is not UTF-8.
    """
    if name == STDIN:
        if sys.stdin.isatty():
            say("reading lines from the terminal; Ctrl-D ends them")
            # A line at a time: to look for a packing would wait for more of them.
            yield from _decoded(sys.stdin.buffer, STDIN_NAME)
        else:
            yield from _lines(sys.stdin.buffer, STDIN_NAME)
        return
    try:
        with Path(name).open("rb") as file:
            yield from _lines(file, name)
    except OSError as error:
        raise QuestionError(f"{name}: cannot be read: {error.strerror or error}") from None


def _lines(stream: IO[bytes], name: str) -> Iterator[str]:
    from bertsmith.text.archives import DAMAGE, unpack

    try:
        _, unpacked = unpack(stream)
        yield from _decoded(unpacked, name)
    except DAMAGE as error:
        raise QuestionError(f"{name}: a damaged or cut-off archive: {error}") from None


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise QuestionError(
                f"{name}, line {number:,}: not UTF-8 (byte 0x{line[error.start]:02x}); "
                "expected UTF-8 text"
            ) from None
        yield text.rstrip("\r\n")
    if not number:
        say(f"{name}: there is no line in it, so there is nothing to do")


def texts_of(arguments: list[str]) -> Iterator[str]:
    """Yield the texts given as arguments; ``-`` alone stands for the lines of standard input."""
    if arguments == [STDIN]:
        yield from lines_of(STDIN)
    else:
        yield from arguments
