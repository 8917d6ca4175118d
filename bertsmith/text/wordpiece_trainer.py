"""Learns a WordPiece vocabulary from a stream of texts, the same one every time.

It never knows where the texts come from. ``tokenizers`` counts the words and joins the pieces;
what it would leave to chance, the order of the alphabet, is settled here beforehand.
"""

import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Final

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Engine
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

#: Characters handed on at once: to count characters, and to count words (which runs in parallel).
_LARGE, _SMALL = 1 << 19, 1 << 14
#: What the trainer of `tokenizers` can count in 32 bits.
_MOST: Final = 2**31 - 1
#: How far back from its end a chunk without blanks is searched for a punctuation mark.
_LOOK_BACK: Final = 1000
#: Texts segmented at once.
_BATCH: Final = 64
#: The least share of the entries after special tokens and ASCII that is left for longer pieces.
_WORDS_SHARE: Final = 0.5


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
    """Learn a vocabulary of ``size`` words, the special tokens first; equal texts, equal bytes.

    The texts are gone through twice; an iterator that gives them once is kept in a temporary file
    between, as are segmented texts. ``min_frequency``: how often a pair of pieces must occur to be
    joined. The vocabulary always holds the ASCII digits, letters and punctuation, so that no ASCII
    text is [UNK]. ``coverage``: the share of the characters of the text that the vocabulary shall
    know, the most frequent first; those beyond ASCII take at most half of the remaining entries. A
    corpus too small for ``size`` gives a smaller vocabulary. Raises TokenizerError for a number out
    of range, or texts without a word.
    """
    required = build_ascii_alphabet(lowercase=not cased)
    _check_size(size, required, cased=cased)
    if size > _MOST:
        raise TokenizerError(f"a vocabulary of {size} words: expected {_MOST:,} at most")
    if not 1 <= min_frequency <= _MOST:
        raise TokenizerError(f"a least frequency of {min_frequency}: expected 1 to {_MOST:,}")
    if not 0 < coverage <= 1:
        raise TokenizerError(f"a coverage of {coverage}: expected a share above 0 and up to 1")
    progress = NullProgress() if progress is None else progress
    recipe = TokenizerSpec(
        vocab=SPECIAL_TOKENS,
        lowercase=not cased,
        strip_accents=strip_accents,
        split_chinese=split_chinese,
        segmenter=(segmenter.name, segmenter.version) if segmenter else None,
    )
    if segmenter is not None:
        texts = _segmented(texts, segmenter)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", newline="\n") as spool:
        if iter(texts) is texts:
            texts = _spooled(texts, spool)
        counts, total = _count(texts, recipe, progress)
        if counts.is_empty:
            raise TokenizerError("there is no word in these texts to learn a vocabulary from")
        remaining = size - len(SPECIAL_TOKENS) - required.num_pieces
        alphabet = counts.choose_alphabet(coverage, int(remaining * (1 - _WORDS_SHARE)), required)
        chunks = _within(texts, counts.make_word_filter(alphabet), recipe)
        engine = _trained(chunks, size, min_frequency, recipe, alphabet, total, progress)
    progress.finish()
    vocab = _ordered(engine.get_vocab())
    return Tokenizer(TokenizerSpec(**(vars(recipe) | {"vocab": vocab})), segmenter)


def _check_size(size: int, required: Alphabet, *, cased: bool) -> None:
    """Raise TokenizerError if the entries that every vocabulary has leave no room for words."""
    minimum = len(SPECIAL_TOKENS) + required.num_pieces
    if size <= minimum:
        letters = "letters" if cased else "lower-case letters"
        raise TokenizerError(
            f"the vocabulary size is too small: {size:,}, but the {len(SPECIAL_TOKENS)} special tokens "
            f"and the {required.num_pieces} pieces of the ASCII digits, {letters} and punctuation "
            f"take {minimum} entries; choose a size above {minimum}"
        )


def _segmented(texts: Iterable[str], segmenter: Segmenter) -> Iterator[str]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield from segment_texts(segmenter, batch)
            batch = []
    yield from segment_texts(segmenter, batch)


def _spooled(texts: Iterable[str], spool: IO[str]) -> "_Spool":
    for text in texts:
        spool.write(text + "\n")
    return _Spool(spool)


