"""The token store on disk: flat token ids, the offsets of sentences and documents, a manifest.

It never knows how text became ids, nor how examples are drawn from them.

    STORE/manifest.json        what stands here: format, vocabulary, counts, sources
    STORE/tokenizer/           a copy of the tokenizer that made the ids
    STORE/train.ids            token ids of all documents, little-endian, 16 or 32 bits each
    STORE/train.sentences      int64: where each sentence starts in the ids; the last is the end
    STORE/train.documents      int64: where each document starts in the sentences; likewise
    STORE/heldout.*            the same for the documents held out
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
from bertsmith.data.plan import StorePlan
from bertsmith.errors import StoreError
from bertsmith.files import add_error_filename, parse_json, sync, write_json
from bertsmith.progress import NullProgress, Progress
from bertsmith.settings import Settings
from bertsmith.text.unknown import TokenCounts
from bertsmith.text.wordpiece import Tokenizer

#: The version of the layout above; a reader of another version refuses.
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_DIR = "tokenizer"
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")
#: The key of a manifest's report that holds the number of [UNK] tokens by split.
UNKNOWN_TOKENS = "unknown_tokens"
_SPLIT_TITLES: dict[SplitName, str] = {"train": "training", "heldout": "held-out"}
#: Ids of a split that are compared with [UNK] at once.
_CHUNK = 1 << 24

_OFFSET = np.dtype("<i8")
#: The bytes that are hashed together, and the offsets that are checked together.
_BLOCK_BYTES, _BLOCK_OFFSETS = 1 << 24, 1 << 20
#: What to do about a damaged store.
REMAKE = "remove the folder of the store and make it again with `bertsmith prepare`"


class SplitCounts(Settings):
    """How much a split holds."""

    documents: int
    sentences: int
    tokens: int


class Manifest(Settings):
    """What a store says of itself; each of these numbers has its home here.

    ``plan``: the sources, the tokenizer's hash and the choices. ``held_out_below``: documents
    and parts of documents whose hash is below this fraction of all hashes are held out.
    ``report``: what was read, and what was left out and why. ``checksums``: the SHA-256 of each
    file of the splits, in hexadecimal, by its name; stores of version 0.1 have none.
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

    @property
    def vocabulary_hash(self) -> str:
        """The hash of the tokenizer that made the ids."""
        return self.plan.vocabulary_hash

    def token_counts(self, name: SplitName) -> TokenCounts | None:
        """Return the tokens and [UNK] tokens of a split; None where they were not counted.

        Stores of version 0.1 have no such count.
        """
        unknown = self.report.get(UNKNOWN_TOKENS)
        return None if unknown is None else TokenCounts(self.splits[name].tokens, unknown[name])


@dataclass(frozen=True)
class Split:
    """The documents of a store's training or held-out part, as flat arrays.

    - ``ids`` uint16 or uint32 [tokens].
    - ``sentences`` int64 [sentences + 1]: offsets into ``ids``, strictly ascending from 0.
    - ``documents`` int64 [documents + 1]: offsets into ``sentences``, strictly ascending from 0.
    - ``name``: where it stands, for messages.
    """

    ids: NDArray[np.unsignedinteger[Any]]
    sentence_offsets: IntArray
    document_offsets: IntArray
    name: str

    @property
    def counts(self) -> SplitCounts:
        """How much it holds."""
        return SplitCounts(
            documents=len(self.document_offsets) - 1,
            sentences=len(self.sentence_offsets) - 1,
            tokens=len(self.ids),
        )

    @classmethod
    def from_documents(
        cls, documents: Iterable[Sequence[Sequence[int]]], name: str = "memory"
    ) -> Self:
        """Make a split in memory from documents, each a list of sentences, each a list of ids."""
        sentences = [np.asarray(ids, np.uint32) for document in documents for ids in document]
        sizes = [len(document) for document in documents]
        return cls(
            ids=np.concatenate(sentences) if sentences else np.zeros(0, np.uint32),
            sentence_offsets=np.cumsum([0] + [len(ids) for ids in sentences]),
            document_offsets=np.cumsum([0, *sizes]),
            name=name,
        )


