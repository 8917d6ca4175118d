"""Parts the words of a text before WordPiece sees them: Korean morphemes by Kiwi.

It never knows a vocabulary. The text itself stays as it is; only spaces are put in, so that every
place in the segmented text has its place in the original.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any, Protocol

from bertsmith.errors import MissingExtraError, TokenizerError


class Segmenter(Protocol):
    """Finds where words part."""

    name: str
    version: str

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return, for each text, the places (in characters, ascending) where a space goes in."""


class KiwiSegmenter:
    """Korean morphemes by ``kiwipiepy``.

    A border of morphemes inside a syllable (a contraction such as 갔 = 가 + 았) is no cut. The
    analyser is loaded at the first use: a second, and some hundred megabytes.
    """

    name = "kiwi"

    def __init__(self, threads: int = 1) -> None:
        try:
            self.version = metadata.version("kiwipiepy")
        except metadata.PackageNotFoundError:
            raise MissingExtraError(
                "kiwipiepy", "korean", "segmenting Korean into morphemes"
            ) from None
        self._threads = threads
        self._analyser: Any = None

    def __reduce__(self) -> tuple[type["KiwiSegmenter"], tuple[int]]:
        return KiwiSegmenter, (self._threads,)

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the borders of morphemes that are not at a space already."""
        if self._analyser is None:
            from kiwipiepy import Kiwi as Analyser

            self._analyser = Analyser(num_workers=self._threads)
        found = self._analyser.tokenize(list(texts))
        return [_borders(text, morphemes) for text, morphemes in zip(texts, found, strict=True)]


def _borders(text: str, morphemes: Iterable[Any]) -> list[int]:
    cuts: list[int] = []
    end = 0
    for morpheme in morphemes:
        start = morpheme.start
        # A morpheme of no length, or one inside the syllable before, gives no border.
        disjoint = morpheme.len > 0 and start >= end > 0
        if disjoint and not text[start - 1].isspace() and not text[start].isspace():
            cuts.append(start)
        end = max(end, start + morpheme.len)
    return cuts


def insert_spaces(text: str, cuts: Sequence[int]) -> str:
    """Return ``text`` with a space at each cut."""
    return " ".join(text[start:end] for start, end in pairwise([0, *cuts, len(text)]))


def segment_texts(segmenter: Segmenter, texts: Sequence[str]) -> Iterator[str]:
    """Yield each text with its words parted by spaces."""
    for text, cuts in zip(texts, segmenter.find_boundaries(texts), strict=True):
        yield insert_spaces(text, cuts)


def load_segmenter(name: str, version: str | None = None, threads: int = 1) -> Segmenter:
    """Return the segmenter of that name; ``version`` must be the installed one up to the patch.

    Raises TokenizerError for another name or version: the same text would become other ids.
    """
    if name != KiwiSegmenter.name:
        raise TokenizerError(f"no segmenter is named {name!r}; expected {KiwiSegmenter.name!r}")
    kiwi = KiwiSegmenter(threads)
    if version is not None and version.split(".")[:2] != kiwi.version.split(".")[:2]:
        raise TokenizerError(
            f"this tokenizer was made with kiwipiepy {version}, but {kiwi.version} is installed, "
            f"which parts words otherwise; install it with: pip install kiwipiepy=={version}"
        )
    return kiwi
