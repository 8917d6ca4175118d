"""Options, model loading and input reading shared by the commands that use a model."""

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from bertsmith.cli.console import log
from bertsmith.errors import InputError, SettingsError
from bertsmith.files import describe_missing_path
from bertsmith.runtime.device_name import check_device_name

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle, PretrainedBundle
    from bertsmith.tasks.tables import TableSource

Bundle = TypeVar("Bundle", "PretrainedBundle", "FineTunedBundle")
Number = TypeVar("Number", int, float)

#: Column of the texts in a table, unless an option names another column.
DEFAULT_TEXT_COLUMN = "text"
#: The argument that stands for standard input.
STDIN = "-"
#: The name of standard input in messages.
STDIN_NAME = "standard input"

_BLOCK_BYTES = 2**20
#: Lines of larger files are not counted, because counting would take more than a few seconds.
_MAX_COUNTED_BYTES = 2**33

#: The English model that is distributed with Bertsmith.
REFERENCE_MODEL = "mini-en"

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a run directory, the name of a reference model "
        f"({REFERENCE_MODEL}), or a Hugging Face Hub id (OWNER/NAME or OWNER/NAME@REVISION).",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:N, or auto: CUDA if available, else the CPU.")
]
Fast = Annotated[
    bool,
    typer.Option("--fast", help="Use weights of 8 or 16 bits: faster, with nearly equal results."),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of the input if it is not UTF-8, such as cp949 or cp1252."),
]
Delimiter = Annotated[
    str | None,
    typer.Option(help="Column separator of CSV, such as ';'. Default: detected."),
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of CSV or TSV contains the column names. With --no-header, "
        "columns are named 0, 1, and so on. Default: as in the training table, else yes.",
        show_default=False,
    ),
]
SkipInvalid = Annotated[
    bool,
    typer.Option("--skip-invalid", help="Skip and count invalid rows instead of stopping."),
]
TableDelimiter = Annotated[
    str | None, typer.Option(help="Column separator of CSV. Default: detected.")
]
#: The --format option; each command lists its formats.
FORMAT_OPTION = typer.Option(
    "--format",
    help="Input format. Default: from the file name; lines for standard input.",
    show_default=False,
)

#: The only value of --format in commands that read one text per line.
LinesFormat = Literal["lines"]
LinesFormatOption = Annotated[
    LinesFormat | None,
    typer.Option(
        "--format",
        help="lines: read one text per line, even if the input looks like a table.",
        show_default=False,
    ),
]

#: Variants of the pseudo-log-likelihood.
PllOption = Literal["original", "within-word"]
Json = Annotated[bool, typer.Option("--json", help="Print each result as a line of JSON.")]


def parse_numbers(option: str, value: str | None, number_type: type[Number]) -> list[Number] | None:
    """Return the numbers of an option, separated by commas. Raises SettingsError."""
    try:
        return None if value is None else [number_type(number) for number in value.split(",")]
    except ValueError:
        kind = {int: "integers", float: "numbers"}[number_type]
        message = f"{option} {value}: expected {kind} separated by commas, such as 2,1"
        raise SettingsError(message) from None


def find_model(model: Path) -> Path:
    """Return the path of a model, without loading torch.

    For a run without a model, return a temporary directory with a model made from the latest
    checkpoint. The temporary directory is deleted when the program exits. Raises ModelError if
    there is neither a model nor a checkpoint.
    """
    from bertsmith.bundle.directory import is_unfinished_run, locate_model

    if not is_unfinished_run(model):
        locate_model(model)
        return model
    from bertsmith.train.latest_snapshot import write_latest_snapshot

    directory = Path(tempfile.mkdtemp(prefix="bertsmith-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    step, num_steps = write_latest_snapshot(model, directory / "model")
    total = "" if num_steps is None else f" of {num_steps:,}"
    log(f"{model}: this run is not finished; using its latest checkpoint, step {step:,}{total}")
    return directory / "model"


def find_embedding_model(model: Path) -> Path:
    """Return the path of a model as ``find_model``, also of a directory with an OpenVINO graph."""
    from bertsmith.bundle.directory import find_openvino_model

    return model if find_openvino_model(model) is not None else find_model(model)


def check_embedding_model(model: Path) -> None:
    """Raise ModelError if ``find_embedding_model`` would find neither a model nor a checkpoint."""
    from bertsmith.bundle.directory import is_unfinished_run, locate_embedding_model

    if not is_unfinished_run(model):
        locate_embedding_model(model)


def load_model(
    model: Path, device: str, *, fast: bool = False, needs_mlm_head: bool = False
) -> "PretrainedBundle":
    """Load a pre-trained model onto a device, which may be ``auto``, and log notes on its files.

    Args:
        model: Path or name of a model.
        device: A PyTorch device name or ``auto``.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        needs_mlm_head: Whether to raise ModelError, before torch is loaded, if the model has no
            masked-LM head.
    """
    check_device(device)
    path = find_model(model)
    if needs_mlm_head:
        from bertsmith.bundle.directory import locate_model
        from bertsmith.bundle.mlm_head import check_mlm_head

        check_mlm_head(locate_model(path))
    device = resolve_device(device)
    from bertsmith.bundle import load
    from bertsmith.use.model_setup import set_up_model

    return set_up_model(_log_notes(load(path, device=device)), fast=fast)


def load_fine_tuned_model(model: Path, device: str, *, fast: bool = False) -> "FineTunedBundle":
    """Load a fine-tuned model onto a device, which may be ``auto``, and log notes on its files.

    Args:
        model: Path or name of a model.
        device: A PyTorch device name or ``auto``.
        fast: Whether to use 8-bit or 16-bit arithmetic.

    Raises:
        ModelError: The model is not fine-tuned. This is checked before torch is loaded.
    """
    from bertsmith.bundle.config import require_task_kind
    from bertsmith.bundle.directory import locate_model

    check_device(device)
    path = find_model(model)
    require_task_kind(locate_model(path))
    device = resolve_device(device)
    from bertsmith.bundle import load_fine_tuned
    from bertsmith.use.model_setup import set_up_model

    return set_up_model(_log_notes(load_fine_tuned(path, device=device)), fast=fast)


def _log_notes(bundle: Bundle) -> Bundle:
    """Log the notes on a model's files, such as newly initialized weights; return the model."""
    for note in bundle.notes():
        log(note)
    return bundle


def check_unused_options(options: Mapping[str, Any], reason: str) -> None:
    """Raise InputError for the first option that is not None, although it would have no effect.

    Args:
        options: Values of options that have no effect, by name.
        reason: Why they have no effect and what to do, for the message.
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: {reason}")


def check_positive(value: float | None) -> float | None:
    """Return the value of an option; raise typer.BadParameter unless it is above 0."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def check_device(device: str) -> None:
    """Raise SettingsError for an invalid device name, without loading torch."""
    check_device_name(device, "--device")


def resolve_device(device: str) -> str:
    """Return a PyTorch device name; ``auto`` is CUDA if available.

    Raises SettingsError if the device is invalid or not available.
    """
    from bertsmith.runtime import device as runtime_device

    return str(runtime_device.resolve_device(device, "--device"))


def check_readable(name: Path | str | None, hint: str = "") -> None:
    """Raise InputError for an input file that cannot be read, without loading torch.

    ``hint`` is added to the message if the file does not exist.
    """
    if name is None or str(name) == STDIN:
        return
    path = Path(name)
    # Path.exists would raise an error for a long text.
    if not os.path.exists(path):  # noqa: PTH110
        raise InputError(describe_missing_path(path) + hint)
    if path.is_dir():
        raise InputError(f"{name}: this is a folder; give a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{name}: cannot be read: permission denied; check its permissions")


def read_lines(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a text file or of standard input, without line endings.

    The input may be compressed. Raises InputError if it cannot be read or decoded.
    """
    if name == STDIN:
        if sys.stdin.isatty():
            log("reading lines from the terminal; Ctrl-D ends them")
            # Detecting compression would block until more lines are typed.
            yield from _decode_lines(sys.stdin.buffer, STDIN_NAME, encoding)
        else:
            yield from _read_stream(sys.stdin.buffer, STDIN_NAME, encoding)
        return
    try:
        with Path(name).open("rb") as file:
            yield from _read_stream(file, name, encoding)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def _read_stream(stream: IO[bytes], name: str, encoding: str) -> Iterator[str]:
    """Yield the decoded lines of a stream that may be compressed; ``name`` is for messages."""
    from bertsmith.text.archives import DECOMPRESSION_ERRORS, decompress

    try:
        _, decompressed = decompress(stream)
        if encoding == "utf-8":
            yield from _decode_lines(decompressed, name, encoding)
        else:
            yield from _read_encoded_lines(decompressed, name, encoding)
    except DECOMPRESSION_ERRORS as error:
        raise InputError(f"{name}: damaged or truncated archive: {error}") from None


def _decode_lines(lines: Iterable[bytes], name: str, encoding: str) -> Iterator[str]:
    """Yield the decoded lines without line endings; log a message if there are none."""
    number = 0
    for number, line in enumerate(lines, 1):
        # Only the first line may start with a byte order mark, which "utf-8-sig" removes.
        line_encoding = "utf-8-sig" if number == 1 and encoding == "utf-8" else encoding
        try:
            text = line.decode(line_encoding)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}, line {number:,}: not UTF-8 (byte 0x{line[error.start]:02x}); "
                "expected UTF-8 text; give --encoding if the command has it, or convert the file, "
                "for example with iconv -f CP949 -t UTF-8 (Korean) or iconv -f CP1252 -t UTF-8 "
                "(Western European)"
            ) from None
        yield text.rstrip("\r\n")
    if not number:
        log(f"{name}: empty input; nothing to do")


def _read_encoded_lines(stream: IO[bytes], name: str, encoding: str) -> Iterator[str]:
    """Yield the lines of a stream that is not UTF-8; its line endings may have several bytes."""
    from bertsmith.tasks.text_files import open_lines

    with open_lines(Path(name), encoding=encoding, stream=stream) as lines:
        for line in lines:
            yield line.rstrip("\r\n")


def count_lines(name: str) -> int | None:
    """Return the number of lines of a file; None if they cannot be counted quickly.

    Standard input, pipes, compressed files and very large files are not counted.
    """
    from bertsmith.text.archives import HEAD_BYTES, detect_compression

    path = Path(name)
    if name == STDIN or not path.is_file() or path.stat().st_size > _MAX_COUNTED_BYTES:
        return None
    num_lines, last_byte = 0, b"\n"
    try:
        with path.open("rb") as file:
            if detect_compression(file.read(HEAD_BYTES)):
                return None
            file.seek(0)
            while block := file.read(_BLOCK_BYTES):
                num_lines += block.count(b"\n")
                last_byte = block[-1:]
    except OSError:
        # The same error is raised and explained when the lines are read.
        return None
    if last_byte != b"\n":
        # The last line has no line ending.
        num_lines += 1
    return num_lines


def open_texts(arguments: list[str], lines_format: LinesFormat | None) -> Iterator[str]:
    """Return the texts given as arguments, or the lines of standard input if the only one is ``-``.

    Raises InputError if standard input looks like a table, unless ``lines_format`` is set; if ``-``
    is one of several arguments; and for texts with ``lines_format``, which would have no effect.
    """
    if arguments == [STDIN]:
        return open_lines(STDIN, lines_format)
    if STDIN in arguments:
        raise InputError("- reads all texts from standard input; remove the other texts, or the -")
    check_unused_options({"--format": lines_format}, "only valid with -; remove it")
    return iter(arguments)


def open_lines(name: str, lines_format: LinesFormat | None) -> Iterator[str]:
    """Open a file or standard input and return its lines; see ``read_lines``.

    Raises InputError if the input is a table or looks like one, unless ``lines_format`` is set.
    """
    from bertsmith.tasks.text_files import detect_table_format

    check_readable(name)
    if name == STDIN and sys.stdin.isatty():
        return read_lines(STDIN)
    source = open_input(name, None)
    if lines_format is None:
        remedy = "write one text per line, or use --format lines"
        table_format = None if name == STDIN else detect_table_format(source.path)
        if table_format is not None:
            raise InputError(
                f"{source.path}: a table ({table_format.upper()}), not one text per line; {remedy}"
            )
        check_not_table(source, [DEFAULT_TEXT_COLUMN], remedy)
    return source.lines()


@dataclass(frozen=True)
class Input:
    """An input file or standard input.

    Attributes:
        name: The file's path, or "-" for standard input.
        encoding: Encoding of the text.
        head: The first characters; empty for a terminal.
        stream: The decompressed content of standard input or a pipe, from its first byte; None for
            files and terminals.
    """

    name: str
    encoding: str
    head: str
    stream: IO[bytes] | None

    @property
    def path(self) -> Path:
        """The file's path, or "standard input"."""
        return Path(STDIN_NAME if self.name == STDIN else self.name)

    def lines(self) -> Iterator[str]:
        """Yield the lines; see ``read_lines``."""
        if self.stream is not None:
            return _read_stream(self.stream, str(self.path), self.encoding)
        return read_lines(self.name, self.encoding)

    def to_table_source(
        self, table_format: str | None, *, header: bool = True, delimiter: str | None = None
    ) -> "TableSource":
        """Return the input as a table. If ``table_format`` is None, its file name is used."""
        from bertsmith.tasks.tables import TableSource

        return TableSource(self.path, table_format, header, self.encoding, delimiter, self.stream)


def open_input(name: str, encoding: str | None) -> Input:
    """Open a file or standard input and read its first characters. Raises InputError."""
    from bertsmith.tasks.text_files import check_encoding
    from bertsmith.text.archives import DECOMPRESSION_ERRORS, decompress

    encoding = encoding or "utf-8"
    check_encoding(encoding)
    if name == STDIN and sys.stdin.isatty():
        return Input(name, encoding, "", None)
    try:
        file = sys.stdin.buffer if name == STDIN else Path(name).open("rb")  # noqa: SIM115
        head_bytes, stream = decompress(file)
        head = head_bytes.decode(encoding, "replace")
        if name != STDIN and Path(name).is_file():
            file.close()
            return Input(name, encoding, head, None)
        # Standard input and pipes can be read only once, so the stream stays open.
        return Input(name, encoding, head, stream)
    except DECOMPRESSION_ERRORS as error:
        raise InputError(f"{name}: damaged or truncated archive: {error}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None


def check_not_table(source: Input, columns: Iterable[str], remedy: str | None = None) -> None:
    """Raise InputError if an input to be read as lines is binary or looks like a table.

    Args:
        source: The input.
        columns: Column names; a first line with one of them is the header of a table.
        remedy: What to do about a table, for the message. Default: suggest --format and --text.
    """
    head = source.head.removeprefix("\ufeff").lstrip()
    if "\0" in head:
        expected = "text"
        if remedy is None:
            expected += ", or a table as .csv, .tsv, .jsonl, .json or .parquet"
        raise InputError(f"{source.path}: binary file; expected {expected}")
    table_format = _guess_table_format(head, set(columns))
    if table_format is not None:
        remedy = remedy or (
            f"use --format {table_format} and name the column with --text, or use --format lines"
        )
        raise InputError(
            f"{source.path}: this looks like {table_format.upper()}, not like one text per line; "
            f"{remedy}"
        )


def _guess_table_format(head: str, columns: set[str]) -> str | None:
    """Return the table format that ``head``, the beginning of a file, looks like, or None."""
    first_line = head.partition("\n")[0]
    if head.startswith("{"):
        with suppress(ValueError, RecursionError):
            return "jsonl" if isinstance(json.loads(first_line), dict) else None
    if head.startswith("[") and head[1:].lstrip().startswith("{"):
        return "json"
    for table_format, delimiter in (("tsv", "\t"), ("csv", ","), ("csv", ";")):
        cells = {cell.strip().strip('"') for cell in first_line.split(delimiter)}
        if len(cells) > 1 and cells & columns:
            return table_format
    return None
