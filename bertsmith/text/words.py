"""Counts the words of texts, divided as before WordPiece, in bounded memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, Self

from tokenizers import pre_tokenizers

from bertsmith.text.segmenter import segment_texts
from bertsmith.text.tokenizer_spec import build_normalizer
from bertsmith.text.wordpiece import Tokenizer

#: Maximum number of distinct words in memory. They take some hundred megabytes.
MAX_DISTINCT_WORDS: Final = 500_000
#: Number of words tokenized at a time.
_WORDS_PER_BATCH: Final = 10_000


class WordCounts:
    """Counts of distinct words. If there are too many, all but the most frequent are dropped.

    Attributes:
        counts: Count of each word, after normalization and segmentation, including punctuation
            marks. The count of a word that was dropped and occurred again is too low.
        num_dropped: Sum of the counts of all dropped words.
        num_too_long: Number of words that the tokenizer replaces by [UNK] because of their length.
        num_characters: Number of characters in the texts.
    """

    def __init__(self, tokenizer: Tokenizer, max_distinct_words: int = MAX_DISTINCT_WORDS) -> None:
        """Start with empty counts, with at most ``max_distinct_words`` words in memory."""
        self._normalize = build_normalizer(tokenizer.spec).normalize_str
        self._pre_tokenize = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._segmenter = tokenizer.segmenter
        self._max_word_length = tokenizer.spec.max_word_chars
        self._max_distinct_words = max_distinct_words
        self.counts: Counter[str] = Counter()
        self.num_dropped = self.num_too_long = self.num_characters = 0

    @classmethod
    def from_texts(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Self:
        """Count the words of ``texts``."""
        counts = cls(tokenizer)
        for text in texts:
            counts.add(text)
        return counts

    def add(self, text: str) -> None:
        """Count the words of ``text``; if there are too many distinct words, drop the rarest."""
        self.num_characters += len(text)
        if self._segmenter is not None:
            text = "\n".join(segment_texts(self._segmenter, text.split("\n")))
        for word, _ in self._pre_tokenize(self._normalize(text)):
            if len(word) > self._max_word_length:
                self.num_too_long += 1
            else:
                self.counts[word] += 1
        if len(self.counts) > self._max_distinct_words:
            remaining = Counter(dict(self.counts.most_common(self._max_distinct_words // 2)))
            self.num_dropped += self.counts.total() - remaining.total()
            self.counts = remaining


def tokenize_words(
    tokenizer: Tokenizer, words: Iterable[str]
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield each word with the ids of its pieces; the segmenter is not applied."""
    unsegmented = Tokenizer(replace(tokenizer.spec, segmenter=None))
    iterator = iter(words)
    while batch := list(islice(iterator, _WORDS_PER_BATCH)):
        yield from zip(batch, unsegmented.encode_batch(batch), strict=True)
