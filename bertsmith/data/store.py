"""The token store on disk: token ids, offsets of sentences and documents, and a manifest.

STORE/manifest.json        format version, vocabulary, counts, sources
STORE/tokenizer/           a copy of the tokenizer
STORE/train.ids            token ids of all documents, little-endian, 16 or 32 bits each
STORE/train.sentences      int64: start of each sentence in the ids, and the end of the last
STORE/train.documents      int64: start of each document in the sentences, and the end
STORE/heldout.*            the same for the held-out documents
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.plan import PARTS_DIR, PLAN_FILE, StorePlan
from bertsmith.errors import StoreError
from bertsmith.files import add_error_filename, parse_json, sync, write_json
from bertsmith.plurals import count_noun
from bertsmith.progress import NullProgress, Progress
from bertsmith.settings import Settings
from bertsmith.text.unknown import TokenCounts
from bertsmith.text.wordpiece import Tokenizer

#: Version of the layout above. Stores of other versions are rejected.
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_DIR = "tokenizer"
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")
#: Key of the manifest's report for the number of [UNK] tokens by split.
UNKNOWN_TOKENS = "unknown_tokens"
#: Number of ids compared with [UNK] at a time.
_CHUNK_IDS = 1 << 24

_OFFSET_TYPE = np.dtype("<i8")
#: Number of bytes hashed at a time.
_CHUNK_BYTES = 1 << 24
#: Number of offsets checked at a time.
_CHUNK_OFFSETS = 1 << 20
#: Advice for error messages about a damaged store.
_REBUILD_ADVICE = "remove the folder of the store and make it again with `bertsmith prepare`"


class SplitCounts(Settings):
    """The numbers of documents, sentences and tokens of a split, as stored in the manifest."""

    documents: int
    sentences: int
    tokens: int


class Manifest(Settings):
    """Metadata of a store. These values are stored nowhere else.

    Attributes:
        format: Version of the layout.
        bits: Bits per token id.
        vocab_size: Number of ids in the vocabulary.
        lowercase: Whether the tokenizer lowercases text.
        plan: Hash of the tokenizer, options and sources.
        held_out_below: Documents and parts of documents whose hash is below this fraction of all
            hashes are held out, except ``HeldOutRule.excluded_hashes``.
        splits: Size of each split.
        report: Number of documents read, and number left out by reason.
        made_by: Name and version of the program that wrote the store.
        checksums: SHA-256 in hexadecimal of each file of the splits, by file name; empty for
            stores of version 0.1.
        text_hash: Hash of all documents, in order, by which sources without a fingerprint are
            compared; empty for stores of earlier versions.
    """

    format: int = FORMAT_VERSION
    bits: Literal[16, 32]
    vocab_size: int
    lowercase: bool
    plan: StorePlan
    held_out_below: float = 0.0
    splits: dict[SplitName, SplitCounts]
    report: dict[str, Any] = Field(default_factory=dict)
    made_by: str = ""
    checksums: dict[str, str] = Field(default_factory=dict)
    text_hash: str = ""

    @property
    def vocabulary_hash(self) -> str:
        """The hash of the store's tokenizer."""
        return self.plan.vocabulary_hash

    def token_counts(self, name: SplitName) -> TokenCounts | None:
        """Return the numbers of tokens and [UNK] tokens in a split.

        The result is None for stores of version 0.1, whose manifest has no number of [UNK] tokens.
        """
        num_unknown = self.report.get(UNKNOWN_TOKENS)
        if num_unknown is None:
            return None
        return TokenCounts(self.splits[name].tokens, num_unknown[name])


@dataclass(frozen=True)
class Split:
    """The training or held-out documents of a store, as flat arrays.

    Attributes:
        ids: Token ids, uint16 or uint32 [tokens].
        sentence_offsets: Offsets into ``ids``, int64 [sentences + 1], strictly ascending from 0.
        document_offsets: Offsets into the sentences, int64 [documents + 1], strictly ascending
            from 0.
        name: Path of the store and name of the split, for error messages.
    """

    ids: NDArray[np.unsignedinteger[Any]]
    sentence_offsets: IntArray
    document_offsets: IntArray
    name: str

    @property
    def counts(self) -> SplitCounts:
        """The numbers of documents, sentences and tokens."""
        return SplitCounts(
            documents=len(self.document_offsets) - 1,
            sentences=len(self.sentence_offsets) - 1,
            tokens=len(self.ids),
        )

    @classmethod
    def from_documents(
        cls, documents: Iterable[Sequence[Sequence[int]]], name: str = "memory"
    ) -> Self:
        """Create a split in memory from documents, each a list of sentences of token ids."""
        documents = list(documents)
        sentences = [np.asarray(ids, np.uint32) for document in documents for ids in document]
        document_sizes = [len(document) for document in documents]
        return cls(
            ids=np.concatenate(sentences) if sentences else np.zeros(0, np.uint32),
            sentence_offsets=np.cumsum([0] + [len(ids) for ids in sentences]),
            document_offsets=np.cumsum([0, *document_sizes]),
            name=name,
        )


