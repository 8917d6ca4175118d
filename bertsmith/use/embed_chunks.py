"""Embed lines in chunks, in one or several processes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.use.embed import Embedder
from bertsmith.use.table_input import TextRow
from bertsmith.use.vector_writers import Vectors
from bertsmith.use.vectors import VectorSpec

#: Maximum number of lines in a chunk. The lines of a chunk are embedded and written together.
_MAX_LINES = 2048
#: A chunk ends early when its lines have more characters than this, which limits memory.
_MAX_CHARACTERS = 2**22
#: For vectors per token, a chunk ends early when the number of characters times the vector width
#: exceeds this. Texts rarely have more tokens than characters, so the vectors take at most about
#: 256 MiB.
_MAX_TOKEN_VECTOR_ELEMENTS = 2**26


@dataclass(frozen=True)
class EmbeddedChunk:
    """Consecutive lines of the input and their vectors.

    Attributes:
        texts: The text of each line.
        vectors: The vectors of the texts.
        num_truncated: How many of the texts were truncated.
        rows: The table rows that contain the texts; None if the input is not a table.
    """

    texts: list[str]
    vectors: Vectors
    num_truncated: int
    rows: list[Mapping[str, Any]] | None = None


def embed_chunks(
    embedder: Embedder,
    lines: Iterable[str | TextRow],
    spec: VectorSpec,
    *,
    batch_tokens: int | None = None,
    unbuffered: bool = False,
    progress: Progress | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[EmbeddedChunk]:
    """Embed lines in chunks.

    Several processes divide the lines of each chunk among them. Only the main process yields
    chunks.

    Args:
        embedder: The model.
        lines: Texts, or table rows with a text.
        spec: How to compute the vectors.
        batch_tokens: Maximum number of tokens per batch.
        unbuffered: Whether to yield the vectors of each line before reading the next line.
        progress: Receives the number of embedded lines.
        processes: The processes; all of them must have the same lines.
    """
    progress = progress or NullProgress()
    scale = processes.world_size
    for chunk in _split_into_chunks(iter(lines), spec, 1 if unbuffered else _MAX_LINES, scale):
        texts = [get_line_text(line) for line in chunk]
        rows = [line.cells for line in chunk if isinstance(line, TextRow)] or None
        share = texts[processes.rank :: processes.world_size]
        parts = processes.gather(_embed_texts(embedder, share, spec, batch_tokens, progress, scale))
        if parts is not None:
            vectors = _interleave([vectors for vectors, _ in parts], len(texts))
            yield EmbeddedChunk(texts, vectors, sum(count for _, count in parts), rows)


def _embed_texts(
    embedder: Embedder,
    texts: list[str],
    spec: VectorSpec,
    batch_tokens: int | None,
    progress: Progress,
    scale: int,
) -> tuple[Vectors, int]:
    """Return the vectors of texts, and how many texts were truncated.

    Args:
        embedder: The model.
        texts: The texts.
        spec: How to compute the vectors.
        batch_tokens: Maximum number of tokens per batch.
        progress: Receives the number of texts, times ``scale``.
        scale: Number of processes that each embed as many texts.
    """
    if spec.pooling == "none":
        token_vectors = embedder.encode_tokens_with_spec(texts, spec, batch_tokens)
        progress.advance(scale * len(texts))
        return token_vectors, sum(text.is_truncated for text in token_vectors)
    tokenized = embedder.tokenize(texts)
    vectors = np.empty((len(texts), spec.width), np.float32)
    batches = embedder.encode_batches(tokenized.sequences, spec, batch_tokens)
    for indices, batch_vectors in batches:
        vectors[indices] = batch_vectors
        progress.advance(scale * len(indices))
    return vectors, tokenized.num_truncated


def _interleave(parts: list[Vectors], count: int) -> Vectors:
    """Return the vectors of ``count`` texts; part r has those of the texts r, r + parts, ..."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, np.ndarray):
        vectors: Vectors = np.empty((count, first.shape[1]), first.dtype)
    else:
        vectors = list(first) * len(parts)
        del vectors[count:]
    for rank, part in enumerate(parts):
        vectors[rank :: len(parts)] = part  # type: ignore[index, assignment]
    return vectors


def get_line_text(line: str | TextRow) -> str:
    """Return the text of a line or table row."""
    return line if isinstance(line, str) else line.text


def _split_into_chunks(
    lines: Iterator[str | TextRow], spec: VectorSpec, max_lines: int, scale: int
) -> Iterator[list[str | TextRow]]:
    """Yield chunks of lines; a chunk ends early when its lines have many characters.

    Args:
        lines: The lines.
        spec: How to compute the vectors.
        max_lines: Maximum number of lines in the chunk of one process.
        scale: Number of processes.
    """
    max_lines *= scale
    max_characters = scale * _MAX_CHARACTERS
    if spec.pooling == "none":
        # Process 0 has the vectors of all processes in memory.
        max_characters = _MAX_TOKEN_VECTOR_ELEMENTS // spec.width
    chunk: list[str | TextRow] = []
    num_characters = 0
    for line in lines:
        chunk.append(line)
        num_characters += len(get_line_text(line))
        if len(chunk) == max_lines or num_characters > max_characters:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk
