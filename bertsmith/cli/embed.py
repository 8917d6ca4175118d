"""``bertsmith embed``: compute vectors for lines, table rows or tokens."""

import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.hints import quote_path
from bertsmith.cli.launcher import report_once
from bertsmith.cli.model_options import (
    DEFAULT_TEXT_COLUMN,
    FORMAT_OPTION,
    REFERENCE_MODEL,
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
    count_lines,
    find_embedding_model,
    open_input,
    parse_numbers,
    resolve_device,
)
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET, Terminated
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.compatibility import OLD_SPECIAL_TOKENS_FLAGS
from bertsmith.errors import InputError
from bertsmith.plurals import count_noun
from bertsmith.runtime.process_rank import read_process_rank

if TYPE_CHECKING:
    from bertsmith.runtime.process_group import ProcessGroup
    from bertsmith.use.embed import Embedder
    from bertsmith.use.table_input import TextRow
    from bertsmith.use.vector_settings import VectorSettings
    from bertsmith.use.vector_writers import TableColumns

LayerOption = Annotated[
    str | None,
    typer.Option(
        help="Layer number: -1 is the last, -2 the one before it, 0 the embeddings; or a comma-"
        "separated list, such as -4,-3,-2,-1. Default: -1.",
        show_default=False,
    ),
]
#: Columns that are added to a table if each token gets a vector (--pooling none).
_TOKEN_COLUMNS = ["tokens", "ids", "offsets", "vectors"]
#: The suggested next step for each output suffix.
_NEXT_STEPS = {
    ".npy": "in Python, numpy.load({python_path})",
    ".jsonl": "head -n 1 {shell_path}",
    ".parquet": "in Python, pyarrow.parquet.read_table({python_path})",
    ".index": 'bertsmith search {shell_path} "..."',
}


@app.command(
    epilog=format_examples(
        "bertsmith embed my-run sentences.txt --out vectors.npy",
        "bertsmith embed my-run reviews.csv --text review --out reviews.parquet",
        "bertsmith embed my-run sentences.txt --normalize --out lines.index",
        "bertsmith embed my-run more.txt --normalize --out lines.index --append",
    )
)
def embed(
    model: Model,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A text file with one text per line, or a table (.csv, .tsv, .jsonl, .json or "
            ".parquet); may be compressed. Default or -: standard input.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="The column of a table that contains the texts. Default: text.",
            show_default=False,
        ),
    ] = None,
    layer: LayerOption = None,
    combine: Annotated[
        str, typer.Option(help="How to combine several layers: concat, mean or weighted.")
    ] = "concat",
    weights: Annotated[
        str | None,
        typer.Option(
            help="A weight for each layer if --combine is weighted, such as 0.1,0.2,0.3,0.4."
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, max, mean-max, first, last, pooled (the pooler's output), none (a vector "
            "per token), or sentence-transformers' mean_sqrt_len_tokens or weightedmean. Default: "
            "as the model specifies, else mean. Replaces a model's pooling, Dense modules, "
            "normalization and truncate_dim.",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1. Default: as the model specifies; no with --pooling "
            "and for other models, unlike `bertsmith export --to sentence-transformers`.",
        ),
    ] = None,
    special_tokens: Annotated[
        bool,
        typer.Option(
            "--special-tokens/--no-special-tokens",
            help="Include [CLS] and [SEP] in the pooling.",
        ),
    ] = True,
    old_special_tokens: Annotated[
        bool | None, typer.Option(OLD_SPECIAL_TOKENS_FLAGS, hidden=True)
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Name of a prompt of a sentence-transformers model, such as query, which is added "
            "to each text. Default: as the model specifies; for an index, document.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .npy, .parquet, .jsonl, or .index (for `bertsmith search`). "
            ".parquet and .jsonl keep the columns of a table. Without --out, JSON lines are "
            "printed.",
            show_default=False,
        ),
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Add the lines to the existing .index of --out. The model and the options must be "
            "those with which it was made. Searches use the old index until all lines are added.",
        ),
    ] = False,
    input_format: Annotated[
        Literal["lines", "csv", "tsv", "jsonl", "json", "parquet"] | None, FORMAT_OPTION
    ] = None,
    header: Header = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per batch. Default: automatic.", show_default=False),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Use 8-bit or 16-bit weights; the cosine similarity of pooled vectors to exact "
            "ones was at least 0.995 in the benchmarks. Token vectors differ more.",
        ),
    ] = False,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary of the output file as JSON.")
    ] = False,
) -> None:
    """Compute vectors for lines, table rows or tokens.

    Only the layers that are needed are computed. With --out, progress is saved, and the same
    command continues after an interruption, even after SIGKILL. It writes the same bytes as an
    uninterrupted command, except for the search graph of an .index, which several threads build.

    torchrun --nproc-per-node 2 -m bertsmith embed ... embeds in 2 processes.
    """
    settings = parse_vector_settings(
        layer,
        combine=combine,
        weights=parse_numbers("--weights", weights, float),
        pooling=pooling,
        normalize=normalize,
        include_special_tokens=(
            special_tokens if old_special_tokens is None else old_special_tokens
        ),
    )
    with report_once():
        check_device(device)
        _check_input(model, file)
        _check_processes(file, out, append=append)
        source = open_input(file or STDIN, encoding)
        table_format = _detect_table_format(source, input_format, text)
        has_table_option = text is not None or header is not None or delimiter is not None
        if table_format is None and has_table_option:
            raise InputError(
                f"{source.path} is read as one text per line, without columns; use --format, or "
                "remove --text, --header and --delimiter"
            )
        model = _check_model_and_output(model, out, settings, append=append)
    from bertsmith.runtime.process_group import join_process_group
    from bertsmith.use.embed import Embedder

    unknown = UnknownTokenWarning()
    texts = _open_texts(
        source,
        table_format,
        text or DEFAULT_TEXT_COLUMN,
        header,
        delimiter,
        per_token=settings.pooling == "none",
    )
    with join_process_group() as processes, texts as opened_texts:
        embedder = Embedder.load(model, device=resolve_device(device), fast=fast)
        if prompt_name is None and out is not None and out.suffix == ".index":
            embedder = embedder.with_document_prompt()
        embedder = embedder.with_prompt(prompt_name).with_token_counter(unknown.counts)
        if out is None:
            _print_vectors(embedder, opened_texts, settings, batch_tokens, unknown)
        elif processes.is_main:
            _write_vectors(
                embedder, opened_texts, out, settings, batch_tokens, processes,
                append=append, as_json=as_json,
            )  # fmt: skip
        else:
            from bertsmith.use.embed_lines import embed_share

            embed_share(
                embedder, opened_texts.lines, settings, processes, batch_tokens=batch_tokens
            )
    unknown.warn()


