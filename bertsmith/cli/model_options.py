"""What the verbs that ask a model share: loading it, and reading lines to ask about.

It never knows what is asked.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.console import log
from bertsmith.cli.models import find_model
from bertsmith.errors import InputError, ModelError

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle, PretrainedBundle
    from bertsmith.tasks.tables import TableSource

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
Encoding = Annotated[
    str | None,
    typer.Option(help="The encoding of the input if it is not UTF-8, such as cp949 or latin-1."),
]
Delimiter = Annotated[
    str | None,
    typer.Option(help="What separates the columns of CSV, such as ';'; else it is detected."),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of CSV or TSV names its columns; without names they are "
        "0, 1 and so on. Else as in the training table, or yes.",
        show_default=False,
    ),
]
#: The option of each command's own enumeration of formats.
FORMAT_OPTION = typer.Option(
    "--format", help="How the input is read; else by its suffix. stdin: lines.", show_default=False
)
Json = Annotated[bool, typer.Option("--json", help="Results as lines of JSON on stdout.")]


def load_model(path: Path, device: str) -> "PretrainedBundle":
    """Load a model onto a device; ``auto`` takes CUDA where there is one."""
    check_device(device)
    path = find_model(path)
    from bertsmith.bundle import load

    bundle = load(path, device=resolve_device(device))
    log_notes(bundle)
    return bundle


def load_fine_tuned(path: Path, device: str) -> "FineTunedBundle":
    """Load a fine-tuned model onto a device; ``auto`` takes CUDA where there is one."""
    check_device(device)
    path = find_model(path)
    from bertsmith.bundle import load_fine_tuned as load_task

    bundle = load_task(path, device=resolve_device(device))
    log_notes(bundle)
    return bundle


def log_notes(bundle: "PretrainedBundle | FineTunedBundle") -> None:
    """Say what a user should know of a model's files."""
    for note in bundle.notes():
        log(note)


def check_device(device: str) -> None:
    """Raise ModelError for what is no name of a device, before torch is loaded."""
    kind, colon, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (
        colon and not (kind == "cuda" and number.isdecimal())
    ):
        raise ModelError(f"--device {device}: expected auto, cpu, cuda or cuda:N")


def resolve_device(device: str) -> str:
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


def check_readable(name: Path | str | None) -> None:
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
        raise InputError(f"{name}: cannot be read: {reason}")