def choose_id_bits(vocab_size: int) -> Literal[16, 32]:
    """Return the bits per token id: 16 if all ids are below 65,536, else 32."""
    return 16 if vocab_size <= 1 << 16 else 32


class SplitWriter:
    """Writes the files of one split, some documents at a time, in constant memory.

    The files have temporary names until ``close`` is called.

    Attributes:
        num_unknown: Number of [UNK] tokens written.
    """

    def __init__(
        self, directory: Path, name: SplitName, bits: Literal[16, 32], unk_id: int | None = None
    ) -> None:
        """Open the files.

        Args:
            directory: Directory of the store.
            name: Name of the split.
            bits: Bits per token id.
            unk_id: Id of [UNK]; None if [UNK] tokens are not counted.
        """
        self._directory = directory
        self._unk_id = unk_id
        self.num_unknown = 0
        self._id_dtype = _get_id_dtype(bits)
        self._paths = {part: directory / f"{name}.{part}" for part in _get_part_dtypes(bits)}
        self._files = {
            part: _get_temporary_path(path).open("wb") for part, path in self._paths.items()
        }
        self._hashes = {part: hashlib.sha256() for part in self._paths}
        self._num_tokens = self._num_sentences = self._num_documents = 0
        for part in ("sentences", "documents"):
            self._write(part, np.zeros(1, _OFFSET_TYPE))

    def append(self, ids: NDArray[Any], sentence_sizes: IntArray, document_sizes: IntArray) -> None:
        """Append documents.

        Args:
            ids: Token ids [tokens].
            sentence_sizes: Tokens in each sentence, int64 [sentences], at least 1.
            document_sizes: Sentences in each document, int64 [documents], at least 1.
        """
        if len(ids) != sentence_sizes.sum() or len(sentence_sizes) != document_sizes.sum():
            raise ValueError("the sizes of sentences and documents do not add up")
        if (sentence_sizes <= 0).any() or (document_sizes <= 0).any():
            raise ValueError("sentences and documents of a store must not be empty")
        if self._unk_id is not None:
            self.num_unknown += int(np.count_nonzero(ids == self._unk_id))
        sentence_ends = self._num_tokens + np.cumsum(sentence_sizes)
        document_ends = self._num_sentences + np.cumsum(document_sizes)
        with add_error_filename(self._directory):
            self._write("ids", ids.astype(self._id_dtype, copy=False))
            self._write("sentences", sentence_ends.astype(_OFFSET_TYPE))
            self._write("documents", document_ends.astype(_OFFSET_TYPE))
        self._num_tokens += len(ids)
        self._num_sentences += len(sentence_sizes)
        self._num_documents += len(document_sizes)

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of the content written to each file so far, by file name."""
        return {path.name: self._hashes[part].hexdigest() for part, path in self._paths.items()}

    def _write(self, part: str, values: NDArray[Any]) -> None:
        """Append values to a file and its hash."""
        content = values.tobytes()
        self._files[part].write(content)
        self._hashes[part].update(content)

    def close(self) -> SplitCounts:
        """Sync the files, give them their final names, and return the size of the split."""
        for part, path in self._paths.items():
            with add_error_filename(self._directory):
                self._files[part].close()
            sync(_get_temporary_path(path))
            _get_temporary_path(path).replace(path)
        sync(self._directory)
        return SplitCounts(
            documents=self._num_documents,
            sentences=self._num_sentences,
            tokens=self._num_tokens,
        )


class Store:
    """A token store opened for reading; its arrays are memory-mapped."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the store at ``path``.

        Raises:
            StoreError: There is no complete store, or a file has the wrong size.
        """
        path = Path(path)
        store = cls(path, _read_manifest(path))
        for name in SPLITS:
            _check_file_sizes(path, name, store.manifest)
        return store

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the store.

        Raises:
            StoreError: The tokenizer does not match the manifest.
        """
        tokenizer = Tokenizer.load(self.path / TOKENIZER_DIR)
        self.check_tokenizer(tokenizer)
        if tokenizer.vocab_size != self.manifest.vocab_size:
            raise make_damaged_file_error(
                self.path / MANIFEST_FILE,
                f"it gives a vocabulary of {self.manifest.vocab_size:,} words, "
                f"but the tokenizer has {tokenizer.vocab_size:,}",
            )
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise StoreError unless the store was made with ``tokenizer``."""
        if tokenizer.hash != self.manifest.vocabulary_hash:
            raise StoreError(
                f"{self.path}: the store was made with another vocabulary (hash "
                f"{self.manifest.vocabulary_hash[:12]}, {self.manifest.vocab_size:,} words) than "
                f"that of the tokenizer (hash {tokenizer.hash[:12]}, {tokenizer.vocab_size:,} "
                "words); use the tokenizer of the store, or run `bertsmith prepare` again"
            )

    def token_counts(self, name: SplitName, unk_id: int) -> TokenCounts:
        """Return the numbers of tokens and [UNK] tokens in a split.

        The manifest of a store of version 0.1 has no number of [UNK] tokens, so this method counts
        them in the ids.
        """
        counts = self.manifest.token_counts(name)
        if counts is None:
            ids = self.load_split(name).ids
            counts = TokenCounts(len(ids))
            for first in range(0, len(ids), _CHUNK_IDS):
                chunk = ids[first : first + _CHUNK_IDS]
                counts.num_unknown += int(np.count_nonzero(chunk == unk_id))
        return counts

    def load_split(self, name: SplitName) -> Split:
        """Memory-map a split, and check its offsets.

        Raises:
            StoreError: There is no such split, or the offsets are damaged.
        """
        if name not in SPLITS:
            raise StoreError(f"{self.path}: no split {name!r}; choose one of {', '.join(SPLITS)}")
        manifest = self.manifest
        paths = {part: self.path / f"{name}.{part}" for part in _get_part_dtypes(manifest.bits)}
        split = Split(
            ids=_map_array(paths["ids"], _get_id_dtype(manifest.bits)),
            sentence_offsets=_map_array(paths["sentences"], _OFFSET_TYPE),
            document_offsets=_map_array(paths["documents"], _OFFSET_TYPE),
            name=f"{self.path} ({name})",
        )
        num_sentences = len(split.sentence_offsets) - 1
        _check_offsets(paths["sentences"], split.sentence_offsets, len(split.ids))
        _check_offsets(paths["documents"], split.document_offsets, num_sentences)
        for part in ("sentences", "documents"):
            self._verify_checksum(paths[part], NullProgress())
        return split

    def verify(self, progress: Progress | None = None) -> bool:
        """Verify the content of all files.

        A store of version 0.1 has no checksums. Only its file sizes, its offsets and the range of
        its ids are verified.

        Returns:
            Whether the store has checksums.

        Raises:
            StoreError: A file is damaged; the message names the first one.
        """
        progress = NullProgress() if progress is None else progress
        paths = {name: self.path / f"{name}.ids" for name in SPLITS}
        size = sum(path.stat().st_size for path in paths.values())
        progress.start("Verifying the store", size, "bytes")
        for name, path in paths.items():
            self._check_id_range(path, self.load_split(name).ids)
            self._verify_checksum(path, progress)
        progress.finish()
        return paths["train"].name in self.manifest.checksums

    def _check_id_range(self, path: Path, ids: NDArray[Any]) -> None:
        """Raise StoreError if an id is not in the vocabulary."""
        step = _CHUNK_BYTES // ids.itemsize
        chunks = (ids[first : first + step] for first in range(0, len(ids), step))
        max_id = max((int(chunk.max()) for chunk in chunks), default=0)
        if max_id >= self.manifest.vocab_size:
            problem = describe_out_of_vocabulary(max_id, self.manifest.vocab_size)
            raise make_damaged_file_error(path, problem)

    def _verify_checksum(self, path: Path, progress: Progress) -> None:
        """Raise StoreError if the manifest has another checksum for the file.

        The progress advances by the size of the file in bytes.
        """
        expected = self.manifest.checksums.get(path.name)
        if expected is None:
            progress.advance(path.stat().st_size)
            return
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress.advance(len(chunk))
        if digest.hexdigest() != expected:
            raise make_damaged_file_error(
                path, f"its SHA-256 is {digest.hexdigest()[:12]}, expected {expected[:12]}"
            )


def make_damaged_file_error(name: Path | str, problem: str) -> StoreError:
    """Return the error for a damaged file of a store."""
    return StoreError(f"{name}: the file is damaged: {problem}; {_REBUILD_ADVICE}")


def describe_out_of_vocabulary(max_id: int, vocab_size: int) -> str:
    """Describe an id outside the vocabulary, as the ``problem`` of ``make_damaged_file_error``."""
    return f"it holds the token id {max_id:,}, but the vocabulary has {vocab_size:,} words"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest. It must be written last, since it marks the store as complete."""
    write_json(directory / MANIFEST_FILE, manifest.model_dump(mode="json"))


