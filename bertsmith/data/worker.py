"""The worker process of ``prepare``: turns a group of documents into a shard file.

A worker imports only NumPy, ``tokenizers`` and ``sentencex``. It ends when its parent process does.
"""

import io
import signal
import sys
import traceback
import zipfile
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.held_out_split import DocumentSizes
from bertsmith.data.long_sentences import cut_long_sentences
from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.errors import BertsmithError, StoreError
from bertsmith.files import write_atomic
from bertsmith.splitmix64 import UInt64Array
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class ShardTask:
    """A shard to build.

    Attributes:
        path: Shard file to write.
        texts: Texts of the documents.
        presplit: For each text, whether it already has one sentence per line.
    """

    path: Path
    texts: list[str]
    presplit: list[bool]


@dataclass(frozen=True)
class WorkerFailure:
    """An exception in a worker.

    Attributes:
        error: The exception, if a mistake of the user, the operating system or a lack of memory
            caused it; None for any other exception.
        description: Type, first line of the message, and traceback of any other exception; empty if
            ``error`` is set.
    """

    error: BertsmithError | OSError | MemoryError | None
    description: str


class DamagedShardError(StoreError):
    """The content of a shard file has changed since it was written."""


@dataclass(frozen=True)
class Shard:
    """Tokenized documents as flat arrays. Documents without tokens are left out.

    Attributes:
        ids: Token ids of all documents, uint16 or uint32 [tokens].
        sentence_sizes: Tokens in each sentence, int64 [sentences].
        document_sizes: Sentences in each document, int64 [documents].
        hashes: Hash of each document's text, uint64 [documents].
        empty: Number of documents without tokens.
        long_sentence_tokens: Number of tokens in sentences that were cut because of their length.
    """

    ids: NDArray[Any]
    sentence_sizes: IntArray
    document_sizes: IntArray
    hashes: UInt64Array
    empty: int
    long_sentence_tokens: int

    @property
    def sizes(self) -> DocumentSizes:
        """The sizes of the documents."""
        return DocumentSizes(self.hashes, self.document_sizes, self.sentence_sizes)

    def cut_long_sentences(self, is_continuation: NDArray[np.bool_]) -> "Shard":
        """Return the shard with long sentences cut into pieces; see ``long_sentences``.

        A shard that is cut already does not change. Shards of version 0.2 are not cut.

        Args:
            is_continuation: Whether each token id continues a word, bool [V].
        """
        cut = cut_long_sentences(self.ids, self.sentence_sizes, is_continuation)
        if len(cut.sizes) == len(self.sentence_sizes):
            return self
        num_documents = len(self.document_sizes)
        document_numbers = np.repeat(np.arange(num_documents), self.document_sizes)
        num_pieces = np.bincount(document_numbers, cut.num_pieces, minlength=num_documents)
        num_cut_tokens = int(self.sentence_sizes[cut.num_pieces > 1].sum())
        return replace(
            self,
            sentence_sizes=cut.sizes,
            document_sizes=num_pieces.astype(np.int64),
            long_sentence_tokens=self.long_sentence_tokens + num_cut_tokens,
        )

    def save(self, path: Path) -> None:
        """Write the shard atomically."""
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        write_atomic(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Shard":
        """Read a shard.

        Raises:
            DamagedShardError: The content of the file has changed since it was written.
        """
        content = path.read_bytes()
        try:
            shard = cls._parse(content)
        except Exception as error:  # noqa: BLE001 - on damaged bytes zipfile raises almost anything
            raise DamagedShardError(
                f"{path}: this shard of an unfinished store is damaged: {error}; "
                "run the same `bertsmith prepare` command again, which replaces it"
            ) from None
        return shard

    @classmethod
    def _parse(cls, content: bytes) -> "Shard":
        """Parse a shard file; raise an exception of any type if its content is damaged."""
        # zipfile compares the CRC-32 at the end of an entry, which NumPy may not read.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged_entry = archive.testzip()
        if damaged_entry is not None:
            raise ValueError(f"the CRC-32 of {damaged_entry} does not match")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            names = {field.name for field in fields(cls)} & set(arrays.files)
            values = {name: arrays[name] for name in names}
        # Version 0.2 did not cut long sentences; see ``cut_long_sentences``.
        num_long = int(values.get("long_sentence_tokens", 0))
        counts = {"empty": int(values["empty"]), "long_sentence_tokens": num_long}
        shard = cls(**values | counts)
        if (
            len(shard.ids) != shard.sentence_sizes.sum()
            or len(shard.sentence_sizes) != shard.document_sizes.sum()
            or len(shard.document_sizes) != len(shard.hashes)
        ):
            raise ValueError("the sizes of its sentences and documents do not add up")
        return shard


def hash_document(text: str) -> int:
    """Return a 64-bit hash of a document's text, which decides whether it is held out."""
    return int.from_bytes(blake2b(_encode(text), digest_size=8).digest(), "little")


def hash_texts(texts: list[str]) -> str:
    """Return a 64-bit hash, in hexadecimal, of a list of texts and their boundaries."""
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(_encode(text))
        # A byte that never occurs in UTF-8 marks the end of a text.
        digest.update(b"\xff")
    return digest.hexdigest()


def build_shard(task: ShardTask, tokenizer: CachedTokenizer, language: str, id_bits: int) -> Shard:
    """Split the documents of a task into sentences, tokenize them, and cut long sentences.

    Args:
        task: The documents.
        tokenizer: Tokenizer of the store.
        language: ISO 639-1 code, used for sentence splitting.
        id_bits: Bits per token id, 16 or 32.
    """
    documents = [
        split_sentences(text, language, presplit)
        for text, presplit in zip(task.texts, task.presplit, strict=True)
    ]
    ids, sizes = tokenizer.encode([sentence for document in documents for sentence in document])
    document_numbers = np.repeat(
        np.arange(len(documents)), [len(document) for document in documents]
    )
    # A sentence without tokens, such as one of control characters, is not counted.
    document_sizes = np.bincount(document_numbers[sizes > 0], minlength=len(documents))
    hashes = np.array([hash_document(text) for text in task.texts], np.uint64)
    has_tokens = document_sizes > 0
    shard = Shard(
        ids=ids.astype(np.uint16 if id_bits == 16 else np.uint32),
        sentence_sizes=sizes[sizes > 0],
        document_sizes=document_sizes[has_tokens],
        hashes=hashes[has_tokens],
        empty=int((~has_tokens).sum()),
        long_sentence_tokens=0,
    )
    return shard.cut_long_sentences(tokenizer.is_continuation)


def serve_tasks(connection: Connection, tokenizer_path: Path, language: str, id_bits: int) -> None:
    """Build a shard for every task received, and reply with None or a WorkerFailure."""
    try:
        tokenizer = CachedTokenizer(Tokenizer.load(tokenizer_path))
        while True:
            task: ShardTask = connection.recv()
            build_shard(task, tokenizer, language, id_bits).save(task.path)
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent process ended or closed the connection.
        return
    except (BertsmithError, OSError, MemoryError) as error:
        connection.send(WorkerFailure(error, ""))
    except Exception as error:  # noqa: BLE001 - the parent process reports any other exception
        # Only the first lines of the message are printed, and a traceback ends with the type.
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        connection.send(WorkerFailure(None, f"{summary}\n{traceback.format_exc()}"))


def main() -> None:
    """Serve tasks on an inherited connection.

    The arguments of the process are the connection's file descriptor, the tokenizer's path, the
    language and the number of bits per token id.
    """
    # Ctrl-C reaches every process of the terminal; a worker finishes its shard first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, tokenizer_path, language, id_bits = sys.argv[1:]
    serve_tasks(Connection(int(descriptor)), Path(tokenizer_path), language, int(id_bits))


def _encode(text: str) -> bytes:
    """Return the UTF-8 bytes of a text that may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
