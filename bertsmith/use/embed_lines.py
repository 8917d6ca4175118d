"""Embed any number of lines into a file in constant memory; interrupted runs can be resumed."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files
from bertsmith.compatibility import upgrade_embedding_state
from bertsmith.errors import InputError
from bertsmith.files import hold_lock, parse_json, sync, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_chunks import EmbeddedChunk, embed_chunks
from bertsmith.use.nearest_neighbors import import_usearch
from bertsmith.use.table_input import TextRow
from bertsmith.use.table_output import import_pyarrow, to_json_line
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vector_writers import (
    IndexWriter,
    JsonlWriter,
    NpyWriter,
    ParquetWriter,
    TableColumns,
    VectorWriter,
)
from bertsmith.use.vectors import VectorSpec

STATE_FILE, DATA_FILE = "state.json", "data"


@dataclass(frozen=True)
class EmbeddingSummary:
    """The result of ``embed_lines``.

    Attributes:
        path: The output file.
        num_lines: Number of lines in the file.
        width: Width of the vectors.
        num_truncated: How many of the lines were truncated.
        unknown_share: Fraction of [UNK] among the tokens that this process embedded, without those
            of earlier, interrupted calls.
    """

    path: Path
    num_lines: int
    width: int
    num_truncated: int
    unknown_share: float = 0.0


@dataclass(frozen=True)
class _RunState:
    """The state of an unfinished run. The field names are the keys of ``state.json``.

    Attributes:
        settings: The model, the settings of the vectors, and the column of a table.
        num_lines: Number of lines written so far.
        lines_sha256: SHA-256 of these lines, in hexadecimal.
        position: Position of the writer after these lines; see ``VectorWriter.commit``.
        num_truncated: How many of these lines were truncated.
    """

    settings: dict[str, Any]
    num_lines: int = 0
    lines_sha256: str = hashlib.sha256().hexdigest()
    position: int = 0
    num_truncated: int = 0


def embed_lines(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    out: Path | str,
    settings: VectorSettings,
    *,
    columns: TableColumns | None = None,
    total: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> EmbeddingSummary:
    """Write the vectors of lines to a file, or continue a run that was interrupted.

    Until the file is finished, the output and the state of the run are in a directory named like
    the file with ".partial" appended. If this directory exists, the run continues after the lines
    that are written.

    With several processes, the main process calls this function, and the others ``embed_share``.

    Args:
        embedder: The model.
        lines: Texts, or table rows with a text.
        out: A new path that ends in .npy, .jsonl, .parquet, or .index (a directory for search).
        settings: How to compute the vectors.
        columns: Columns of the input table, which .jsonl and .parquet output includes.
        total: Number of lines, if known.
        batch_tokens: Maximum number of tokens per batch.
        progress: Receives the number of embedded lines.
        processes: The processes that divide the lines among them.

    Raises:
        InputError: The output exists or cannot be written, an unfinished run has other settings or
            other lines, or there are no lines.
    """
    out = Path(out)
    progress = progress or NullProgress()
    spec = embedder.resolve_settings(settings)
    vector_settings = _describe_vectors(embedder, settings)
    open_writer = _create_writer_factory(out, spec, vector_settings, columns)
    run_settings = {**vector_settings, "text_column": columns.text_column if columns else None}
    counts = TokenCounts()
    embedder = embedder.with_token_counter(counts)
    with _lock_partial_dir(out) as partial:
        state = _load_or_create_state(partial, run_settings)
        remaining_lines = iter(lines)
        lines_hash = hashlib.sha256()
        _skip_finished_lines(remaining_lines, lines_hash, state, partial)
        progress.start("embedding", total, "lines", state.num_lines)
        processes.broadcast(state.num_lines)
        chunks = embed_chunks(
            embedder,
            remaining_lines,
            spec,
            batch_tokens=batch_tokens,
            progress=progress,
            processes=processes,
        )
        with _convert_write_errors(partial):
            with closing(open_writer(partial / DATA_FILE, state.position)) as writer:
                try:
                    state = _write_chunks(chunks, writer, lines_hash, state, partial)
                finally:
                    progress.finish()
                if not state.num_lines:
                    raise InputError("there is no line to embed; expected at least one line")
                writer.finish(progress)
            (partial / DATA_FILE).replace(out)
            try:
                sync(out.parent)
                shutil.rmtree(partial)
            except BaseException:
                # Also after Ctrl-C, because the output is complete.
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return EmbeddingSummary(
        out, state.num_lines, spec.width, state.num_truncated, counts.unknown_share
    )


def count_saved_lines(out: Path) -> int:
    """Return how many lines an unfinished run has written; 0 if there is none.

    Args:
        out: The output file of the run.
    """
    state = _read_state(_get_partial_dir(out))
    return 0 if state is None else state.num_lines


def embed_share(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    settings: VectorSettings,
    processes: ProcessGroup,
    *,
    batch_tokens: int | None = None,
) -> None:
    """Embed the lines of this process, while the main process runs ``embed_lines``.

    Args:
        embedder: The model.
        lines: The same texts or table rows as in the main process.
        settings: How to compute the vectors.
        processes: The processes that divide the lines among them.
        batch_tokens: Maximum number of tokens per batch.
    """
    spec = embedder.resolve_settings(settings)
    num_finished = processes.broadcast(0)
    remaining_lines = islice(lines, num_finished, None)
    chunks = embed_chunks(
        embedder, remaining_lines, spec, batch_tokens=batch_tokens, processes=processes
    )
    for _ in chunks:
        raise AssertionError("only the main process receives chunks")


def _write_chunks(
    chunks: Iterator[EmbeddedChunk],
    writer: VectorWriter,
    lines_hash: "hashlib._Hash",
    state: _RunState,
    partial: Path,
) -> _RunState:
    """Write chunks, and update the state file after each chunk; return the final state."""
    for chunk in chunks:
        writer.append(chunk.texts, chunk.vectors, chunk.rows)
        lines: Iterable[str | TextRow] = chunk.texts
        if chunk.rows:
            lines = map(TextRow, chunk.texts, chunk.rows)
        _hash_lines(lines_hash, lines)
        state = replace(
            state,
            num_lines=state.num_lines + len(chunk.texts),
            lines_sha256=lines_hash.hexdigest(),
            position=writer.commit(),
            num_truncated=state.num_truncated + chunk.num_truncated,
        )
        write_json(partial / STATE_FILE, asdict(state))
    return state


def _create_writer_factory(
    out: Path, spec: VectorSpec, vector_settings: dict[str, Any], columns: TableColumns | None
) -> Callable[[Path, int], VectorWriter]:
    """Return the function that opens a writer at a path and position, for the suffix of ``out``.

    Raises:
        InputError: The suffix is unknown, or the format cannot hold token vectors.
        MissingExtraError: The format needs a package that is not installed.
    """
    factories: dict[str, Callable[[Path, int], VectorWriter]] = {
        ".npy": lambda path, position: NpyWriter(path, spec.width, position),
        ".jsonl": lambda path, position: JsonlWriter(path, position, columns),
        ".parquet": lambda path, position: ParquetWriter(path, position, columns),
        ".index": lambda path, position: IndexWriter(path, spec.width, position, vector_settings),
    }
    if out.suffix not in factories:
        raise InputError(f"{out}: expected a name that ends in {', '.join(factories)}")
    if spec.pooling == "none" and out.suffix in (".npy", ".index"):
        raise InputError(f"{out}: vectors per token can only be written to .jsonl and .parquet")
    # Report a missing package before computing for hours, not afterwards.
    if out.suffix == ".parquet":
        import_pyarrow()
    if out.suffix == ".index":
        import_usearch()
    return factories[out.suffix]


def _describe_vectors(embedder: Embedder, settings: VectorSettings) -> dict[str, Any]:
    """Return the model and the settings of the vectors, as stored in an index and a run's state.

    A resumed run must have the same settings, except that the model may have been moved.
    """
    return {
        "model_path": str(embedder.path.resolve()),
        "model_sha256": hash_model_files(embedder.path),
        "fast": embedder.fast,
        **settings.model_dump(mode="json"),
        "prompt_name": embedder.prompt_name,
    }


def _get_partial_dir(out: Path) -> Path:
    """Return the directory for unfinished output."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def _lock_partial_dir(out: Path) -> Iterator[Path]:
    """Create and lock the directory for unfinished output.

    If the block fails before any line is written, the directory is removed.
    """
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: already exists; choose another name or remove it")
    partial = _get_partial_dir(out)
    with _convert_write_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    error = InputError(f"{partial}: another process is writing to it; wait until it has finished")
    with hold_lock(partial, error=error):
        try:
            yield partial
        except BaseException:
            _remove_if_empty(partial)
            raise