def choose_id_bits(vocab_size: int) -> Literal[16, 32]:
    """Return the bits of an id: 16 hold the ids 0 to 65,535."""
    return 16 if vocab_size <= 1 << 16 else 32


class SplitWriter:
    """Writes one split, a group of documents after another, in constant memory.

    The files stand under temporary names until ``close``.
    """

    def __init__(
        self, directory: Path, name: SplitName, bits: Literal[16, 32], unk_id: int | None = None
    ) -> None:
        """``unk_id``: the id of [UNK], counted in ``num_unknown``."""
        self._directory = directory
        self._unk_id = unk_id
        self.num_unknown = 0
        self._type = _id_type(bits)
        self._paths = {part: directory / f"{name}.{part}" for part in _parts(bits)}
        self._files = {part: _temporary(path).open("wb") for part, path in self._paths.items()}
        self._hashes = {part: hashlib.sha256() for part in self._paths}
        self._tokens = self._sentences = self._documents = 0
        for part in ("sentences", "documents"):
            self._write(part, np.zeros(1, _OFFSET))

    def append(self, ids: NDArray[Any], sentence_sizes: IntArray, document_sizes: IntArray) -> None:
        """Add documents: their ids, the tokens a sentence, the sentences a document."""
        if len(ids) != sentence_sizes.sum() or len(sentence_sizes) != document_sizes.sum():
            raise ValueError("the sizes of sentences and documents do not add up")
        if (sentence_sizes <= 0).any() or (document_sizes <= 0).any():
            raise ValueError("a store holds no empty sentence and no empty document")
        if self._unk_id is not None:
            self.num_unknown += int(np.count_nonzero(ids == self._unk_id))
        sentences = self._tokens + np.cumsum(sentence_sizes)
        documents = self._sentences + np.cumsum(document_sizes)
        with add_error_filename(self._directory):
            self._write("ids", ids.astype(self._type, copy=False))
            self._write("sentences", sentences.astype(_OFFSET))
            self._write("documents", documents.astype(_OFFSET))
        self._tokens += len(ids)
        self._sentences += len(sentence_sizes)
        self._documents += len(document_sizes)

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of what was written to each file so far, by the name of the file."""
        return {path.name: self._hashes[part].hexdigest() for part, path in self._paths.items()}

    def _write(self, part: str, values: NDArray[Any]) -> None:
        content = values.tobytes()
        self._files[part].write(content)
        self._hashes[part].update(content)

    def close(self) -> SplitCounts:
        """Put the files in place and return what they hold."""
        for part, path in self._paths.items():
            with add_error_filename(self._directory):
                self._files[part].close()
            sync(_temporary(path))
            _temporary(path).replace(path)
        sync(self._directory)
        return SplitCounts(
            documents=self._documents, sentences=self._sentences, tokens=self._tokens
        )


class Store:
    """A token store opened for reading; its arrays are mapped into memory, not loaded."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the store at ``path`` and check that all of it is there; else raise StoreError."""
        path = Path(path)
        store = cls(path, _read_manifest(path))
        for name in SPLITS:
            _check_sizes(path, name, store.manifest)
        return store

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the ids; refuse another one in its place."""
        tokenizer = Tokenizer.load(self.path / TOKENIZER_DIR)
        self.check_tokenizer(tokenizer)
        if tokenizer.vocab_size != self.manifest.vocab_size:
            raise damaged_file_error(
                self.path / MANIFEST_FILE,
                f"it says {self.manifest.vocab_size:,} words, "
                f"but the tokenizer has {tokenizer.vocab_size:,}",
            )
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise StoreError unless ``tokenizer`` is the one whose ids stand here."""
        if tokenizer.hash != self.manifest.vocabulary_hash:
            raise StoreError(
                f"{self.path}: its ids were made with another vocabulary (hash "
                f"{self.manifest.vocabulary_hash[:12]}, {self.manifest.vocab_size:,} words) than "
                f"the one given (hash {tokenizer.hash[:12]}, {tokenizer.vocab_size:,} words); "
                "use the store's own tokenizer, or run `bertsmith prepare` again with this one"
            )

    def token_counts(self, name: SplitName, unk_id: int) -> TokenCounts:
        """Return the tokens and [UNK] tokens of a split, from the manifest or from the ids."""
        counts = self.manifest.token_counts(name)
        if counts is None:
            ids = self.load_split(name).ids
            unknown = (
                int(np.count_nonzero(ids[first : first + _CHUNK] == unk_id))
                for first in range(0, len(ids), _CHUNK)
            )
            counts = TokenCounts(len(ids), sum(unknown))
        return counts

    def load_split(self, name: SplitName) -> Split:
        """Map the documents of ``train`` or ``heldout`` into memory."""
        if name not in SPLITS:
            raise StoreError(f"{self.path}: no split {name!r}; there are {', '.join(SPLITS)}")
        manifest = self.manifest
        paths = {part: self.path / f"{name}.{part}" for part in _parts(manifest.bits)}
        split = Split(
            ids=_map(paths["ids"], _id_type(manifest.bits)),
            sentence_offsets=_map(paths["sentences"], _OFFSET),
            document_offsets=_map(paths["documents"], _OFFSET),
            name=f"{self.path} ({name})",
        )
        _check_offsets(paths["sentences"], split.sentence_offsets, len(split.ids))
        _check_offsets(paths["documents"], split.document_offsets, len(split.sentence_offsets) - 1)
        for part in ("sentences", "documents"):
            self._verify_checksum(paths[part], NullProgress())
        return split

    def verify(self, progress: Progress | None = None) -> bool:
        """Verify the content of all files; raise StoreError naming the first damaged one.

        Returns whether there were checksums to verify. Without them (stores of version 0.1) the
        sizes, the offsets and the range of the ids are verified.
        """
        progress = NullProgress() if progress is None else progress
        paths = {name: self.path / f"{name}.ids" for name in SPLITS}
        size = sum(path.stat().st_size for path in paths.values())
        progress.start("Verifying the store", size, "bytes")
        for name, path in paths.items():
            self._check_range(path, self.load_split(name).ids)
            self._verify_checksum(path, progress)
        progress.finish()
        return paths["train"].name in self.manifest.checksums

    def _check_range(self, path: Path, ids: NDArray[Any]) -> None:
        """Raise StoreError if an id is not in the vocabulary."""
        step = _BLOCK_BYTES // ids.itemsize
        largest = max((int(ids[i : i + step].max()) for i in range(0, len(ids), step)), default=0)
        if largest >= self.manifest.vocab_size:
            raise damaged_file_error(
                path, describe_out_of_vocabulary(largest, self.manifest.vocab_size)
            )

    def _verify_checksum(self, path: Path, progress: Progress) -> None:
        """Raise StoreError if a file does not have the checksum of the manifest, if that has one.

        Advances ``progress`` by the bytes of the file.
        """
        expected = self.manifest.checksums.get(path.name)
        if expected is None:
            progress.advance(path.stat().st_size)
            return
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                progress.advance(len(block))
        if digest.hexdigest() != expected:
            raise damaged_file_error(
                path, f"its SHA-256 is {digest.hexdigest()[:12]}, expected {expected[:12]}"
            )


