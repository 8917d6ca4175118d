"""Embed lines in chunks, in one or several processes."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.use.embed import Embedder
from bertsmith.use.table_input import TextRow
from bertsmith.use.token_vectors import TokenizedTexts
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
    num_processes = processes.world_size
    chunks = _split_into_chunks(iter(lines), spec, 1 if unbuffered else _MAX_LINES, num_processes)
    for chunk, tokenized in _tokenize_chunks(
        embedder, chunks, spec, processes, should_read_ahead=not unbuffered
    ):
        texts = [get_line_text(line) for line in chunk]
        rows = [line.cells for line in chunk if isinstance(line, TextRow)] or None
        if tokenized is None:
            share = texts[processes.rank :: processes.world_size]
            part = _embed_tokens(embedder, share, spec, batch_tokens, progress, num_processes)
        else:
            part = _embed_texts(
                embedder, tokenized.result(), spec, batch_tokens, progress, num_processes
            )
        parts = processes.gather(part)
        if parts is not None:
            vectors = _interleave([vectors for vectors, _ in parts], len(texts))
            yield EmbeddedChunk(texts, vectors, sum(count for _, count in parts), rows)


def _tokenize_chunks(
    embedder: Embedder,
    chunks: Iterator[list[str | TextRow]],
    spec: VectorSpec,
    processes: ProcessGroup,
    *,
    should_read_ahead: bool,
) -> Iterator[tuple[list[str | TextRow], "Future[TokenizedTexts] | None"]]:
    """Yield chunks and the tokenized texts of this process.

    A thread tokenizes the next chunk while the caller computes the vectors of the yielded one. If
    a chunk cannot be read, those before it are yielded first.

    Args:
        embedder: The model.
        chunks: Lines of text.
        spec: How to compute the vectors. Without pooling, the texts are not tokenized here.
        processes: The processes.
        should_read_ahead: Whether to read a chunk before the previous one is yielded.
    """
    if spec.pooling == "none":
        yield from ((chunk, None) for chunk in chunks)
        return
    previous = None
    with ThreadPoolExecutor(1, "bertsmith-tokenize") as pool:
        while True:
            try:
                chunk = next(chunks, None)
            except Exception:
                if previous is not None:
                    yield previous
                raise
            current = None
            if chunk is not None:
                share = chunk[processes.rank :: processes.world_size]
                texts = [get_line_text(line) for line in share]
                current = (chunk, pool.submit(embedder.tokenize, texts))
            if not should_read_ahead:
                previous, current = current, None
            if previous is not None:
                yield previous
            if chunk is None:
                return
            previous = current


def _embed_tokens(
    embedder: Embedder,
    texts: list[str],
    spec: VectorSpec,
    batch_tokens: int | None,
    progress: Progress,
    num_processes: int,
) -> tuple[Vectors, int]:
    """Return the vectors of the tokens of texts, and how many texts were truncated.

    Args:
        embedder: The model.
        texts: The texts.
        spec: How to compute the vectors.
        batch_tokens: Maximum number of tokens per batch.
        progress: Receives the number of texts of all processes.
        num_processes: Number of processes, each of which embeds about as many texts.
    """
    token_vectors = embedder.encode_tokens_with_spec(texts, spec, batch_tokens)
    progress.advance(num_processes * len(texts))
    return token_vectors, sum(text.is_truncated for text in token_vectors)


def _embed_texts(
    embedder: Embedder,
    tokenized: TokenizedTexts,
    spec: VectorSpec,
    batch_tokens: int | None,
    progress: Progress,
    num_processes: int,
) -> tuple[Vectors, int]:
    """Return the vectors of texts, and how many texts were truncated.

    The arguments are those of ``_embed_tokens``, except that the texts are tokenized.
    """
    vectors = np.empty((len(tokenized.sequences), spec.width), np.float32)
    batches = embedder.encode_batches(tokenized.sequences, spec, batch_tokens)
    for indices, batch_vectors in batches:
        vectors[indices] = batch_vectors
        progress.advance(num_processes * len(indices))
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
    lines: Iterator[str | TextRow], spec: VectorSpec, max_lines: int, num_processes: int
) -> Iterator[list[str | TextRow]]:
    """Yield chunks of lines; a chunk ends early when its lines have many characters.

    Args:
        lines: The lines.
        spec: How to compute the vectors.
        max_lines: Maximum number of lines in the chunk of one process.
        num_processes: Number of processes.
    """
    max_lines *= num_processes
    max_characters = num_processes * _MAX_CHARACTERS
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
