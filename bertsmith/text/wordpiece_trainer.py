"""Trains a WordPiece vocabulary from a stream of texts, deterministically.

The trainer of ``tokenizers`` counts words and merges pieces. Its result depends on the order of
the alphabet, which is random by default, so this module chooses the alphabet before training.
"""

import tempfile
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import IO, Final

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from bertsmith.errors import TokenizerError
from bertsmith.progress import NullProgress, Progress
from bertsmith.text.alphabet import Alphabet, CharacterCounts, build_ascii_alphabet
from bertsmith.text.segmenter import Segmenter, segment_texts
from bertsmith.text.tokenizer_spec import (
    CONTINUATION_PREFIX,
    SPECIAL_TOKENS,
    UNK,
    TokenizerSpec,
    build_normalizer,
)
from bertsmith.text.wordpiece import Tokenizer

#: Characters per chunk of text whose characters are counted.
_CHARACTER_CHUNK: Final = 1 << 19
#: Characters per chunk of text whose words are counted. These chunks are counted in parallel, so
#: they are smaller.
_WORD_CHUNK: Final = 1 << 14
#: The trainer of `tokenizers` uses 32-bit integers.
_MAX_INT32: Final = 2**31 - 1
#: Maximum number of characters that are searched for punctuation, back from the end of a chunk
#: without spaces.
_MAX_LOOKBACK: Final = 1000
#: Number of lines segmented at a time.
_SEGMENTER_BATCH: Final = 1024
#: Minimum share of the entries that are pieces of two characters or more, not counting special
#: tokens and ASCII characters.
_MIN_WORD_SHARE: Final = 0.5
#: Interval in seconds in which signals are checked while `tokenizers` trains, and maximum time for
#: its thread to stop reading texts after an interruption.
_SIGNAL_SECONDS, _MAX_STOP_SECONDS = 0.1, 5.0


def train_wordpiece(
    texts: Iterable[str],
    size: int,
    *,
    cased: bool = False,
    strip_accents: bool = False,
    split_chinese: bool = True,
    segmenter: Segmenter | None = None,
    min_frequency: int = 2,
    coverage: float = 0.9999,
    progress: Progress | None = None,
) -> Tokenizer:
    """Train a vocabulary. The same texts always give the same vocabulary.

    The special tokens come first. The ASCII digits, letters and punctuation are always included,
    so that no ASCII text becomes [UNK]. The texts are read twice. If ``texts`` is an iterator, or
    the texts are segmented, they are written to a temporary file before the first reading.

    Args:
        texts: Texts to learn from.
        size: Maximum number of entries. A small corpus gives fewer entries.
        cased: Whether to keep the case of letters.
        strip_accents: Whether to remove accents.
        split_chinese: Whether each Chinese character is a word.
        segmenter: Segmenter applied before tokenization.
        min_frequency: Minimum count of a pair of pieces to merge.
        coverage: Share of the text's characters that the vocabulary should cover. The most
            frequent characters are included first. Characters outside ASCII take at most half of
            the entries that remain after special tokens and ASCII characters.
        progress: Receives the progress.

    Raises:
        TokenizerError: A number is out of range, or the texts contain no word.
    """
    required = build_ascii_alphabet(lowercase=not cased)
    _check_size(size, required, cased=cased)
    _check_ranges(min_frequency, coverage)
    progress = NullProgress() if progress is None else progress
    spec = TokenizerSpec(
        vocab=SPECIAL_TOKENS,
        lowercase=not cased,
        strip_accents=strip_accents,
        split_chinese=split_chinese,
        segmenter=(segmenter.name, segmenter.version) if segmenter else None,
    )
    if segmenter is not None:
        texts = _segment_in_batches(texts, segmenter)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", newline="\n") as file:
        is_iterator = iter(texts) is texts
        if is_iterator:
            texts = _write_texts(texts, file)
        counts, total_characters = _count_characters(texts, spec, progress)
        if counts.is_empty:
            raise TokenizerError(
                "no word found in the texts, so no vocabulary can be learned; give files with text"
            )
        remaining = size - len(SPECIAL_TOKENS) - required.num_pieces
        max_pieces = int(remaining * (1 - _MIN_WORD_SHARE))
        alphabet = counts.choose_alphabet(coverage, max_pieces, required)
        chunks = _filter_chunks(texts, counts.make_word_filter(alphabet), spec)
        backend = _train_backend(
            chunks, size, min_frequency, spec, alphabet, total_characters, progress
        )
    progress.finish()
    vocab = _sort_vocabulary(backend.get_vocab())
    return Tokenizer(replace(spec, vocab=vocab), segmenter)


