"""Adds words to a vocabulary: which words it can take, and what each of them was cut into before.

It never knows a model. An id that stands for a word stays its id; new ones come behind the last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenizers import pre_tokenizers

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import CONTINUATION_PREFIX, TokenizerSpec, build_normalizer
from bertsmith.text.vocabulary_report import VocabularyReport, measure_fit_from_counts
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

#: How often a word must occur to be worth an id: of one that occurs once nothing can be learnt.
MIN_OCCURRENCES = 2


@dataclass
class WordCheck:
    """What became of the words that were asked for.

    words: those to add, as the tokenizer meets them. known: those of the vocabulary already.
    changed: how a word was written -> how the tokenizer meets it. refused: a word -> why.
    """

    words: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what became of them as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class VocabularyExtension:
    """A vocabulary with words added behind its last id.

    tokenizer: the new one. words: those that were added; the first one has the id ``first``.
    piece_ids: for each of them the ids that it was cut into before, [UNK] where it was unknown.
    """

    tokenizer: Tokenizer
    words: tuple[str, ...]
    first_id: int
    piece_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FitComparison:
    """How the old and the new vocabulary fit the same text. forgotten: see ``WordCounts``."""

    before: VocabularyReport
    after: VocabularyReport
    forgotten: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        both = {"before": self.before.to_json(), "after": self.after.to_json()}
        return both | {"forgotten": self.forgotten}


def check_words(tokenizer: Tokenizer, lines: Iterable[str]) -> WordCheck:
    """Look at each line's word; "##" before it asks for a piece that continues a word.

    What the tokenizer would write otherwise (lower case) is taken as it would; what it would part
    (by spaces or punctuation) can never be met as one word, and is refused.
    """
    clean_of = build_normalizer(tokenizer.spec).normalize_str
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    found = WordCheck()
    seen: set[str] = set()
    for line in lines:
        written = line.strip()
        if not written:
            continue
        if tokenizer.token_to_id(written) is not None:
            found.known.append(written)
            continue
        prefix = CONTINUATION_PREFIX if written.startswith(CONTINUATION_PREFIX) else ""
        bare = written.removeprefix(prefix)
        clean = clean_of(bare).strip()
        # What continues a word is asked for behind a letter, as it will stand there.
        parts = split(clean_of(f"a{bare}" if prefix and clean else bare))
        why = _why_not(tokenizer, bare, clean, [part for part, _ in parts], continues=bool(prefix))
        if why:
            found.refused[written] = why
            continue
        word = prefix + clean
        if word != written:
            found.changed[written] = word
        if tokenizer.token_to_id(word) is not None:
            found.known.append(written)
        elif word not in seen:
            seen.add(word)
            found.words.append(word)
    return found


def _why_not(
    tokenizer: Tokenizer, bare: str, clean: str, parts: Sequence[str], *, continues: bool
) -> str:
    """Return why a word cannot be in the vocabulary, "" if it can."""
    if not clean:
        return "nothing is left of it after cleaning"
    if len(parts) > 1:
        shown = " | ".join(parts)
        return ("it never continues a word: " if continues else "it is parted: ") + shown
    if len(clean) > tokenizer.spec.longest_word:
        return f"it has more than {tokenizer.spec.longest_word} characters"
    if tokenizer.segmenter is not None and not continues:
        places = tokenizer.segmenter.find_boundaries([bare])[0]
        parts = [bare[start:end] for start, end in zip([0, *places], [*places, None], strict=True)]
        if places:
            return f"{tokenizer.segmenter.name} parts it: {' | '.join(parts)}"
    return ""


def find_frequent_words(tokenizer: Tokenizer, word_counts: WordCounts, count: int) -> list[str]:
    """Return up to ``count`` words, the most frequent first, that are cut into pieces now.

    They have a letter and occur twice at least. Equal counts are ordered by code point.
    """
    often = sorted(
        (word for word, times in word_counts.counts.items()
         if times >= MIN_OCCURRENCES and any(map(str.isalpha, word)) and tokenizer.token_to_id(word) is None),
        key=lambda word: (-word_counts.counts[word], word),
    )  # fmt: skip
    found: list[str] = []
    for word, ids in tokenize_words(tokenizer, often):
        if len(found) == count:
            break
        # [UNK] is one piece.
        if len(ids) > 1:
            found.append(word)
    return found


def extend_vocabulary(tokenizer: Tokenizer, words: Sequence[str]) -> VocabularyExtension:
    """Return the vocabulary with ``words``, as ``check_words`` or ``find_frequent_words`` gave them, behind it.

    Raises TokenizerError if there is none, or if tokens stand behind the vocabulary already.
    """
    if not words:
        raise TokenizerError(
            "there is no word to add: none was found that the vocabulary can take and has not yet"
        )
    old = tokenizer.spec
    behind = old.words[len(old.vocab) :]
    if behind:
        raise TokenizerError(
            f"tokens were added behind this vocabulary ({', '.join(behind[:5])}); their ids are "
            "where new words would go, so it cannot be extended"
        )
    recipe = TokenizerSpec(**(vars(old) | {"vocab": (*old.vocab, *words)}))
    pieces = tuple(_pieces(tokenizer, word) for word in words)
    return VocabularyExtension(
        Tokenizer(recipe, tokenizer.segmenter), tuple(words), tokenizer.vocab_size, pieces
    )


def compare_fit(before: Tokenizer, after: Tokenizer, counted: WordCounts) -> FitComparison:
    """Return how well both vocabularies fit the words that were counted."""
    return FitComparison(
        measure_fit_from_counts(before, counted),
        measure_fit_from_counts(after, counted),
        counted.num_dropped,
    )


def _pieces(tokenizer: Tokenizer, word: str) -> tuple[int, ...]:
    """Cut a word, or a piece that continues one, into its longest known pieces from the left.

    The engine cannot be asked for what continues a word.
    """
    found: list[int] = []
    prefix = CONTINUATION_PREFIX if word.startswith(CONTINUATION_PREFIX) else ""
    rest = word.removeprefix(prefix)
    while rest:
        ends = range(len(rest), 0, -1)
        end = next(
            (end for end in ends if tokenizer.token_to_id(prefix + rest[:end]) is not None), None
        )
        if end is None:
            return (tokenizer.unk_id,)
        known = tokenizer.token_to_id(prefix + rest[:end])
        assert known is not None
        found.append(known)
        prefix, rest = CONTINUATION_PREFIX, rest[end:]
    return tuple(found)
