"""``bertsmith embed``: vectors of lines or of a table's column, into a file or as JSON lines."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.hints import quote_path
from bertsmith.cli.model_options import (
    FORMAT_OPTION,
    STDIN,
    Delimiter,
    Device,
    Encoding,
    Header,
    Input,
    Model,
    check_device,
    check_not_table,
    check_readable,
    open_input,
    resolve_device,
)
from bertsmith.cli.models import find_model
from bertsmith.cli.unknown_warning import UnknownWarning
from bertsmith.errors import InputError, SettingsError

if TYPE_CHECKING:
    from bertsmith.use.embed import Embedder
    from bertsmith.use.table_input import Record
    from bertsmith.use.vector_settings import VectorSettings
    from bertsmith.use.vector_writers import TableColumns

LayerOption = Annotated[
    str | None,
    typer.Option(
        help="A layer's number: -1 the last, as usual, -2 the one before, 0 the embeddings; or "
        "several, parted by commas, such as -4,-3,-2,-1.",
        show_default=False,
    ),
]
FileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="A text file, a line a text; or a table (.csv, .tsv, .jsonl, .json, .parquet, packed "
        "or not); - or nothing reads standard input.",
        show_default=False,
    ),
]
#: The column of the texts where nobody names one.
_TEXT = "text"
#: What is added to a table where each token has its vector.
_TOKEN_COLUMNS = ["tokens", "ids", "offsets", "vectors"]
#: What to do with each form of file.
_NEXT = {
    ".npy": "in Python, numpy.load({text})",
    ".jsonl": "head -n 1 {word}",
    ".parquet": "in Python, pyarrow.parquet.read_table({text})",
    ".index": 'bertsmith search {word} "..."',
}
#: Bytes read at once to count lines, and the most that are read for that: a few seconds.
_BLOCK, _COUNTED = 2**20, 2**33


class TextFormat(StrEnum):
    """How an input is read: lines of text or a table."""

    lines = "lines"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"
    json = "json"
    parquet = "parquet"


@app.command()
def embed(
    model: Model,
    file: FileArgument = None,
    text: Annotated[
        str | None,
        typer.Option(help="The column of a table's texts; else text.", show_default=False),
    ] = None,
    layer: LayerOption = None,
    combine: Annotated[
        str, typer.Option(help="Several layers: concat, mean, or weighted by --weights.")
    ] = "concat",
    weights: Annotated[
        str | None, typer.Option(help="A weight for each layer, such as 0.1,0.2,0.3,0.4.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, max, mean-max, first, last, pooled, or none: a vector a token; or "
            "sentence-transformers' mean_sqrt_len_tokens and weightedmean. Else as the model says, "
            "or mean.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Vectors of length 1; else as the model says, or no (an export to "
            "sentence-transformers: or yes).",
        ),
    ] = None,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Pool [CLS] and [SEP] with the text.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .npy, .parquet, .jsonl, or .index to be searched. Of a table, "
            ".parquet and .jsonl keep all columns. Without it, lines of JSON on stdout.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a file whose making was stopped.")
    ] = False,
    form: Annotated[TextFormat | None, FORMAT_OPTION] = None,
    header: Header = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a batch; else as fits.", show_default=False),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Weights in 8 or 16 bits: a cosine of 0.995 or more to exact."),
    ] = False,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="What was written, as JSON on stdout.")
    ] = False,
) -> None:
    """Make a vector of each line or row: of any layer, pooled as you say; or of each token.

    Only the layers that are asked for are computed. What --out names is written in pieces: a run
    that is stopped, even by kill -9, goes on with --resume and ends with the same bytes (an
    index's graph, which several threads join, with the same vectors).
    """
    if resume and out is None:
        raise InputError("--resume goes on with a file: name it with --out")
    settings = parse_vector_settings(
        layer, combine=combine, weights=parse_numbers("weights", weights), pooling=pooling,
        normalize=normalize, special=special,
    )  # fmt: skip
    check_device(device)
    check_readable(file)
    given = open_input(file or STDIN, encoding)
    kind = _recognize(given, form and form.value, text)
    if kind is None and (text is not None or header is not None or delimiter is not None):
        raise InputError(
            f"{given.path} is read as a text on each line, which has no columns; give --format, or "
            "leave --text, --header and --delimiter out"
        )
    model = _checked(model, out, settings)
    from bertsmith.use.embed import Embedder

    unknown = UnknownWarning()
    embedder = Embedder.load(model, device=resolve_device(device), fast=fast)
    embedder = embedder.with_token_counter(unknown.counts)
    by_token = settings.pooling == "none"
    with _texts(given, kind, text or _TEXT, header, delimiter, by_token=by_token) as texts:
        if out is None:
            _print(embedder, texts, settings, batch_tokens, unknown)
        else:
            more = {"batch_tokens": batch_tokens, "resume": resume}
            _write(embedder, texts, out, settings, more, as_json=as_json)
    unknown.warn()


def _checked(model: Path, out: Path | None, settings: "VectorSettings") -> Path:
    """Return the model to load. Raises where it, or the file to write, cannot be used."""
    if out is None:
        return find_model(model)
    from bertsmith.bundle.directory import locate_model

    if out.suffix not in _NEXT:
        raise InputError(f"{out}: expected a name that ends in {', '.join(_NEXT)}")
    if settings.pooling == "none" and out.suffix in (".npy", ".index"):
        raise InputError(f"{out}: a vector a token fits .jsonl and .parquet only")
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: it is there already; choose another name, or remove it")
    # The file remembers its model, so a temporary copy of a checkpoint does not do.
    locate_model(model)
    return model


@dataclass(frozen=True)
class _Texts:
    """Lines or rows to embed. total: how many, where that is known. columns: of a table.

    is_endless: whether the input may have no end.
    """

    lines: "Iterable[str | Record]"
    total: int | None = None
    at_once: bool = False
    columns: "TableColumns | None" = None
    is_endless: bool = False
    unit: str = "line"


def _recognize(given: Input, form: str | None, text: str | None) -> str | None:
    """Return the format of a table; None for lines of text."""
    from bertsmith.tasks.text_files import detect_table_format

    if form is not None:
        return None if form == "lines" else form
    if given.name == STDIN:
        kind = None
    else:
        kind = detect_table_format(given.path)
        if kind is None and text is not None and given.path.suffix.lower() == ".txt":
            kind = "tsv"
    if kind is None:
        check_not_table(given, [text or _TEXT])
    return kind


@contextmanager
def _texts(
    given: Input, kind: str | None, column: str, header: bool | None, delimiter: str | None,
    *, by_token: bool,
) -> Iterator[_Texts]:  # fmt: skip
    from bertsmith.tasks.tables import has_column, open_table
    from bertsmith.use.table_input import find_columns, iter_text_records
    from bertsmith.use.table_output import unused_column_names
    from bertsmith.use.vector_writers import TableColumns

    if kind is None:
        at_once = given.name == STDIN and sys.stdin.isatty()
        is_endless = given.name == STDIN
        yield _Texts(given.lines(), count_lines(given.name), at_once, is_endless=is_endless)
        return
    source = given.to_table_source(kind, header=header is not False, delimiter=delimiter)
    with open_table(source) as table:
        known, first, rows = find_columns(table, source)
        if first is not None and not has_column(first, column):
            raise InputError(
                f"{given.path}: there is no column {column!r}; the columns are "
                f"{', '.join(map(repr, known))}; name the column of the texts with --text"
            )
        names, notes = unused_column_names(
            _TOKEN_COLUMNS if by_token else ["vector"], known, given.path
        )
        for note in table.notes + notes:
            log(note)
        columns = TableColumns(known, names, table.schema)
        yield _Texts(iter_text_records(rows, column), columns=columns, unit="row")


def parse_numbers(option: str, said: str | None) -> list[float] | None:
    """Return numbers parted by commas. Raises SettingsError."""
    if said is None:
        return None
    try:
        return [float(one) for one in said.split(",")]
    except ValueError:
        raise SettingsError(f"--{option} {said}: expected numbers, parted by commas") from None


def parse_vector_settings(layer: str | None, **said: Any) -> "VectorSettings":
    """Return settings with layers as they are written on the command line. Raises SettingsError."""
    from bertsmith.use.vector_settings import build_vector_settings

    layers = parse_numbers("layer", layer)
    if layers is not None and any(one % 1 for one in layers):
        raise SettingsError(f"--layer {layer}: expected whole numbers, such as -2 or -4,-3,-2,-1")
    return build_vector_settings(None if layers is None else [int(one) for one in layers], **said)


def _print(
    embedder: "Embedder", texts: _Texts, settings: "VectorSettings", batch_tokens: int | None,
    unknown: UnknownWarning,
) -> None:  # fmt: skip
    from bertsmith.use.embed_lines import embed_windows
    from bertsmith.use.vector_writers import format_json_line

    windows = embed_windows(
        embedder, texts.lines, embedder.resolve_settings(settings), batch_tokens=batch_tokens,
        unbuffered=texts.at_once,
    )  # fmt: skip
    cut_off = 0
    for window in windows:
        rows: Sequence[Mapping[str, Any] | None] = [None] * len(window.texts)
        if window.rows is not None:
            rows = window.rows
        for text, own, row in zip(window.texts, window.vectors, rows, strict=True):
            print_line(format_json_line(text, own, row, texts.columns))
        sys.stdout.flush()
        cut_off += window.num_truncated
        if texts.is_endless:
            unknown.warn()
    _tell_cut(cut_off, embedder)


def _write(
    embedder: "Embedder", texts: _Texts, out: Path, settings: "VectorSettings",
    more: dict[str, Any], *, as_json: bool,
) -> None:  # fmt: skip
    from bertsmith.use.embed_lines import embed_lines

    try:
        done = embed_lines(
            embedder, texts.lines, out, settings, columns=texts.columns, total=texts.total,
            progress=TerminalProgress(), **more,
        )  # fmt: skip
    except KeyboardInterrupt:
        log("stopped; what is done is safe, and the same command with --resume goes on from there")
        raise
    if as_json:
        print_json({"out": str(out), "lines": done.num_lines, "width": done.width,
                  "cut_off": done.num_truncated, "unknown_share": done.unknown_share})  # fmt: skip
    _tell_cut(done.num_truncated, embedder)
    each = f"a vector a {'token' if settings.pooling == 'none' else texts.unit}"
    log(f"wrote {out}: {done.num_lines:,} {texts.unit}s, {each}, of {done.width:,} numbers")
    log(f"next: {_NEXT[out.suffix].format(text=repr(str(out)), word=quote_path(out))}")


def _tell_cut(count: int, embedder: "Embedder") -> None:
    if count:
        log(f"lines cut off at the model's {embedder.max_seqlen:,} tokens: {count:,}")


def count_lines(name: str) -> int | None:
    """Return how many lines a plain file has; None where that cannot be told quickly."""
    from bertsmith.text.archives import HEAD_BYTES, detect_compression

    path = Path(name)
    if name == STDIN or not path.is_file() or path.stat().st_size > _COUNTED:
        return None
    count, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            if detect_compression(file.read(HEAD_BYTES)):
                return None
            file.seek(0)
            while block := file.read(_BLOCK):
                count, last = count + block.count(b"\n"), block[-1:]
    except OSError:
        # Whoever reads the lines says why.
        return None
    return count + (last != b"\n")
