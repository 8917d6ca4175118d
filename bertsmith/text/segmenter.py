"""Segments words before WordPiece, for example Korean words into morphemes with Kiwi.

A segmenter only inserts spaces, so every offset in the segmented text corresponds to an offset in
the original text.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any, Final, Protocol

from bertsmith.errors import MissingExtraError, TokenizerError

#: What users of a model with a segmenter have to do in other libraries.
SEGMENTER_NOTE: Final = (
    "segment texts before tokenization: this model was trained with a segmenter, which "
    "tokenizer.json does not contain"
)


class Segmenter(Protocol):
    """Finds the boundaries inside words, such as those between morphemes.

    Attributes:
        name: Name of the segmenter.
        version: Version of its library.
    """

    name: str
    version: str

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return, for each text, the ascending character offsets at which to insert a space."""


class KiwiSegmenter:
    """Segments Korean into morphemes with ``kiwipiepy``.

    A morpheme boundary inside a syllable (a contraction such as 갔 = 가 + 았) is ignored. Kiwi is
    loaded at the first use, which takes a second and some hundred megabytes.
    """

    name = "kiwi"

    def __init__(self, threads: int = 1) -> None:
        """Use ``threads`` threads; raise MissingExtraError if kiwipiepy is not installed."""
        try:
            self.version = metadata.version("kiwipiepy")
        except metadata.PackageNotFoundError:
            raise MissingExtraError(
                "kiwipiepy", "korean", "segmenting Korean into morphemes"
            ) from None
        self._threads = threads
        self._kiwi: Any = None
        # Several threads of a server may be the first to use Kiwi.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["KiwiSegmenter"], tuple[int]]:
        return KiwiSegmenter, (self._threads,)

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the offsets of morpheme boundaries that have no space yet."""
        with self._lock:
            if self._kiwi is None:
                from kiwipiepy import Kiwi

                self._kiwi = Kiwi(num_workers=self._threads)
        analyses = self._kiwi.tokenize(list(texts))
        return [
            _find_morpheme_boundaries(text, morphemes)
            for text, morphemes in zip(texts, analyses, strict=True)
        ]


def _find_morpheme_boundaries(text: str, morphemes: Iterable[Any]) -> list[int]:
    """Return the offsets at which a morpheme starts right after another one, without a space."""
    boundaries: list[int] = []
    end = 0
    for morpheme in morphemes:
        start = morpheme.start
        # A morpheme that is empty or starts inside the previous syllable has no boundary.
        has_boundary = morpheme.len > 0 and start >= end > 0
        if has_boundary and not text[start - 1].isspace() and not text[start].isspace():
            boundaries.append(start)
        end = max(end, start + morpheme.len)
    return boundaries


def insert_spaces(text: str, boundaries: Sequence[int]) -> str:
    """Return ``text`` with a space inserted at each offset."""
    return " ".join(text[start:end] for start, end in pairwise([0, *boundaries, len(text)]))


def segment_texts(segmenter: Segmenter, texts: Sequence[str]) -> Iterator[str]:
    """Yield each text with spaces inserted at the boundaries of the segmenter."""
    for text, boundaries in zip(texts, segmenter.find_boundaries(texts), strict=True):
        yield insert_spaces(text, boundaries)


def load_segmenter(name: str, version: str | None = None, threads: int = 1) -> Segmenter:
    """Return a segmenter.

    Args:
        name: Name of the segmenter; only "kiwi" exists.
        version: Version that a tokenizer was made with; None accepts any version. Only the major
            and minor version must equal those of the installed library.
        threads: Number of threads to use.

    Raises:
        TokenizerError: The name is unknown, or another version is installed, which could give
            other ids for the same text.
    """
    if name != KiwiSegmenter.name:
        raise TokenizerError(f"no segmenter is named {name!r}; expected {KiwiSegmenter.name!r}")
    segmenter = KiwiSegmenter(threads)
    if version is not None and version.split(".")[:2] != segmenter.version.split(".")[:2]:
        raise TokenizerError(
            f"this tokenizer was made with kiwipiepy {version}, but {segmenter.version} is "
            "installed, which segments words differently; install it with: "
            f"pip install kiwipiepy=={version}"
        )
    return segmenter
