"""Embed an unbounded stream of lines into a file, in constant memory; runs can be resumed."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.bundle import hash_model_files
from bertsmith.compatibility import upgrade_embedding_state
from bertsmith.errors import InputError
from bertsmith.files import hold_lock, parse_json, sync, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
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
    Vectors,
    VectorWriter,
)
from bertsmith.use.vectors import VectorSpec

STATE_FILE, DATA_FILE = "state.json", "data"
#: Maximum number of lines per window, which is the unit of computing and committing.
_MAX_LINES = 2048
#: Characters after which a window ends early, so that long lines do not fill the memory.
_MAX_CHARACTERS = 2**22
#: The same limit for token vectors: characters times the width of a vector.
_MAX_TOKEN_VECTOR_ELEMENTS = 2**26


@dataclass(frozen=True)
class EmbeddedChunk:
    """Consecutive lines with their vectors.

    Attributes:
        texts: The text of each line.
        vectors: The vectors of the texts.
        num_truncated: How many of the texts were truncated.
        rows: The table rows that contain the texts, if the input is a table.
    """

    texts: list[str]
    vectors: Vectors
    num_truncated: int
    rows: list[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class EmbeddingSummary:
    """Summary of a finished ``embed_lines``.

    Attributes:
        path: The file written.
        num_lines: Number of lines.
        width: Width of the vectors.
        num_truncated: How many lines were truncated.
        unknown_share: Fraction of [UNK] among the tokens embedded by this call.
    """

    path: Path
    num_lines: int
    width: int
    num_truncated: int
    unknown_share: float = 0.0


@dataclass(frozen=True)
class _RunState:
    """Progress of a run. The field names are the keys of ``state.json``.

    Attributes:
        settings: Settings that must not change when the run is resumed.
        num_lines: Number of lines written.
        lines_sha256: SHA-256 of these lines, in hexadecimal.
        position: Position of the writer, as returned by ``VectorWriter.commit``.
        num_truncated: How many of the lines were truncated.
    """

    settings: dict[str, Any]
    num_lines: int = 0
    lines_sha256: str = hashlib.sha256().hexdigest()
    position: int = 0
    num_truncated: int = 0


def embed_chunks(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    spec: VectorSpec,
    *,
    batch_tokens: int | None = None,
    unbuffered: bool = False,
    progress: Progress | None = None,
) -> Iterator[EmbeddedChunk]:
    """Embed lines in windows.

    Args:
        embedder: The model.
        lines: Texts, or table rows with a text.
        spec: How to compute the vectors.
        batch_tokens: Maximum number of tokens per batch.
        unbuffered: Yield each line before reading the next.
        progress: Receives the number of lines.
    """
    progress = progress or NullProgress()
    for window in _split_into_chunks(iter(lines), spec, 1 if unbuffered else _MAX_LINES):
        texts = [get_line_text(line) for line in window]
        rows = [line.cells for line in window if isinstance(line, TextRow)] or None
        if spec.pooling == "none":
            token_vectors = embedder.encode_tokens_with_spec(texts, spec, batch_tokens)
            progress.advance(len(texts))
            num_truncated = sum(text.is_truncated for text in token_vectors)
            yield EmbeddedChunk(texts, token_vectors, num_truncated, rows)
            continue
        tokenized = embedder.tokenize(texts)
        vectors = np.empty((len(texts), spec.width), np.float32)
        batches = embedder.encode_batches(tokenized.sequences, spec, batch_tokens)
        for indices, batch_vectors in batches:
            vectors[indices] = batch_vectors
            progress.advance(len(indices))
        yield EmbeddedChunk(texts, vectors, tokenized.num_truncated, rows)


def get_line_text(line: str | TextRow) -> str:
    """Return the text of a line or table row."""
    return line if isinstance(line, str) else line.text


def _split_into_chunks(
    lines: Iterator[str | TextRow], spec: VectorSpec, max_lines: int
) -> Iterator[list[str | TextRow]]:
    is_per_token = spec.pooling == "none"
    max_characters = _MAX_TOKEN_VECTOR_ELEMENTS // spec.width if is_per_token else _MAX_CHARACTERS
    window: list[str | TextRow] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(get_line_text(line))
        if len(window) == max_lines or characters > max_characters:
            yield window
            window, characters = [], 0
    if window:
        yield window


def embed_lines(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    out: Path | str,
    settings: VectorSettings,
    *,
    columns: TableColumns | None = None,
    resume: bool = False,
    total: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> EmbeddingSummary:
    """Write the vectors of lines to a file.

    Unfinished output is in the directory ``out`` + ".partial".

    Args:
        embedder: The model.
        lines: Texts, or table rows with a text.
        out: A new path ending in .npy, .jsonl, .parquet, or .index (a directory for search).
        settings: How to compute the vectors.
        columns: Columns of the input table; .jsonl and .parquet output includes them.
        resume: Continue an unfinished run, after checking that its lines are the same.
        total: Number of lines, if known.
        batch_tokens: Maximum number of tokens per batch.
        progress: Receives the number of lines.

    Raises:
        InputError: The output exists, cannot be written or cannot be resumed, or there are no
            lines.
    """
    out, progress = Path(out), progress or NullProgress()
    spec, run_settings = embedder.resolve_settings(settings), _get_run_settings(embedder, settings)
    open_writer, counts = _create_writer_factory(out, spec, run_settings, columns), TokenCounts()
    embedder = embedder.with_token_counter(counts)
    with _lock_partial_dir(out) as partial:
        state = _load_or_create_state(partial, run_settings, resume=resume)
        remaining_lines, lines_hash = iter(lines), hashlib.sha256()
        _skip_finished_lines(remaining_lines, lines_hash, state, partial)
        progress.start("embedding", total, "lines")
        progress.advance(state.num_lines)
        windows = embed_chunks(
            embedder, remaining_lines, spec, batch_tokens=batch_tokens, progress=progress
        )
        with _explain_write_errors(partial):
            with closing(open_writer(partial / DATA_FILE, state.position)) as writer:
                try:
                    state = _write_chunks(windows, writer, lines_hash, state, partial)
                finally:
                    progress.finish()
                if not state.num_lines:
                    raise InputError("there is no line to embed")
                writer.finish(progress)
            (partial / DATA_FILE).replace(out)
            sync(out.parent)
        shutil.rmtree(partial)
    return EmbeddingSummary(
        out, state.num_lines, spec.width, state.num_truncated, counts.unknown_share
    )


def _write_chunks(
    windows: Iterator[EmbeddedChunk],
    writer: VectorWriter,
    lines_hash: "hashlib._Hash",
    state: _RunState,
    partial: Path,
) -> _RunState:
    """Write windows and commit each to disk before the next; return the final state."""
    for window in windows:
        writer.append(window.texts, window.vectors, window.rows)
        _hash_lines(
            lines_hash, map(TextRow, window.texts, window.rows) if window.rows else window.texts
        )
        state = replace(
            state,
            num_lines=state.num_lines + len(window.texts),
            lines_sha256=lines_hash.hexdigest(),
            position=writer.commit(),
            num_truncated=state.num_truncated + window.num_truncated,
        )
        write_json(partial / STATE_FILE, asdict(state))
    return state


def _create_writer_factory(
    out: Path, spec: VectorSpec, run_settings: dict[str, Any], columns: TableColumns | None
) -> Callable[[Path, int], VectorWriter]:
    """Return a function (path, position) -> writer for the format of ``out``.

    Raises:
        InputError: The suffix is unknown, or the format cannot hold token vectors.
        MissingExtraError: The format needs a package that is not installed.
    """
    factories: dict[str, Callable[[Path, int], VectorWriter]] = {
        ".npy": lambda path, position: NpyWriter(path, spec.width, position),
        ".jsonl": lambda path, position: JsonlWriter(path, position, columns),
        ".parquet": lambda path, position: ParquetWriter(path, position, columns),
        ".index": lambda path, position: IndexWriter(path, spec.width, position, run_settings),
    }
    if out.suffix not in factories:
        raise InputError(f"{out}: expected a name that ends in {', '.join(factories)}")
    if spec.pooling == "none" and out.suffix in (".npy", ".index"):
        raise InputError(f"{out}: vectors per token can only be written to .jsonl and .parquet")
    # Detect missing packages now instead of after hours of computing.
    if out.suffix == ".parquet":
        import_pyarrow()
    if out.suffix == ".index":
        import_usearch()
    return factories[out.suffix]


def _get_run_settings(embedder: Embedder, settings: VectorSettings) -> dict[str, Any]:
    """Return the settings that must not change on resume, and the model's current path."""
    path = str(embedder.path.resolve())
    model = {"model_path": path, "model_sha256": hash_model_files(embedder.path)}
    return model | {"fast": embedder.fast} | settings.model_dump(mode="json")


