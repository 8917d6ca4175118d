"""Embed endless lines into a file, with flat memory, stopping safely at any moment.

It never knows how a vector is made.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import QuestionError
from bertsmith.files import sync, write_json
from bertsmith.progress import Progress, Silent
from bertsmith.use.embed import Embedder, TokenVectors
from bertsmith.use.sinks import IndexSink, JsonSink, NpySink, ParquetSink, Sink
from bertsmith.use.vectors import Recipe, VectorSettings

STATE, DATA = "state.json", "data"
_NONE = np.empty((0, 0), np.float32)
#: Lines between two commits.
_WINDOW = 2048
#: Characters after which a window ends before it is full, so that long lines fill no memory.
_CHARACTERS = 2**22


@dataclass(frozen=True)
class Embedded:
    """What was written: lines, the vectors' width, and how many lines were too long, so cut."""

    path: Path
    lines: int
    width: int
    cut_off: int


@dataclass(frozen=True)
class _State:
    """Where a run stands. read: SHA-256 of the lines that are done; place: the sink's."""

    settings: dict[str, Any]
    lines: int = 0
    read: str = hashlib.sha256().hexdigest()
    place: int = 0
    cut_off: int = 0


def embed_lines(
    embedder: Embedder,
    lines: Iterable[str],
    out: Path,
    settings: VectorSettings,
    *,
    resume: bool = False,
    total: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Embedded:
    """Write the vectors of lines to ``out``: .npy, .jsonl, .parquet, or .index to be searched.

    What is being made stands in ``out`` + ".partial"; ``resume`` goes on with it, after checking
    that the lines that are done are the same. Raises QuestionError where something is in the way.
    """
    out, progress = Path(out), progress or Silent()
    partial = out.with_name(f"{out.name}.partial")
    recipe, about = embedder.recipe(settings), _settings(embedder, settings)
    make = _sink(out, recipe, about)
    state = _taken_up(out, partial, about, resume=resume)
    rest, read = iter(lines), hashlib.sha256()
    _skip(rest, read, state, partial)
    sink = make(partial / DATA, state.place)
    progress.start("embedding", total, "lines")
    progress.advance(state.lines)
    try:
        for window in _windows(rest):
            cut = _append(embedder, window, recipe, sink, batch_tokens)
            _note(read, window)
            state = _State(state.settings, state.lines + len(window), read.hexdigest(),
                           sink.commit(), state.cut_off + cut)  # fmt: skip
            write_json(partial / STATE, asdict(state))
            progress.advance(len(window))
    finally:
        progress.finish()
    if not state.lines:
        shutil.rmtree(partial)
        raise QuestionError("there is no line to embed")
    sink.finish()
    (partial / DATA).replace(out)
    sync(out.parent)
    shutil.rmtree(partial)
    return Embedded(out, state.lines, recipe.width, state.cut_off)


def _sink(out: Path, recipe: Recipe, about: dict[str, Any]) -> Callable[[Path, int], Sink]:
    """Return what writes the form that a name ends with, given a path and where to go on."""
    forms: dict[str, Callable[[Path, int], Sink]] = {
        ".npy": lambda path, place: NpySink(path, recipe.width, place),
        ".jsonl": JsonSink,
        ".parquet": ParquetSink,
        ".index": lambda path, place: IndexSink(path, recipe.width, place, about),
    }
    if out.suffix not in forms:
        raise QuestionError(f"{out}: expected a name that ends in {', '.join(forms)}")
    if recipe.pooling == "none" and out.suffix in (".npy", ".index"):
        raise QuestionError(f"{out}: a vector a token fits .jsonl and .parquet only")
    return forms[out.suffix]


def _settings(embedder: Embedder, settings: VectorSettings) -> dict[str, Any]:
    """Return what must be the same when a run goes on, as plain values."""
    made = {"model": str(embedder.path.resolve()), "fast": embedder.fast}
    return made | settings.model_dump(mode="json")


def _taken_up(out: Path, partial: Path, settings: dict[str, Any], *, resume: bool) -> _State:
    """Return where the run stands; a new one's folder is made. Nothing is written over."""
    if out.exists():
        raise QuestionError(f"{out}: it is there already; choose another name, or remove it")
    if not (partial / STATE).exists():
        shutil.rmtree(partial, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        return _State(settings)
    if not resume:
        raise QuestionError(
            f"{partial}: a run that was stopped left this; --resume goes on with it, or remove it"
        )
    state = _State(**json.loads((partial / STATE).read_text(encoding="utf-8")))
    if state.settings != settings:
        changed = [name for name, own in settings.items() if state.settings.get(name) != own]
        raise QuestionError(
            f"{partial}: it was begun with another {', '.join(changed)}; give the same again, or "
            "remove it"
        )
    return state


def _note(read: "hashlib._Hash", lines: Iterable[str]) -> int:
    """Take lines into the hash of all that was read; return how many."""
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007
        read.update(line.encode() + b"\n")
    return count


def _skip(rest: Iterator[str], read: "hashlib._Hash", state: _State, partial: Path) -> None:
    """Read the lines that are done, and check that they are the same."""
    found = _note(read, islice(rest, state.lines))
    if found < state.lines or read.hexdigest() != state.read:
        raise QuestionError(
            f"{partial}: the first {state.lines:,} lines are not those that were embedded; give "
            "the same file, or remove what was begun"
        )


def _windows(lines: Iterator[str]) -> Iterator[list[str]]:
    window: list[str] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(line)
        if len(window) == _WINDOW or characters > _CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _append(
    embedder: Embedder, texts: list[str], recipe: Recipe, sink: Sink, batch_tokens: int | None
) -> int:
    """Embed some texts into the sink; return how many were cut off."""
    if recipe.pooling == "none":
        found = embedder.token_vectors(texts, recipe)
        sink.append(texts, _NONE, [_told(own) for own in found])
        return sum(own.cut_off for own in found)
    encoded = embedder.ids(texts)
    vectors = np.empty((len(texts), recipe.width), np.float32)
    for numbers, own in embedder.batches(encoded.sequences, recipe, batch_tokens):
        vectors[numbers] = own
    sink.append(texts, vectors, ())
    return encoded.cut_off


def _told(own: TokenVectors) -> dict[str, Any]:
    return {"tokens": own.tokens, "ids": own.ids, "offsets": own.offsets,
            "vectors": own.vectors.tolist()}  # fmt: skip