def _check_processes(file: str | None, out: Path | None, *, append: bool) -> None:
    """Raise InputError for arguments that several processes (torchrun) do not support."""
    if read_process_rank().world_size == 1:
        return
    if append:
        raise InputError("--append needs a single process; run the command without torchrun")
    if out is None or file in (None, STDIN):
        raise InputError(
            "several processes (torchrun) need an input file and --out; give both, or run the "
            "command without torchrun"
        )


def _check_input(model: Path, file: str | None) -> None:
    """Raise InputError if the file cannot be read, or is given in place of the model."""
    from bertsmith.bundle.directory import is_model_file

    if file is None and model.is_file() and not is_model_file(model):
        raise InputError(
            f"{model}: a file, not a model; expected bertsmith embed MODEL FILE, such as "
            f"bertsmith embed {REFERENCE_MODEL} {quote_path(model)}"
        )
    check_readable(file)


def _check_model_and_output(
    model: Path, out: Path | None, settings: "VectorSettings", *, append: bool
) -> Path:
    """Return the path of the model to load; raise an error if it or ``out`` cannot be used."""
    if append and (out is None or out.suffix != ".index"):
        raise InputError("--append adds lines to an index; name it with --out NAME.index")
    if out is None:
        return find_embedding_model(model)
    from bertsmith.bundle.directory import locate_embedding_model

    if out.suffix not in _NEXT_STEPS:
        raise InputError(f"{out}: expected a name that ends in {', '.join(_NEXT_STEPS)}")
    if settings.pooling == "none" and out.suffix in (".npy", ".index"):
        raise InputError(f"{out}: vectors per token can only be written to .jsonl and .parquet")
    if not append and (out.exists() or out.is_symlink()):
        advice = "add the lines to it with --append, " if out.suffix == ".index" else ""
        raise InputError(f"{out}: file exists; {advice}choose another name, or remove it")
    # The output stores the model's path, so a temporary copy of a checkpoint is not enough.
    locate_embedding_model(model)
    return model


@dataclass(frozen=True)
class _Texts:
    """Lines or table rows to embed.

    Attributes:
        lines: The lines or table rows.
        total: Number of lines or rows; None if unknown.
        unbuffered: Whether to embed each line as soon as it is read, because a user types it.
        columns: Columns of the table; None for lines.
        may_be_endless: Whether the input may never end, so that a warning about [UNK] must not
            wait for its end.
        unit: What an item is called in messages: "line" or "row".
    """

    lines: "Iterable[str | TextRow]"
    total: int | None = None
    unbuffered: bool = False
    columns: "TableColumns | None" = None
    may_be_endless: bool = False
    unit: str = "line"


def _detect_table_format(
    source: Input, input_format: str | None, text_column: str | None
) -> str | None:
    """Return the format of a table, or None for one text per line."""
    from bertsmith.tasks.text_files import detect_table_format, is_txt_table

    if input_format is not None:
        return None if input_format == "lines" else input_format
    if source.name == STDIN:
        table_format = None
    else:
        table_format = detect_table_format(source.path)
        if table_format is None and is_txt_table(source.path, text_column):
            table_format = "tsv"
    if table_format is None:
        check_not_table(source, [text_column or DEFAULT_TEXT_COLUMN])
    return table_format


