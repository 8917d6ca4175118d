"""Counts the words of texts as WordPiece meets them, in memory that does not grow with the text.

It never knows what the counts are for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Self

from tokenizers import pre_tokenizers

from bertsmith.text.segmenter import segment_texts
from bertsmith.text.tokenizer_spec import TokenizerSpec, build_normalizer
from bertsmith.text.wordpiece import Tokenizer

#: Distinct words held at once: some hundred megabytes.
MAX_DISTINCT_WORDS: Final = 500_000
#: Words cut into pieces at once.
_WINDOW: Final = 10_000


class WordCounts:
    """How often each word occurs; where there are too many, the rarest are forgotten.

    counts: the words as they are after cleaning and segmenting, punctuation marks among them; a
    word that was forgotten once may count too little. forgotten: occurrences of forgotten words.
    num_too_long: occurrences of words longer than the tokenizer takes, [UNK] all of them.
    num_characters: those of the texts.
    """

    def __init__(self, tokenizer: Tokenizer, most: int = MAX_DISTINCT_WORDS) -> None:
        """``most``: the distinct words that are held at once."""
        self._clean = build_normalizer(tokenizer.spec).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._segmenter = tokenizer.segmenter
        self._longest = tokenizer.spec.longest_word
        self._most = most
        self.counts: Counter[str] = Counter()
        self.num_dropped = self.num_too_long = self.num_characters = 0

    @classmethod
    def from_texts(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Self:
        """Return the counts of ``texts``."""
        result = cls(tokenizer)
        for text in texts:
            result.add(text)
        return result

    def add(self, text: str) -> None:
        """Count the words of ``text``."""
        self.num_characters += len(text)
        if self._segmenter is not None:
            text = next(segment_texts(self._segmenter, [text]))
        for word, _ in self._split(self._clean(text)):
            if len(word) > self._longest:
                self.num_too_long += 1
            else:
                self.counts[word] += 1
        if len(self.counts) > self._most:
            kept = Counter(dict(self.counts.most_common(self._most // 2)))
            self.num_dropped += self.counts.total() - kept.total()
            self.counts = kept


def tokenize_words(
    tokenizer: Tokenizer, words: Iterable[str]
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield each word with the ids of its pieces; no segmenter parts it once more."""
    plain = Tokenizer(TokenizerSpec(**(vars(tokenizer.spec) | {"segmenter": None})))
    rest = iter(words)
    while window := list(islice(rest, _WINDOW)):
        yield from zip(window, plain.encode_batch(window), strict=True)