def _check_size(size: int, required: Alphabet, *, cased: bool) -> None:
    """Raise TokenizerError if a vocabulary of this size has no room for words, or is too large.

    Args:
        size: Maximum number of entries.
        required: Characters that are always included.
        cased: Whether the case of letters is kept.
    """
    minimum = len(SPECIAL_TOKENS) + required.num_pieces
    if size <= minimum:
        letters = "letters" if cased else "lower-case letters"
        raise TokenizerError(
            f"the vocabulary size is too small: {size:,}, but the {len(SPECIAL_TOKENS)} special "
            f"tokens and the {required.num_pieces} pieces of the ASCII digits, {letters} and "
            f"punctuation take {minimum} entries; choose a size above {minimum}"
        )
    if size > _MAX_INT32:
        raise TokenizerError(
            f"the vocabulary size is too large: {size:,}; choose at most {_MAX_INT32:,}"
        )


def _check_ranges(min_frequency: int, coverage: float) -> None:
    """Raise TokenizerError if an option of ``train_wordpiece`` is out of range."""
    if not 1 <= min_frequency <= _MAX_INT32:
        raise TokenizerError(
            f"the minimum frequency is out of range: {min_frequency:,}; choose 1 to {_MAX_INT32:,}"
        )
    if not 0 < coverage <= 1:
        raise TokenizerError(
            f"the coverage is out of range: {coverage}; choose a share above 0 and at most 1"
        )


def _segment_in_batches(texts: Iterable[str], segmenter: Segmenter) -> Iterator[str]:
    """Yield the segmented lines of the texts.

    The segmenter analyzes the lines of a batch in parallel. It gets lines, because its memory grows
    with the length of a text, and documents can be books.
    """
    lines = (line for text in texts for line in text.split("\n"))
    while batch := list(islice(lines, _SEGMENTER_BATCH)):
        yield from segment_texts(segmenter, batch)


def _write_texts(texts: Iterable[str], file: IO[str]) -> "_FileLines":
    """Write the texts to a file, and return its lines, which can be read repeatedly."""
    for text in texts:
        file.write(text + "\n")
    return _FileLines(file)


