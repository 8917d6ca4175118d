"""Embed any number of lines into a file in constant memory; interrupted runs can be resumed."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.bundle import hash_model_files
from bertsmith.errors import InputError
from bertsmith.files import sync, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_chunks import EmbeddedChunk, embed_chunks
from bertsmith.use.embed_state import (
    DATA_FILE,
    STATE_FILE,
    RunState,
    convert_write_errors,
    describe_changed_settings,
    finish_replacement,
    get_partial_dir,
    hash_lines,
    load_or_create_state,
    lock_partial_dir,
    read_state,
    replace_output,
    skip_finished_lines,
)
from bertsmith.use.nearest_neighbors import import_usearch
from bertsmith.use.search_index import (
    MANIFEST_FILE,
    IndexWriter,
    copy_index,
    count_index_lines,
    hash_index_lines,
    read_index_manifest,
)
from bertsmith.use.table_input import TextRow
from bertsmith.use.table_output import import_pyarrow
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vector_writers import (
    JsonlWriter,
    NpyWriter,
    ParquetWriter,
    TableColumns,
    VectorWriter,
)
from bertsmith.use.vectors import VectorSpec


@dataclass(frozen=True)
class EmbeddingSummary:
    """The result of ``embed_lines``.

    Attributes:
        path: The output file.
        num_lines: Number of lines in the file.
        num_added: How many of the lines this run has added: all, except for an existing index.
        width: Width of the vectors.
        num_truncated: How many of the added lines were truncated.
        unknown_share: Fraction of [UNK] among the tokens that this process embedded, without those
            of earlier, interrupted calls.
    """

    path: Path
    num_lines: int
    num_added: int
    width: int
    num_truncated: int
    unknown_share: float = 0.0


def embed_lines(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    out: Path | str,
    settings: VectorSettings,
    *,
    append: bool = False,
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
        append: Whether to add the lines to an existing index, in a single process. The index is
            replaced when the lines are embedded.
        columns: Columns of the input table, which .jsonl and .parquet output includes.
        total: Number of lines, if known.
        batch_tokens: Maximum number of tokens per batch.
        progress: Receives the number of embedded lines.
        processes: The processes that divide the lines among them.

    Raises:
        InputError: The output exists or cannot be written, an unfinished run has other settings or
            other lines, there are no lines, or the index to append to does not exist or has other
            settings.
    """
    out = Path(out).resolve() if append else Path(out)
    progress = progress or NullProgress()
    spec = embedder.resolve_settings(settings)
    vector_settings = _describe_vectors(embedder, settings)
    open_writer = _create_writer_factory(out, spec, vector_settings, columns)
    run_settings = {**vector_settings, "text_column": columns.text_column if columns else None}
    counts = TokenCounts()
    embedder = embedder.with_token_counter(counts)
    with lock_partial_dir(out, replaces_output=append) as partial:
        num_indexed_lines, index_sha256 = 0, ""
        if append:
            completed = _complete_interrupted_append(out, partial, lines)
            if completed is not None:
                return _summarize(out, completed, spec, counts)
            _check_index_settings(out, vector_settings)
            num_indexed_lines, index_sha256 = count_index_lines(out), hash_index_lines(out)
        state = load_or_create_state(partial, run_settings, num_indexed_lines, index_sha256)
        remaining_lines = iter(lines)
        lines_hash = hashlib.sha256()
        skip_finished_lines(remaining_lines, lines_hash, state, partial)
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
        with convert_write_errors(partial):
            if append and not state.num_lines:
                copy_index(out, partial / DATA_FILE)
            with closing(open_writer(partial / DATA_FILE, state.position)) as writer:
                try:
                    state = _write_chunks(chunks, writer, lines_hash, state, partial)
                finally:
                    progress.finish()
                if not state.num_lines:
                    raise InputError("there is no line to embed; expected at least one line")
                writer.finish(progress)
            if append:
                replace_output(out, partial, state)
            else:
                (partial / DATA_FILE).replace(out)
            try:
                sync(out.parent)
                shutil.rmtree(partial)
            except BaseException:
                # Also after Ctrl-C, because the output is complete.
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return _summarize(out, state, spec, counts)


def _summarize(
    out: Path, state: RunState, spec: VectorSpec, counts: TokenCounts
) -> EmbeddingSummary:
    return EmbeddingSummary(
        out,
        state.num_indexed_lines + state.num_lines,
        state.num_lines,
        spec.width,
        state.num_truncated,
        counts.unknown_share,
    )


def _check_index_settings(index: Path, vector_settings: Mapping[str, Any]) -> None:
    """Raise InputError unless the lines of an index were embedded with the same settings.

    Args:
        index: The index.
        vector_settings: The model and the settings of the vectors of other lines.
    """
    changed = describe_changed_settings(read_index_manifest(index), vector_settings)
    if changed:
        raise InputError(
            f"{index}: its lines were embedded with a different {changed}; use the model and the "
            f"options with which it was made ({MANIFEST_FILE}), or make a new index"
        )


def _complete_interrupted_append(
    out: Path, partial: Path, lines: Iterable[str | TextRow]
) -> RunState | None:
    """Complete a run that was interrupted while it replaced the index with the added lines.

    Args:
        out: The index.
        partial: The directory of the unfinished run.
        lines: The lines to add, which are not added again.

    Returns:
        The final state of the interrupted run, None if there is no such run, or its index was
        removed.

    Raises:
        InputError: The interrupted run added other lines.
    """
    state = read_state(partial)
    if state is None or not state.is_complete:
        return None
    with convert_write_errors(partial):
        finish_replacement(out, partial)
        if not out.exists():
            (partial / STATE_FILE).unlink()
            return None
        lines_hash = hashlib.sha256()
        hash_lines(lines_hash, lines)
        shutil.rmtree(partial)
    if lines_hash.hexdigest() != state.lines_sha256:
        raise InputError(
            f"{out}: an interrupted command had already embedded {state.num_lines:,} other lines, "
            "which are now in the index; run this command again to add its lines"
        )
    return state


def count_saved_lines(out: Path) -> int:
    """Return how many lines an unfinished run has written; 0 if there is none.

    Args:
        out: The output file of the run.
    """
    state = read_state(get_partial_dir(out))
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
    state: RunState,
    partial: Path,
) -> RunState:
    """Write chunks, and update the state file after each chunk; return the final state."""
    for chunk in chunks:
        writer.append(chunk.texts, chunk.vectors, chunk.rows)
        lines: Iterable[str | TextRow] = chunk.texts
        if chunk.rows:
            lines = map(TextRow, chunk.texts, chunk.rows)
        hash_lines(lines_hash, lines)
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