def damaged_file_error(name: Path | str, finding: str) -> StoreError:
    """Return the error for a damaged file of a store."""
    return StoreError(f"{name}: the file is damaged: {finding}; {REMAKE}")


def describe_out_of_vocabulary(largest: int, vocab_size: int) -> str:
    """Return the finding that an id is too large."""
    return f"it holds the token id {largest:,}, but the vocabulary has {vocab_size:,} words"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest: the last file of a store; without it there is no store."""
    write_json(directory / MANIFEST_FILE, manifest.model_dump(mode="json"))


def format_unknown_shares(counts: Mapping[SplitName, TokenCounts | None]) -> list[str]:
    """Return the share of [UNK] in each split that was counted, and a warning about the highest."""
    known = {_SPLIT_TITLES[name]: one for name, one in counts.items() if one and one.num_tokens}
    if not known:
        return []
    shares = ", ".join(
        f"{one.unknown_share:.2%} of the {title} tokens" for title, one in known.items()
    )
    highest = max(known, key=lambda title: known[title].unknown_share)
    warning = known[highest].warning(f"the {highest} tokens")
    return [f"[UNK]: {shares}", *([warning] if warning else [])]


def _parts(bits: Literal[16, 32]) -> Mapping[str, np.dtype[Any]]:
    return {"ids": _id_type(bits), "sentences": _OFFSET, "documents": _OFFSET}


def _id_type(bits: Literal[16, 32]) -> np.dtype[Any]:
    return np.dtype("<u2" if bits == 16 else "<u4")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    advice = "give the folder that `bertsmith prepare --out` wrote"
    if not path.is_dir():
        raise StoreError(f"{path}: no such store; {advice}")
    try:
        values = parse_json(file.read_bytes())
    except FileNotFoundError:
        if (path / "parts").is_dir():
            raise StoreError(
                f"{path}: this store is unfinished; run the same `bertsmith prepare` command "
                "again and it goes on where it stopped"
            ) from None
        raise StoreError(f"{path}: not a store, it holds no {MANIFEST_FILE}; {advice}") from None
    except ValueError as error:
        raise damaged_file_error(file, f"not valid JSON: {error}") from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT_VERSION:
        raise StoreError(
            f"{file}: store format {found!r}, expected {FORMAT_VERSION}; {REMAKE} of this version"
        )
    try:
        return Manifest.model_validate_json(json.dumps(values))
    except ValueError as error:
        raise damaged_file_error(file, f"not a manifest of a store: {error}") from None


def _check_sizes(path: Path, name: SplitName, manifest: Manifest) -> None:
    counts = manifest.splits.get(name)
    if counts is None:
        raise StoreError(f"{path / MANIFEST_FILE}: the counts of the split {name!r} are missing")
    numbers = {
        "ids": counts.tokens,
        "sentences": counts.sentences + 1,
        "documents": counts.documents + 1,
    }
    for part, kind in _parts(manifest.bits).items():
        file = path / f"{name}.{part}"
        expected = numbers[part] * kind.itemsize
        if not file.is_file():
            raise StoreError(f"{file}: the file is missing; {REMAKE}")
        if file.stat().st_size != expected:
            raise damaged_file_error(
                file, f"it has {file.stat().st_size:,} bytes, expected {expected:,}"
            )


def _check_offsets(path: Path, offsets: IntArray, end: int) -> None:
    """Raise StoreError unless offsets ascend strictly from 0 to ``end``."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != end:
        raise damaged_file_error(
            path,
            f"its offsets run from {int(offsets[0]):,} to {int(offsets[-1]):,}, "
            f"expected 0 to {end:,}",
        )
    for first in range(0, len(offsets) - 1, _BLOCK_OFFSETS):
        block = offsets[first : first + _BLOCK_OFFSETS + 1]
        if (block[1:] <= block[:-1]).any():
            number = first + int(np.argmax(block[1:] <= block[:-1])) + 1
            raise damaged_file_error(path, f"its offset number {number:,} does not ascend")


def _map(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    """Map a file into memory, read-only, as a plain array."""
    size = path.stat().st_size
    if not size:
        return np.zeros(0, kind)
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return np.frombuffer(buffer, kind)