class _FileLines:
    """An iterable over the lines of a file, which starts at the first line each time."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[str]:
        self._file.seek(0)
        yield from self._file


def _make_chunks(texts: Iterable[str], size: int) -> Iterator[str]:
    """Join short texts and divide long ones into chunks of about ``size`` characters."""
    parts: list[str] = []
    length = 0
    for text in texts:
        for part in _divide_text(text, size):
            parts.append(part)
            length += len(part)
            if length >= size:
                yield "\n".join(parts)
                parts, length = [], 0
    if parts:
        yield "\n".join(parts)


def _divide_text(text: str, size: int) -> Iterator[str]:
    """Divide a long text between words into parts of at most ``size`` characters.

    A word is only divided if it is longer than ``size``, which is far more than the length at which
    words become [UNK], or if the text around it has no spaces and punctuation, as in Chinese.
    """
    start = 0
    while len(text) - start > size:
        end = _find_last_word_start(text, start, start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def _find_last_word_start(text: str, start: int, end: int) -> int:
    """Return the last offset in (start, end] where a word may start; ``end`` if there is none."""
    space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
    if space > start:
        return space
    for offset in range(end, max(start, end - _MAX_LOOKBACK), -1):
        if unicodedata.category(text[offset]).startswith("P"):
            return offset
    return end


def _count_characters(
    texts: Iterable[str], spec: TokenizerSpec, progress: Progress
) -> tuple[CharacterCounts, int]:
    """Return how often each character occurs in the texts, and the number of characters."""
    normalize = build_normalizer(spec).normalize_str
    normalizes_texts = _recomposes_hangul(spec)
    counts = CharacterCounts(str if normalizes_texts else normalize, spec.max_word_chars)
    total_characters = 0
    progress.start("Counting characters", None, "characters")
    for chunk in _make_chunks(texts, _CHARACTER_CHUNK):
        counts.add(normalize(chunk) if normalizes_texts else chunk)
        total_characters += len(chunk)
        progress.advance(len(chunk))
    return counts, total_characters


def _filter_chunks(
    texts: Iterable[str], filter_words: Callable[[str], str], spec: TokenizerSpec
) -> Iterator[tuple[int, str]]:
    """Yield the number of characters of each chunk, and its text without unsuitable words.

    Words with a character outside the alphabet are removed: the trainer would drop only that
    character, and merge its neighbors into pieces that do not occur in the text. Words that are
    too long are removed because they become [UNK] anyway, and merging them takes quadratic time.
    """
    normalize = build_normalizer(spec).normalize_str
    normalizes_texts = _recomposes_hangul(spec)
    for chunk in _make_chunks(texts, _WORD_CHUNK):
        yield len(chunk), filter_words(normalize(chunk) if normalizes_texts else chunk)


def _recomposes_hangul(spec: TokenizerSpec) -> bool:
    """Return whether the normalizer combines characters of decomposed Hangul.

    Then texts are normalized before their characters are counted one by one.
    """
    return spec.strip_accents and spec.keep_hangul_syllables


def _train_backend(
    chunks: Iterable[tuple[int, str]],
    size: int,
    min_frequency: int,
    spec: TokenizerSpec,
    alphabet: Alphabet,
    total_characters: int,
    progress: Progress,
) -> Backend:
    """Run the trainer of ``tokenizers`` with a fixed alphabet.

    By default, the trainer numbers the continuing characters ("##a") in the order of a hash table
    with a random seed, and breaks ties between merges by these numbers. So the continuing
    characters are passed as special tokens, which come first and keep their order.
    """
    continuations = [CONTINUATION_PREFIX + character for character in alphabet.continuations]
    special_tokens = [AddedToken(word, special=True) for word in (*SPECIAL_TOKENS, *continuations)]
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=special_tokens,
        initial_alphabet=list(alphabet.characters),
        limit_alphabet=len(alphabet.characters),
        continuing_subword_prefix=CONTINUATION_PREFIX,
    )
    backend = Backend(WordPiece(unk_token=UNK))
    backend.normalizer = build_normalizer(spec)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _train_in_thread(backend, _report_progress(chunks, total_characters, progress), trainer)
    return backend


def _train_in_thread(backend: Backend, texts: Iterable[str], trainer: WordPieceTrainer) -> None:
    """Run the trainer in a thread, so that Ctrl-C and SIGTERM end this function at once.

    `tokenizers` does not return before the vocabulary is complete. After an interruption, its
    thread stops reading texts. It ends with the process, or when it has joined the pieces of the
    texts that it has read.
    """
    is_interrupted, is_read, is_finished = (threading.Event() for _ in range(3))
    errors: list[BaseException] = []

    def read_texts() -> Iterator[str]:
        try:
            for text in texts:
                if is_interrupted.is_set():
                    return
                yield text
        finally:
            is_read.set()

    def train() -> None:
        try:
            backend.train_from_iterator(read_texts(), trainer)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)
        finally:
            is_finished.set()

    try:
        threading.Thread(target=train, name="bertsmith-vocabulary", daemon=True).start()
        while not is_finished.wait(_SIGNAL_SECONDS):
            pass
    except BaseException:
        is_interrupted.set()
        is_read.wait(_MAX_STOP_SECONDS)
        raise
    if errors:
        raise errors[0]


def _report_progress(
    chunks: Iterable[tuple[int, str]], total_characters: int, progress: Progress
) -> Iterator[str]:
    """Yield the text of each chunk; advance the progress when the next chunk is requested."""
    progress.start("Counting words", total_characters, "characters")
    for num_characters, chunk in chunks:
        yield chunk
        progress.advance(num_characters)
    progress.start("Joining pieces", None, "words")


def _sort_vocabulary(ids: dict[str, int]) -> tuple[str, ...]:
    """Return the special tokens, characters, continuing characters, and words in merge order."""
    words = sorted(ids, key=lambda word: ids[word])

    def sort_key(word: str) -> tuple[int, str]:
        if word in SPECIAL_TOKENS:
            return 0, ""
        if len(word) == 1:
            return 1, word
        if len(word) == len(CONTINUATION_PREFIX) + 1 and word.startswith(CONTINUATION_PREFIX):
            return 2, word
        return 3, ""

    # The sort is stable, so special tokens and merged words keep the trainer's order.
    return tuple(sorted(words, key=sort_key))