def read_lines(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file (packed or not) or of standard input, ends taken off.

    Raises QuestionError where it cannot be read, or is of another encoding.
    """
    if name == STDIN:
        if sys.stdin.isatty():
            log("reading lines from the terminal; Ctrl-D ends them")
            # A line at a time: to look for a packing would wait for more of them.
            yield from _decoded(sys.stdin.buffer, STDIN_NAME, encoding)
        else:
            yield from _lines(sys.stdin.buffer, STDIN_NAME, encoding)
        return
    try:
        with Path(name).open("rb") as file:
            yield from _lines(file, name, encoding)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _lines(stream: IO[bytes], name: str, encoding: str) -> Iterator[str]:
    from bertsmith.text.archives import DECOMPRESSION_ERRORS, decompress

    try:
        _, unpacked = decompress(stream)
        if encoding == "utf-8":
            yield from _decoded(unpacked, name, encoding)
        else:
            yield from _transcoded(unpacked, name, encoding)
    except DECOMPRESSION_ERRORS as error:
        raise InputError(f"{name}: a damaged or cut-off archive: {error}") from None


def _decoded(lines: Iterable[bytes], name: str, encoding: str) -> Iterator[str]:
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 and encoding == "utf-8" else encoding)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}, line {number:,}: not UTF-8 (byte 0x{line[error.start]:02x}); "
                "expected UTF-8 text; convert it, for example with iconv -f CP949 -t UTF-8 "
                "(Korean) or iconv -f LATIN1 -t UTF-8 (Western European)"
            ) from None
        yield text.rstrip("\r\n")
    if not number:
        log(f"{name}: there is no line in it, so there is nothing to do")


def _transcoded(stream: IO[bytes], name: str, encoding: str) -> Iterator[str]:
    """Yield lines of another encoding, some of which have line ends of several bytes."""
    from bertsmith.tasks.text_files import open_lines

    with open_lines(Path(name), encoding=encoding, stream=stream) as lines:
        for line in lines:
            yield line.rstrip("\r\n")


def read_texts(arguments: list[str]) -> Iterator[str]:
    """Yield the texts given as arguments; ``-`` alone stands for the lines of standard input."""
    if arguments == [STDIN]:
        yield from read_lines(STDIN)
    else:
        yield from arguments


@dataclass(frozen=True)
class Input:
    """A file or standard input whose first characters were looked at.

    stream: of standard input or a pipe, with its first bytes given out again. head: "" of a
    terminal, which is read line by line.
    """

    name: str
    encoding: str
    head: str
    stream: IO[bytes] | None

    @property
    def path(self) -> Path:
        """The file, or the name of standard input for messages."""
        return Path(STDIN_NAME if self.name == STDIN else self.name)

    def lines(self) -> Iterator[str]:
        """Yield its lines; see ``read_lines``."""
        if self.stream is not None:
            return _lines(self.stream, str(self.path), self.encoding)
        return read_lines(self.name, self.encoding)

    def to_table_source(
        self, form: str | None, *, header: bool = True, delimiter: str | None = None
    ) -> "TableSource":
        """Return it as a table."""
        from bertsmith.tasks.tables import TableSource

        return TableSource(self.path, form, header, self.encoding, delimiter, self.stream)


def open_input(name: str, encoding: str | None) -> Input:
    """Look at the first characters of a file or of standard input. Raises QuestionError."""
    from bertsmith.tasks.text_files import check_encoding
    from bertsmith.text.archives import DECOMPRESSION_ERRORS, decompress

    encoding = encoding or "utf-8"
    check_encoding(encoding)
    if name == STDIN and sys.stdin.isatty():
        return Input(name, encoding, "", None)
    try:
        if name == STDIN:
            head, stream = decompress(sys.stdin.buffer)
            return Input(name, encoding, head.decode(encoding, "replace"), stream)
        file = Path(name).open("rb")  # noqa: SIM115 - a pipe stays open: it is read only once
        head, stream = decompress(file)
        if not Path(name).is_file():
            return Input(name, encoding, head.decode(encoding, "replace"), stream)
        file.close()
        return Input(name, encoding, head.decode(encoding, "replace"), None)
    except DECOMPRESSION_ERRORS as error:
        raise InputError(f"{name}: a damaged or cut-off archive: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def check_not_table(given: Input, columns: Iterable[str]) -> None:
    """Raise QuestionError where lines are read from what is no text, or a table without saying so.

    columns: names that only the first line of a table would have.
    """
    head = given.head.removeprefix("\ufeff").lstrip()
    if "\0" in head:
        raise InputError(
            f"{given.path}: not text, but a binary file; give a text file, or a table as .csv, "
            ".tsv, .jsonl, .json or .parquet"
        )
    form = _looks_like(head, set(columns))
    if form is not None:
        raise InputError(
            f"{given.path}: this looks like {form.upper()}, not like a text on each line; give "
            f"--format {form} and the column with --text, or --format lines"
        )


def _looks_like(head: str, columns: set[str]) -> str | None:
    first = head.partition("\n")[0]
    if head.startswith("{"):
        with suppress(ValueError, RecursionError):
            return "jsonl" if isinstance(json.loads(first), dict) else None
    if head.startswith("[") and head[1:].lstrip().startswith("{"):
        return "json"
    for form, delimiter in (("tsv", "\t"), ("csv", ","), ("csv", ";")):
        cells = {cell.strip().strip('"') for cell in first.split(delimiter)}
        if len(cells) > 1 and cells & columns:
            return form
    return None