def _get_part_dtypes(bits: Literal[16, 32]) -> Mapping[str, np.dtype[Any]]:
    """Return the data type of each file of a split, by the suffix of its name."""
    return {"ids": _get_id_dtype(bits), "sentences": _OFFSET_TYPE, "documents": _OFFSET_TYPE}


def _get_id_dtype(bits: Literal[16, 32]) -> np.dtype[Any]:
    return np.dtype("<u2" if bits == 16 else "<u4")


def _get_temporary_path(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(f".{path.name}.tmp")


def _read_manifest(path: Path) -> Manifest:
    """Read the manifest of the store at ``path``; raise StoreError if there is no valid one."""
    file = path / MANIFEST_FILE
    advice = "give the folder that `bertsmith prepare --out` wrote"
    if not path.is_dir():
        problem = "this is a file, not a store" if path.exists() else "no such store"
        raise StoreError(f"{path}: {problem}; {advice}")
    try:
        values = parse_json(file.read_bytes())
    except FileNotFoundError:
        if (path / PARTS_DIR / PLAN_FILE).is_file():
            raise StoreError(
                f"{path}: this store is unfinished; run the same `bertsmith prepare` command "
                "again to resume it"
            ) from None
        raise StoreError(f"{path}: not a store: it has no {MANIFEST_FILE}; {advice}") from None
    except ValueError as error:
        raise make_damaged_file_error(file, f"not valid JSON: {error}") from None
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{file}: store format {version!r}, expected {FORMAT_VERSION}; "
            f"{_REBUILD_ADVICE} of this version"
        )
    try:
        return Manifest.model_validate_json(json.dumps(values))
    except ValueError as error:
        raise make_damaged_file_error(file, f"not a manifest of a store: {error}") from None


