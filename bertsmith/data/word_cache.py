"""Tokenizes sentences quickly by caching the ids of every word.

BERT's tokenizer treats the text between two spaces independently of the text around it: cleaning,
lowercasing, accent stripping and splitting at punctuation never look across a space. So the ids
of a sentence are the concatenated ids of its space-separated words, and only words that are not in
the cache have to be tokenized. In running text, that is at most one word in twenty.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.packing import concat_ranges
from bertsmith.text.segmenter import segment_texts
from bertsmith.text.wordpiece import Tokenizer

#: Maximum number of cached words (about 60 MB). When it is exceeded, the cache is cleared.
MAX_CACHED_WORDS = 1 << 18
#: Number of sentences tokenized at a time, small enough for their words to stay in the CPU cache.
_CHUNK_SENTENCES = 2048
#: Common punctuation, surrounded by spaces first so that "end." is cached as "end" and ".". The
#: ids do not change, since the tokenizer always splits there. "[" is included because
#: ``_tokenize_new_words`` requires that no word contains it.
_PUNCTUATION = ",.()['\"-"
#: Number of new words that are joined into one text for the tokenizer.
_WORDS_PER_TEXT = 64


class _WordNumbers(dict[str, int]):
    """Numbers words in the order in which they first occur."""

    def __missing__(self, word: str) -> int:
        number = len(self)
        self[word] = number
        return number


class CachedTokenizer:
    """Returns the same ids as ``tokenizer.encode_batch``, two to three times as fast.

    Attributes:
        is_continuation: Whether each id is a piece that continues a word ("##"), bool [V].
    """

    def __init__(self, tokenizer: Tokenizer, max_cached_words: int = MAX_CACHED_WORDS) -> None:
        """Wrap ``tokenizer``, with a cache for at most about ``max_cached_words`` words."""
        self.is_continuation = np.asarray(tokenizer.is_continuation, np.bool_)
        self._segmenter = tokenizer.segmenter
        # Sentences are segmented before they are split into words, so words are not segmented.
        self._tokenizer = Tokenizer(replace(tokenizer.spec, segmenter=None))
        # An added token may contain spaces. Then the ids of a word depend on its neighbors and
        # cannot be cached.
        self._uncached_tokenizer = tokenizer if tokenizer.spec.added else None
        self._max_cached_words = max_cached_words
        # The ids of word number i are _ids[_starts[i] : _starts[i] + _sizes[i]].
        self._word_numbers = _WordNumbers()
        self._sizes: IntArray = np.zeros(0, np.int64)
        self._starts: IntArray = np.zeros(0, np.int64)
        self._ids: IntArray = np.zeros(0, np.int64)

    def encode(self, sentences: Sequence[str]) -> tuple[IntArray, IntArray]:
        r"""Tokenize sentences, which must not contain "\n".

        Returns:
            The concatenated ids, int64, and the number of ids of each sentence, int64 [n].
        """
        if self._uncached_tokenizer is not None:
            id_lists = self._uncached_tokenizer.encode_batch(sentences)
            sizes = np.fromiter(map(len, id_lists), np.int64, len(id_lists))
            ids = np.fromiter(chain.from_iterable(id_lists), np.int64, int(sizes.sum()))
            return ids, sizes
        chunks = [
            self._encode_chunk(sentences[first : first + _CHUNK_SENTENCES])
            for first in range(0, len(sentences), _CHUNK_SENTENCES)
        ]
        if not chunks:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        chunk_ids, chunk_sizes = zip(*chunks, strict=True)
        return np.concatenate(chunk_ids), np.concatenate(chunk_sizes)

    def _encode_chunk(self, sentences: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Tokenize a few sentences; see ``encode``."""
        if len(self._word_numbers) > self._max_cached_words:
            self._clear()
        words = [sentence.split(" ") for sentence in self._preprocess(sentences)]
        num_words = np.fromiter(map(len, words), np.int64, len(words))
        numbers = np.fromiter(
            map(self._word_numbers.__getitem__, chain.from_iterable(words)),
            np.int64,
            int(num_words.sum()),
        )
        self._tokenize_new_words()
        sizes = self._sizes[numbers]
        ids = self._ids[concat_ranges(self._starts[numbers], sizes)]
        sentence_ends = np.append(0, np.cumsum(sizes))[np.cumsum(num_words)]
        return ids, np.diff(sentence_ends, prepend=0)

    def _preprocess(self, sentences: Sequence[str]) -> list[str]:
        """Put spaces around common punctuation, and lowercase the sentences if that is safe."""
        if self._segmenter is not None:
            sentences = list(segment_texts(self._segmenter, sentences))
        text = "\n".join(sentences)
        for mark in _PUNCTUATION:
            text = text.replace(mark, f" {mark} ")
        # Python lowercases a final capital sigma differently from the tokenizer.
        if self._tokenizer.lowercase and "Σ" not in text:
            text = text.lower()
        return text.split("\n")

    def _tokenize_new_words(self) -> None:
        """Tokenize the words that have a number but no cached ids yet."""
        num_cached = len(self._sizes)
        num_new = len(self._word_numbers) - num_cached
        # The dictionary is in the order of the numbers, so the new words are its last keys.
        new_words = list(islice(reversed(self._word_numbers), num_new))
        new_words.reverse()
        if not new_words:
            return
        # The tokenizer has a fixed cost per text, so many words are joined into one text, each
        # followed by [SEP]. No word contains "[", so no word can look like a special token.
        texts = []
        for first in range(0, len(new_words), _WORDS_PER_TEXT):
            words = new_words[first : first + _WORDS_PER_TEXT]
            texts.append("".join(f"{word} [SEP] " for word in words))
        id_lists = self._tokenizer.encode_batch(texts, allow_special=True)
        ids_with_separators = np.fromiter(
            chain.from_iterable(id_lists), np.int64, sum(map(len, id_lists))
        )
        is_separator = ids_with_separators == self._tokenizer.sep_id
        sizes = np.diff(np.flatnonzero(is_separator), prepend=-1) - 1
        ids = ids_with_separators[~is_separator]
        self._starts = np.append(self._starts, len(self._ids) + np.cumsum(sizes) - sizes)
        self._sizes = np.append(self._sizes, sizes)
        self._ids = np.append(self._ids, ids)

    def _clear(self) -> None:
        """Remove all words and ids from the cache."""
        self._word_numbers = _WordNumbers()
        self._sizes = self._starts = self._ids = np.zeros(0, np.int64)
