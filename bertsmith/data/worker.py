"""The worker process of ``prepare``: turns a group of documents into a shard file.

It never knows the corpus, the other workers or the final store. It loads numpy, ``tokenizers``
and ``sentencex``, nothing more, and ends when its parent does.
"""

import io
import signal
import sys
import traceback
import zipfile
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.counter_rng import IntArray, UInt64Array
from bertsmith.data.held_out_split import DocumentSizes
from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.errors import BertsmithError, StoreError
from bertsmith.files import write_atomic
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class ShardTask:
    """A shard to make: its file, and its documents' texts, each presplit into lines or not."""

    path: Path
    texts: list[str]
    presplit: list[bool]


@dataclass(frozen=True)
class WorkerFailure:
    """What went wrong in a worker: the user's or the system's error; else the traceback."""

    error: BertsmithError | OSError | None
    traceback: str


class DamagedShardError(StoreError):
    """A shard file is not as it was written."""


@dataclass(frozen=True)
class Shard:
    """The documents of a shard as flat arrays; see ``SplitWriter.append`` for the sizes.

    ``hashes`` uint64 [documents], of each document's text; a document without a token is left
    out, and counted in ``empty``.
    """

    ids: NDArray[Any]
    sentence_sizes: IntArray
    document_sizes: IntArray
    hashes: UInt64Array
    empty: int

    @property
    def sizes(self) -> DocumentSizes:
        """The sizes of the documents."""
        return DocumentSizes(self.hashes, self.document_sizes, self.sentence_sizes)

    def save(self, path: Path) -> None:
        """Write the shard, whole or not at all."""
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **vars(self))
        write_atomic(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Shard":
        """Read a shard back; raise DamagedShardError unless it is as it was written."""
        content = path.read_bytes()
        try:
            shard = cls._parse(content)
        except Exception as error:  # noqa: BLE001 - on damaged bytes zipfile raises almost anything
            raise DamagedShardError(
                f"{path}: this part of an unfinished store is damaged: {error}; "
                "run the same `bertsmith prepare` command again, which replaces it"
            ) from None
        return shard

    @classmethod
    def _parse(cls, content: bytes) -> "Shard":
        # NumPy may stop before the end of an entry, where its CRC-32 is compared.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if bad := archive.testzip():
                raise ValueError(f"the CRC-32 of {bad} does not match")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        shard = cls(**values | {"empty": int(values["empty"])})
        if (
            len(shard.ids) != shard.sentence_sizes.sum()
            or len(shard.sentence_sizes) != shard.document_sizes.sum()
            or len(shard.document_sizes) != len(shard.hashes)
        ):
            raise ValueError("its sizes do not add up")
        return shard


def hash_document(text: str) -> int:
    """Return the 64-bit hash of a document, by which it is held out or not."""
    return int.from_bytes(blake2b(_bytes(text), digest_size=8).digest(), "little")


def hash_texts(texts: list[str]) -> str:
    """Return a short name for a group of texts: another group has another."""
    found = blake2b(digest_size=8)
    for text in texts:
        found.update(_bytes(text))
        # A byte that UTF-8 never has, so that borders count.
        found.update(b"\xff")
    return found.hexdigest()


def build_shard(task: ShardTask, memo: CachedTokenizer, language: str, bits: int) -> Shard:
    """Cut the documents into sentences and the sentences into ids."""
    documents = [
        split_sentences(text, language, presplit)
        for text, presplit in zip(task.texts, task.presplit, strict=True)
    ]
    ids, sizes = memo.encode([sentence for document in documents for sentence in document])
    owners = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    # A sentence of control characters only has no token: it is none.
    document_sizes = np.bincount(owners[sizes > 0], minlength=len(documents))
    hashes = np.array([hash_document(text) for text in task.texts], np.uint64)
    kept = document_sizes > 0
    return Shard(
        ids=ids.astype(np.uint16 if bits == 16 else np.uint32),
        sentence_sizes=sizes[sizes > 0],
        document_sizes=document_sizes[kept],
        hashes=hashes[kept],
        empty=int((~kept).sum()),
    )


def serve_tasks(connection: Connection, tokenizer: Path, language: str, bits: int) -> None:
    """Make one shard after another as they arrive; answer each with None, or the Failure."""
    try:
        memo = CachedTokenizer(Tokenizer.load(tokenizer))
        while True:
            task: ShardTask = connection.recv()
            build_shard(task, memo, language, bits).save(task.path)
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent is gone, or wants no more.
        return
    except (BertsmithError, OSError) as error:
        connection.send(WorkerFailure(error, ""))
    except Exception:  # noqa: BLE001 - whatever it is, the parent tells of it
        connection.send(WorkerFailure(None, traceback.format_exc()))


def main() -> None:
    """Serve on the connection whose descriptor is the first argument."""
    # Ctrl-C reaches every process of the terminal; a worker finishes its shard all the same.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, tokenizer, language, bits = sys.argv[1:]
    serve_tasks(Connection(int(descriptor)), Path(tokenizer), language, int(bits))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