def _check_file_sizes(path: Path, name: SplitName, manifest: Manifest) -> None:
    """Raise StoreError unless every file of the split has the size that the manifest implies."""
    counts = manifest.splits.get(name)
    if counts is None:
        raise StoreError(f"{path / MANIFEST_FILE}: the counts of the split {name!r} are missing")
    num_elements = {
        "ids": counts.tokens,
        "sentences": counts.sentences + 1,
        "documents": counts.documents + 1,
    }
    for part, dtype in _get_part_dtypes(manifest.bits).items():
        file = path / f"{name}.{part}"
        expected = num_elements[part] * dtype.itemsize
        if not file.is_file():
            raise StoreError(f"{file}: the file is missing; {_REBUILD_ADVICE}")
        if file.stat().st_size != expected:
            raise make_damaged_file_error(
                file, f"it has {count_noun(file.stat().st_size, 'byte')}, expected {expected:,}"
            )


def _check_offsets(path: Path, offsets: IntArray, end: int) -> None:
    """Raise StoreError unless the offsets ascend strictly from 0 to ``end``."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != end:
        raise make_damaged_file_error(
            path,
            f"its offsets run from {int(offsets[0]):,} to {int(offsets[-1]):,}, "
            f"expected 0 to {end:,}",
        )
    for first in range(0, len(offsets) - 1, _CHUNK_OFFSETS):
        chunk = offsets[first : first + _CHUNK_OFFSETS + 1]
        if (chunk[1:] <= chunk[:-1]).any():
            index = first + int(np.argmax(chunk[1:] <= chunk[:-1])) + 1
            raise make_damaged_file_error(
                path, f"its offset number {index:,} is not above the one before it"
            )


def _map_array(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Memory-map a file, read-only, as a plain array."""
    size = path.stat().st_size
    if not size:
        return np.zeros(0, dtype)
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return np.frombuffer(buffer, dtype)