@contextmanager
def _lock_partial_dir(out: Path) -> Iterator[Path]:
    """Create and lock the directory for unfinished output; remove it if no line was written."""
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: already exists; choose another name or remove it")
    partial = out.with_name(f"{out.name}.partial")
    with _explain_write_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    error = InputError(f"{partial}: another process is writing to it")
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
            # rmdir only removes an empty directory.
            partial.rmdir()
        elif not state.num_lines:
            shutil.rmtree(partial)


def _read_state(partial: Path) -> _RunState | None:
    """Read the state of an unfinished run; None if there is none.

    Raises:
        InputError: The file is damaged.
    """
    try:
        fields = dict(parse_json((partial / STATE_FILE).read_text(encoding="utf-8")))
        return _RunState(**upgrade_embedding_state(fields))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(f"{partial / STATE_FILE}: cannot be read; remove {partial}") from None


def _load_or_create_state(partial: Path, settings: dict[str, Any], *, resume: bool) -> _RunState:
    """Load the state of an unfinished run, or create one. Never overwrites unrelated files.

    Raises:
        InputError: The directory holds other files, or the run cannot be resumed.
    """
    state = _read_state(partial)
    if state is None:
        if any(not file.name.startswith(f".{STATE_FILE}") for file in partial.iterdir()):
            raise InputError(f"{partial}: this directory contains unrelated files; remove it")
        with _explain_write_errors(partial):
            write_json(partial / STATE_FILE, asdict(_RunState(settings)))
        return _RunState(settings)
    if not state.num_lines:
        return _RunState(settings)
    if not resume:
        raise InputError(
            f"{partial}: an unfinished run exists; continue it with --resume, or remove it"
        )
    changed = [
        name
        for name, value in settings.items()
        if name != "model_path" and state.settings.get(name) != value
    ]
    if changed:
        names = ", ".join(name.removesuffix("_sha256").replace("_", " ") for name in changed)
        raise InputError(
            f"{partial}: the run was started with a different {names}; use the same, or remove the "
            "directory"
        )
    return replace(state, settings=settings)


@contextmanager
def _explain_write_errors(partial: Path) -> Iterator[None]:
    """Turn OSError, such as a full disk, into an InputError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or partial}: cannot be written: {error.strerror or error}; finished "
            "lines are saved, continue with --resume"
        ) from error


def _hash_lines(lines_hash: "hashlib._Hash", lines: Iterable[str | TextRow]) -> int:
    """Add lines, or rows with all their columns, to the hash; return how many."""
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007
        text = line if isinstance(line, str) else to_json_line(line.cells)
        lines_hash.update(text.encode() + b"\n")
    return count


def _skip_finished_lines(
    lines: Iterator[str | TextRow], lines_hash: "hashlib._Hash", state: _RunState, partial: Path
) -> None:
    """Read the lines that are already written, and check that they are the same."""
    count = _hash_lines(lines_hash, islice(lines, state.num_lines))
    if count < state.num_lines or lines_hash.hexdigest() != state.lines_sha256:
        raise InputError(
            f"{partial}: the first {state.num_lines:,} lines differ from those already embedded; "
            "give the same file, or remove the directory"
        )
