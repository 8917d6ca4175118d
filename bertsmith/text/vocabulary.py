"""Learns a vocabulary from a corpus and measures it on held-out documents."""

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

#: One of this many documents is held out, chosen by the hash of its text.
HELD_OUT_EVERY = 100
#: Number of characters in the text on which the fit of the vocabulary is measured.
_SAMPLE_CHARACTERS = 1_000_000


class VocabularyOptions(Settings):
    """Options for learning a vocabulary, as described in ``train_wordpiece``.

    Attributes:
        size: Maximum number of entries.
        cased: Whether to keep the case of letters.
        strip_accents: Whether to remove accents.
        split_chinese: Whether each Chinese character is a word.
        segment: Name of a segmenter, such as "kiwi"; None for no segmentation.
        threads: Number of threads of the segmenter.
        min_frequency: Minimum count of a pair of pieces to merge.
        coverage: Share of the text's characters that the vocabulary should cover.
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
    """A new vocabulary, how well it fits a text, and a report on the corpus.

    Attributes:
        tokenizer: Tokenizer with the vocabulary.
        quality: How well the vocabulary fits a sample of text.
        corpus: Counts of what was read from the corpus and left out.
        has_held_out_sample: Whether ``quality`` was measured on held-out documents. A corpus of few
            documents has none, so it is measured on training documents.
    """

    tokenizer: Tokenizer
    quality: VocabularyReport
    corpus: CorpusReport
    has_held_out_sample: bool

    def to_json(self) -> dict[str, Any]:
        """Return the description of the vocabulary as JSON values."""
        return {
            "words": self.tokenizer.vocab_size,
            "hash": self.tokenizer.hash,
            "held_out": self.has_held_out_sample,
            "quality": self.quality.to_json(),
            "corpus": self.corpus.to_json(),
        }


def learn_vocabulary(
    sources: Sequence[Source],
    corpus_options: CorpusOptions,
    options: VocabularyOptions,
    progress: Progress,
) -> LearnedVocabulary:
    """Learn a vocabulary from the documents of a corpus, of which 1 % are held out.

    Raises:
        CorpusError: A source cannot be read.
        TokenizerError: An option is out of range, or the corpus contains no word.
    """
    segmenter = None
    if options.segment is not None:
        segmenter = load_segmenter(options.segment, threads=options.threads)
    texts = _CorpusTexts(sources, corpus_options)
    # A stream can be read only once. ``train_wordpiece`` stores the texts of an iterator.
    has_stream = any(source.is_stream for source in sources)
    tokenizer = train_wordpiece(
        iter(texts) if has_stream else texts,
        options.size,
        cased=options.cased,
        strip_accents=options.strip_accents,
        split_chinese=options.split_chinese,
        segmenter=segmenter,
        min_frequency=options.min_frequency,
        coverage=options.coverage,
        progress=progress,
    )
    sample = texts.held_out_sample or texts.training_sample
    quality = measure_fit(tokenizer, sample)
    return LearnedVocabulary(tokenizer, quality, texts.report, bool(texts.held_out_sample))


class _CorpusTexts:
    """Iterates over the training documents, and collects samples of both splits.

    Attributes:
        report: Counts of what the last iteration read and left out.
        held_out_sample: Texts of held-out documents.
        training_sample: Texts of training documents.
    """

    def __init__(self, sources: Sequence[Source], options: CorpusOptions) -> None:
        self._sources, self._options = sources, options
        self.report = CorpusReport()
        self.held_out_sample: list[str] = []
        self.training_sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        report = CorpusReport()
        held_out, training = _Sample(), _Sample()
        for document in read_documents(self._sources, self._options, report):
            digest = blake2b(document.text.encode(), digest_size=8).digest()
            is_selected = int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0
            # The vocabulary is never learned from less text than is held out.
            if is_selected and held_out.size + len(document.text) <= training.size:
                held_out.add(document.text)
            else:
                training.add(document.text)
                yield document.text
        report.require_documents()
        self.report = report
        self.held_out_sample, self.training_sample = held_out.texts, training.texts


class _Sample:
    """The first texts that are added, up to _SAMPLE_CHARACTERS characters in total.

    Attributes:
        texts: The texts.
        size: Number of characters of all texts that were added.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.size = 0

    def add(self, text: str) -> None:
        """Append ``text``, truncated to the characters that remain until the limit."""
        if self.size < _SAMPLE_CHARACTERS:
            self.texts.append(text[: _SAMPLE_CHARACTERS - self.size])
        self.size += len(text)