@contextmanager
def _open_texts(
    source: Input,
    table_format: str | None,
    text_column: str,
    header: bool | None,
    delimiter: str | None,
    *,
    per_token: bool,
) -> Iterator[_Texts]:
    """Open the lines or the table rows to embed."""
    from bertsmith.tasks.tables import open_table
    from bertsmith.use.table_input import find_columns, iter_text_rows
    from bertsmith.use.table_output import choose_column_names
    from bertsmith.use.vector_writers import TableColumns

    if table_format is None:
        is_stdin = source.name == STDIN
        yield _Texts(
            source.lines(),
            count_lines(source.name),
            unbuffered=is_stdin and sys.stdin.isatty(),
            may_be_endless=is_stdin,
        )
        return
    table_source = source.to_table_source(
        table_format, header=header is not False, delimiter=delimiter
    )
    with open_table(table_source) as table:
        columns, missing, rows = find_columns(table, table_source, [text_column])
        if missing:
            raise InputError(
                f"{source.path}: no column {text_column!r}; the columns are "
                f"{', '.join(map(repr, columns))}; name the text column with --text"
            )
        new_columns = _TOKEN_COLUMNS if per_token else ["vector"]
        names, notes = choose_column_names(new_columns, columns, source.path)
        for note in table.notes + notes:
            log(note)
        table_columns = TableColumns(columns, names, table.schema, text_column)
        yield _Texts(iter_text_rows(rows, text_column), columns=table_columns, unit="row")


def parse_vector_settings(layer: str | None, **values: Any) -> "VectorSettings":
    """Return the vector settings. Raises SettingsError.

    Args:
        layer: The value of --layer.
        **values: The other settings by name.
    """
    from bertsmith.use.vector_settings import build_vector_settings

    return build_vector_settings(parse_numbers("--layer", layer, int), **values)


def _print_vectors(
    embedder: "Embedder",
    texts: _Texts,
    settings: "VectorSettings",
    batch_tokens: int | None,
    unknown: UnknownTokenWarning,
) -> None:
    """Print the vectors as JSON lines, and log how many texts were truncated."""
    from bertsmith.use.embed_chunks import embed_chunks
    from bertsmith.use.vector_writers import format_json_line

    chunks = embed_chunks(
        embedder,
        texts.lines,
        embedder.resolve_settings(settings),
        batch_tokens=batch_tokens,
        unbuffered=texts.unbuffered,
    )
    num_truncated = 0
    for chunk in chunks:
        rows: Sequence[Mapping[str, Any] | None] = [None] * len(chunk.texts)
        if chunk.rows is not None:
            rows = chunk.rows
        for text, vectors, row in zip(chunk.texts, chunk.vectors, rows, strict=True):
            print_line(format_json_line(text, vectors, row, texts.columns))
        sys.stdout.flush()
        num_truncated += chunk.num_truncated
        if texts.may_be_endless:
            unknown.warn()
    _log_num_truncated(num_truncated, embedder)


def _write_vectors(
    embedder: "Embedder",
    texts: _Texts,
    out: Path,
    settings: "VectorSettings",
    batch_tokens: int | None,
    processes: "ProcessGroup",
    *,
    append: bool,
    as_json: bool,
) -> None:
    """Write the vectors to a file; log the file and a next step. Print a summary if ``as_json``."""
    from bertsmith.use.embed_lines import count_saved_lines, embed_lines

    try:
        summary = embed_lines(
            embedder,
            texts.lines,
            out,
            settings,
            append=append,
            columns=texts.columns,
            total=texts.total,
            batch_tokens=batch_tokens,
            progress=TerminalProgress(),
            processes=processes,
        )
    except (KeyboardInterrupt, Terminated) as error:
        num_saved = count_saved_lines(out.resolve() if append else out)
        if num_saved:
            saved = count_noun(num_saved, f"{texts.unit} is saved", f"{texts.unit}s are saved")
            log(f"stopped; {saved}; run the same command again to continue")
        elif out.exists() and not append:
            log(f"stopped; {out} is complete")
        else:
            log("stopped; nothing was saved")
        if isinstance(error, Terminated):
            raise
        raise typer.Exit(SIGNAL_EXIT_OFFSET + signal.SIGINT) from None
    if as_json:
        print_json(
            {
                "out": str(out),
                "num_lines": summary.num_lines,
                "num_added": summary.num_added,
                "width": summary.width,
                "num_truncated": summary.num_truncated,
                "unknown_share": summary.unknown_share,
            }
        )
    _log_num_truncated(summary.num_truncated, embedder)
    unit = "token" if settings.pooling == "none" else texts.unit
    if append:
        log(f"added {count_noun(summary.num_added, texts.unit)} to {out}")
    log(
        f"wrote {out}: {summary.num_lines:,} {texts.unit}s, one vector of {summary.width:,} "
        f"numbers per {unit}"
    )
    next_step = _NEXT_STEPS[out.suffix]
    log(f"next: {next_step.format(python_path=repr(str(out)), shell_path=quote_path(out))}")


def _log_num_truncated(count: int, embedder: "Embedder") -> None:
    if count:
        log(f"lines truncated to the model's {embedder.max_seqlen:,} tokens: {count:,}")
