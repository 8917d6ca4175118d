"""Learns a vocabulary from a corpus and tries it on documents that it has not seen.

It never knows where the vocabulary is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from bertsmith.progress import Progress
from bertsmith.settings import Settings
from bertsmith.text.corpus import CorpusOptions, CorpusReport, Source, read_documents
from bertsmith.text.segmenter import load_segmenter
from bertsmith.text.vocabulary_report import VocabularyReport, measure_fit
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece

#: One document in this many is held out, told by the hash of its text.
HELD_OUT_EVERY = 100
#: Characters of held-out text that the vocabulary is tried on.
SAMPLE = 1_000_000


class VocabularyOptions(Settings):
    """What a vocabulary shall be like; see ``training.train_wordpiece``.

    ``segment``: the name of a segmenter, such as "kiwi". ``threads``: how many it may use.
    """

    size: int = 30522
    cased: bool = False
    strip_accents: bool = False
    split_chinese: bool = True
    segment: str | None = None
    threads: int = 1
    min_frequency: int = 2
    coverage: float = 0.9999


@dataclass(frozen=True)
class LearnedVocabulary:
    """A tokenizer, how it fits, and the text it was learnt from.

    ``held_out``: whether ``measure_fit`` was measured on documents that were not learnt from; a
    corpus of few documents has none.
    """

    tokenizer: Tokenizer
    quality: VocabularyReport
    corpus: CorpusReport
    held_out: bool

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {
            "words": self.tokenizer.vocab_size,
            "hash": self.tokenizer.hash,
            "held_out": self.held_out,
            "quality": self.quality.to_json(),
            "corpus": self.corpus.to_json(),
        }


def learn_vocabulary(
    found: Sequence[Source],
    corpus: CorpusOptions,
    options: VocabularyOptions,
    progress: Progress,
) -> LearnedVocabulary:
    """Learn a vocabulary from the documents of ``found``, of which one in a hundred is held out.

    Raises CorpusError and TokenizerError as reading and training do.
    """
    segmenter = None
    if options.segment is not None:
        segmenter = load_segmenter(options.segment, threads=options.threads)
    texts = _Texts(found, corpus)
    once = any(source.is_stream for source in found)
    tokenizer = train_wordpiece(
        iter(texts) if once else texts,
        options.size,
        cased=options.cased,
        strip_accents=options.strip_accents,
        split_chinese=options.split_chinese,
        segmenter=segmenter,
        min_frequency=options.min_frequency,
        coverage=options.coverage,
        progress=progress,
    )
    sample = texts.held_out or texts.learnt
    return LearnedVocabulary(
        tokenizer, measure_fit(tokenizer, sample), texts.report, bool(texts.held_out)
    )


class _Texts:
    """The documents to learn from, any number of times; keeps samples of them and of the others."""

    def __init__(self, found: Sequence[Source], options: CorpusOptions) -> None:
        self._found, self._options = found, options
        self.report = CorpusReport()
        self.held_out: list[str] = []
        self.learnt: list[str] = []

    def __iter__(self) -> Iterator[str]:
        report = CorpusReport()
        held_out, learnt = _Sample(), _Sample()
        for document in read_documents(self._found, self._options, report):
            digest = blake2b(document.text.encode(), digest_size=8).digest()
            if int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0:
                held_out.add(document.text)
            else:
                learnt.add(document.text)
                yield document.text
        report.require_documents()
        self.report, self.held_out, self.learnt = report, held_out.texts, learnt.texts


class _Sample:
    """The first texts, up to about SAMPLE characters."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._room = SAMPLE

    def add(self, text: str) -> None:
        """Keep ``text``, or as much of it as there is room for."""
        if self._room > 0:
            self.texts.append(text[: self._room])
            self._room -= len(text)