class _Spool:
    """The lines of a temporary file, any number of times."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __iter__(self) -> Iterator[str]:
        self._file.seek(0)
        # Every line anew, whatever was read before; a file object iterates over itself.
        return map(str, self._file)


def _chunks(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the texts in chunks of about ``size`` characters, cut as ``_cut`` does."""
    held: list[str] = []
    length = 0
    for text in texts:
        for piece in _cut(text, size):
            held.append(piece)
            length += len(piece)
            if length >= size:
                yield "\n".join(held)
                held, length = [], 0
    if held:
        yield "\n".join(held)


def _cut(text: str, size: int) -> Iterator[str]:
    """Cut a long text between words into pieces of at most ``size`` characters.

    A word is cut only if it is far longer than those that a vocabulary is learnt from.
    """
    start = 0
    while len(text) - start > size:
        end = _last_border(text, start, start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def _last_border(text: str, start: int, end: int) -> int:
    """Return the last place in (start, end] where a word may begin, or ``end`` if none is near."""
    border = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
    if border > start:
        return border
    for place in range(end, max(start, end - _LOOK_BACK), -1):
        if unicodedata.category(text[place]).startswith("P"):
            return place
    return end


def _count(
    texts: Iterable[str], recipe: TokenizerSpec, progress: Progress
) -> tuple[CharacterCounts, int]:
    """Count the characters of all texts; also return how many there were."""
    clean = build_normalizer(recipe).normalize_str
    whole = _whole(recipe)
    counts = CharacterCounts(str if whole else clean, recipe.longest_word)
    total = 0
    progress.start("Counting characters", None, "characters")
    for text in _chunks(texts, _LARGE):
        counts.add(clean(text) if whole else text)
        total += len(text)
        progress.advance(len(text))
    return counts, total


def _within(
    texts: Iterable[str], limited: Callable[[str], str], recipe: TokenizerSpec
) -> Iterator[tuple[int, str]]:
    """Yield what the trainer is to see of each chunk, and how many characters the chunk has.

    Of a word with a character beyond the alphabet the trainer would leave that out and join its
    neighbours: pieces of words that occur nowhere. Words longer than the tokenizer takes are left
    out as well: they are [UNK], and joining their pieces takes quadratic time.
    """
    whole, clean = _whole(recipe), build_normalizer(recipe).normalize_str
    for chunk in _chunks(texts, _SMALL):
        yield len(chunk), limited(clean(chunk) if whole else chunk)


def _whole(recipe: TokenizerSpec) -> bool:
    """Tell whether texts are cleaned whole: jamo are put together across characters."""
    return recipe.strip_accents and recipe.whole_hangul


def _trained(
    chunks: Iterable[tuple[int, str]],
    size: int,
    min_frequency: int,
    recipe: TokenizerSpec,
    alphabet: Alphabet,
    total: int,
    progress: Progress,
) -> Engine:
    """Run the trainer of ``tokenizers`` with an alphabet that is fixed beforehand.

    Left to itself it numbers the continuing characters ("##a") as a randomly seeded hash table
    gives them, and equal counts are settled by number. Named as special tokens they come first,
    in a fixed order.
    """
    continuing = [CONTINUATION_PREFIX + character for character in alphabet.continuations]
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=[AddedToken(word, special=True) for word in (*SPECIAL_TOKENS, *continuing)],
        initial_alphabet=list(alphabet.characters),
        limit_alphabet=len(alphabet.characters),
        continuing_subword_prefix=CONTINUATION_PREFIX,
    )
    engine = Engine(WordPiece(unk_token=UNK))
    engine.normalizer = build_normalizer(recipe)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.train_from_iterator(_told(chunks, total, progress), trainer)
    return engine


def _told(chunks: Iterable[tuple[int, str]], total: int, progress: Progress) -> Iterator[str]:
    progress.start("Counting words", total, "characters")
    for characters, chunk in chunks:
        yield chunk
        progress.advance(characters)
    progress.start("Joining pieces", None, "words")


def _ordered(ids: dict[str, int]) -> tuple[str, ...]:
    """Return special tokens, characters, continuing characters, then words as they were joined."""
    words = sorted(ids, key=lambda word: ids[word])

    def rank(word: str) -> tuple[int, str]:
        if word in SPECIAL_TOKENS:
            return 0, ""
        if len(word) == 1:
            return 1, word
        if len(word) == len(CONTINUATION_PREFIX) + 1 and word.startswith(CONTINUATION_PREFIX):
            return 2, word
        return 3, ""

    # The sort is stable: special tokens and joined words keep the trainer's order.
    return tuple(sorted(words, key=rank))
