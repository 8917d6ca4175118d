"""Embed endless lines, into a file or one window after another, with flat memory.

It never knows how a vector is made. A run may be stopped at any moment, and gone on with.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.bundle import hash_model_files
from bertsmith.errors import InputError
from bertsmith.files import parse_json, sync, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
from bertsmith.use.nearest_neighbors import import_usearch
from bertsmith.use.table_input import Record
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
#: Lines of a window: between two commits.
_LINES = 2048
#: Characters after which a window ends before it is full, so that long lines fill no memory.
_CHARACTERS = 2**22
#: Likewise where each token has its vector: characters times the vectors' width.
_NUMBERS = 2**26


@dataclass(frozen=True)
class EmbeddedWindow:
    """Some texts, what was made of them, and how many of them were cut off."""

    texts: list[str]
    vectors: Vectors
    num_truncated: int
    #: The rows of a table that the texts stand in.
    rows: list[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class EmbeddingSummary:
    """What was written: lines, the vectors' width, and how many lines were too long, so cut.

    unknown_share: the share of [UNK] among the tokens of the lines that this call embedded.
    """

    path: Path
    num_lines: int
    width: int
    num_truncated: int
    unknown_share: float = 0.0


@dataclass(frozen=True)
class _State:
    """Where a run stands. read: SHA-256 of the lines that are done; place: the sink's."""

    settings: dict[str, Any]
    lines: int = 0
    read: str = hashlib.sha256().hexdigest()
    place: int = 0
    cut_off: int = 0


def embed_windows(
    embedder: Embedder,
    lines: Iterable[str | Record],
    recipe: VectorSpec,
    *,
    batch_tokens: int | None = None,
    unbuffered: bool = False,
    progress: Progress | None = None,
) -> Iterator[EmbeddedWindow]:
    """Yield lines with their vectors, some at a time. ``unbuffered``: each before the next is read."""
    progress = progress or NullProgress()
    for window in _windows(iter(lines), recipe, 1 if unbuffered else _LINES):
        texts = [line_text(line) for line in window]
        rows = [line.cells for line in window if isinstance(line, Record)] or None
        if recipe.pooling == "none":
            told = embedder.encode_tokens_with_spec(texts, recipe, batch_tokens)
            progress.advance(len(texts))
            yield EmbeddedWindow(texts, told, sum(own.is_truncated for own in told), rows)
            continue
        encoded = embedder.tokenize(texts)
        vectors = np.empty((len(texts), recipe.width), np.float32)
        for numbers, own in embedder.encode_batches(encoded.sequences, recipe, batch_tokens):
            vectors[numbers] = own
            progress.advance(len(numbers))
        yield EmbeddedWindow(texts, vectors, encoded.num_truncated, rows)


def line_text(line: str | Record) -> str:
    """Return the text of a line or of a row."""
    return line if isinstance(line, str) else line.text


def _windows(
    lines: Iterator[str | Record], recipe: VectorSpec, most: int
) -> Iterator[list[str | Record]]:
    room = _NUMBERS // recipe.width if recipe.pooling == "none" else _CHARACTERS
    window: list[str | Record] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(line_text(line))
        if len(window) == most or characters > room:
            yield window
            window, characters = [], 0
    if window:
        yield window