def _remove_if_empty(partial: Path) -> None:
    """Remove the directory of a run that has not written any lines."""
    with suppress(InputError, OSError):
        state = _read_state(partial)
        if state is None:
            # rmdir fails if the directory contains any files.
            partial.rmdir()
        elif not state.num_lines:
            shutil.rmtree(partial)


def _read_state(partial: Path) -> _RunState | None:
    """Read the state of an unfinished run; return None if there is no state file.

    If the written lines are missing, the state has no lines.

    Raises:
        InputError: The file is damaged.
    """
    try:
        fields = dict(parse_json((partial / STATE_FILE).read_text(encoding="utf-8")))
        state = _RunState(**upgrade_embedding_state(fields))
        # A run that is killed when its output is complete leaves its state. Parts of Parquet are in
        # a directory whose name starts with that of the file.
        has_data = any(partial.glob(f"{DATA_FILE}*"))
        return state if has_data else _RunState(state.settings)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(
            f"{partial / STATE_FILE}: this file is damaged; remove {partial} and start again"
        ) from None


def _load_or_create_state(partial: Path, settings: dict[str, Any]) -> _RunState:
    """Load the state of an unfinished run, or create the state of a new run.

    Raises:
        InputError: The directory contains unrelated files, or the run has other settings.
    """
    state = _read_state(partial)
    if state is None and any(
        not file.name.startswith(f".{STATE_FILE}") for file in partial.iterdir()
    ):
        raise InputError(f"{partial}: this directory contains unrelated files; remove {partial}")
    if state is None or not state.num_lines:
        # Nothing is written yet, so the settings may differ.
        with _convert_write_errors(partial):
            write_json(partial / STATE_FILE, asdict(_RunState(settings)))
        return _RunState(settings)
    # Version 0.2 did not store the column.
    old_settings = {"text_column": settings["text_column"], **state.settings}
    changed = [
        name
        for name, value in settings.items()
        if name != "model_path" and old_settings.get(name) != value
    ]
    if changed:
        names = ", ".join(name.removesuffix("_sha256").replace("_", " ") for name in changed)
        raise InputError(
            f"{partial}: this unfinished run was started with a different {names}; use the same "
            f"values, or remove {partial}"
        )
    return replace(state, settings=settings)


@contextmanager
def _convert_write_errors(partial: Path) -> Iterator[None]:
    """Convert an OSError, such as a full disk, to an InputError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or partial}: cannot be written: {error.strerror or error}; fix this "
            "and run the same command again, which continues after the saved lines"
        ) from error


def _hash_lines(lines_hash: "hashlib._Hash", lines: Iterable[str | TextRow]) -> int:
    """Update the hash with lines, or table rows with all their columns; return their number."""
    num_lines = 0
    for line in lines:
        text = line if isinstance(line, str) else to_json_line(line.cells)
        lines_hash.update(text.encode() + b"\n")
        num_lines += 1
    return num_lines


def _skip_finished_lines(
    lines: Iterator[str | TextRow], lines_hash: "hashlib._Hash", state: _RunState, partial: Path
) -> None:
    """Skip the lines that are already written.

    Raises:
        InputError: The skipped lines are not the ones that were written.
    """
    num_skipped = _hash_lines(lines_hash, islice(lines, state.num_lines))
    if num_skipped < state.num_lines or lines_hash.hexdigest() != state.lines_sha256:
        raise InputError(
            f"{partial}: the first {state.num_lines:,} lines differ from those already embedded; "
            f"give the same file, or remove {partial}"
        )