def embed_lines(
    embedder: Embedder,
    lines: Iterable[str | Record],
    out: Path | str,
    settings: VectorSettings,
    *,
    columns: TableColumns | None = None,
    resume: bool = False,
    total: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> EmbeddingSummary:
    """Write the vectors of lines to ``out``: .npy, .jsonl, .parquet, or .index to be searched.

    What is being made stands in ``out`` + ".partial"; ``resume`` goes on with it, if it is there,
    after checking that the lines that are done are the same. total: of the lines, if it is known.
    columns: of the table whose rows the lines are; .jsonl and .parquet get them, too.
    Raises QuestionError where something is in the way, or nothing can be written.
    """
    out, progress = Path(out), progress or NullProgress()
    recipe, about = embedder.resolve_settings(settings), _settings(embedder, settings)
    make, counts = _sink(out, recipe, about, columns), TokenCounts()
    embedder = embedder.with_token_counter(counts)
    with _begun(out) as partial:
        state = _taken_up(partial, about, resume=resume)
        rest, read = iter(lines), hashlib.sha256()
        _skip(rest, read, state, partial)
        progress.start("embedding", total, "lines")
        progress.advance(state.lines)
        windows = embed_windows(
            embedder, rest, recipe, batch_tokens=batch_tokens, progress=progress
        )
        with _writing(partial):
            with closing(make(partial / DATA_FILE, state.place)) as sink:
                try:
                    state = _written(windows, sink, read, state, partial)
                finally:
                    progress.finish()
                if not state.lines:
                    raise InputError("there is no line to embed")
                sink.finish(progress)
            (partial / DATA_FILE).replace(out)
            sync(out.parent)
        shutil.rmtree(partial)
    return EmbeddingSummary(out, state.lines, recipe.width, state.cut_off, counts.unknown_share)


def _written(
    windows: Iterator[EmbeddedWindow],
    sink: VectorWriter,
    read: "hashlib._Hash",
    state: _State,
    partial: Path,
) -> _State:
    """Write windows to a sink, each of them safe before the next; return where the run stands."""
    for window in windows:
        sink.append(window.texts, window.vectors, window.rows)
        _note(read, map(Record, window.texts, window.rows) if window.rows else window.texts)
        state = replace(
            state,
            lines=state.lines + len(window.texts),
            read=read.hexdigest(),
            place=sink.commit(),
            cut_off=state.cut_off + window.num_truncated,
        )
        write_json(partial / STATE_FILE, asdict(state))
    return state


def _sink(
    out: Path, recipe: VectorSpec, about: dict[str, Any], columns: TableColumns | None
) -> Callable[[Path, int], VectorWriter]:
    """Return what writes the form that a name ends with, given a path and where to go on."""
    forms: dict[str, Callable[[Path, int], VectorWriter]] = {
        ".npy": lambda path, place: NpyWriter(path, recipe.width, place),
        ".jsonl": lambda path, place: JsonlWriter(path, place, columns),
        ".parquet": lambda path, place: ParquetWriter(path, place, columns),
        ".index": lambda path, place: IndexWriter(path, recipe.width, place, about),
    }
    if out.suffix not in forms:
        raise InputError(f"{out}: expected a name that ends in {', '.join(forms)}")
    if recipe.pooling == "none" and out.suffix in (".npy", ".index"):
        raise InputError(f"{out}: a vector a token fits .jsonl and .parquet only")
    # What is not installed is missed now, not after hours.
    if out.suffix == ".parquet":
        import_pyarrow()
    if out.suffix == ".index":
        import_usearch()
    return forms[out.suffix]


def _settings(embedder: Embedder, settings: VectorSettings) -> dict[str, Any]:
    """Return what must be the same when a run goes on, and where the model stands now."""
    made = {"path": str(embedder.path.resolve()), "model": hash_model_files(embedder.path)}
    return made | {"fast": embedder.fast} | settings.model_dump(mode="json")


@contextmanager
def _begun(out: Path) -> Iterator[Path]:
    """Yield the folder of what is being made, alone; it goes away again if it holds no line."""
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: it is there already; choose another name, or remove it")
    partial = out.with_name(f"{out.name}.partial")
    with _writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{partial}: another process is writing it now") from None
        try:
            yield partial
        except BaseException:
            _tidy(partial)
            raise
    finally:
        os.close(descriptor)


def _tidy(partial: Path) -> None:
    """Take the folder of a run away that did nothing yet, so that it is in nobody's way."""
    with suppress(InputError, OSError):
        state = _read(partial)
        if state is None:
            # It goes only if it is empty.
            partial.rmdir()
        elif not state.lines:
            shutil.rmtree(partial)


def _read(partial: Path) -> _State | None:
    """Return where a stopped run stands; None where there is none. Raises QuestionError."""
    try:
        return _State(**parse_json((partial / STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(f"{partial / STATE_FILE}: it cannot be read; remove {partial}") from None


def _taken_up(partial: Path, settings: dict[str, Any], *, resume: bool) -> _State:
    """Return where the run stands. Nothing of anybody else is written over."""
    state = _read(partial)
    if state is None:
        if any(not own.name.startswith(f".{STATE_FILE}") for own in partial.iterdir()):
            raise InputError(f"{partial}: this folder holds something else; remove it")
        with _writing(partial):
            write_json(partial / STATE_FILE, asdict(_State(settings)))
        return _State(settings)
    if not state.lines:
        return _State(settings)
    if not resume:
        raise InputError(
            f"{partial}: a run that was stopped left this; --resume goes on with it, or remove it"
        )
    changed = [
        name for name, own in settings.items() if name != "path" and state.settings.get(name) != own
    ]
    if changed:
        raise InputError(
            f"{partial}: it was begun with another {', '.join(changed)}; give the same again, or "
            "remove it"
        )
    return replace(state, settings=settings)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Say what a full disk or a folder that may not be written comes to."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or partial}: cannot be written: {error.strerror or error}; what is "
            "done is safe, and --resume goes on from there"
        ) from error


def _note(read: "hashlib._Hash", lines: Iterable[str | Record]) -> int:
    """Take lines, or rows with all columns, into the hash of all that was read; return how many."""
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007
        text = line if isinstance(line, str) else to_json_line(line.cells)
        read.update(text.encode() + b"\n")
    return count


def _skip(
    rest: Iterator[str | Record], read: "hashlib._Hash", state: _State, partial: Path
) -> None:
    """Read the lines that are done, and check that they are the same."""
    found = _note(read, islice(rest, state.lines))
    if found < state.lines or read.hexdigest() != state.read:
        raise InputError(
            f"{partial}: the first {state.lines:,} lines are not those that were embedded; give "
            "the same file, or remove what was begun"
        )
