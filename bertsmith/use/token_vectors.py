"""Vectors of tokens, and of the occurrences of a word."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import InputError
from bertsmith.use.inputs import check_is_text_list
from bertsmith.use.word_boundaries import is_followed_by_mark, is_inside_word

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of several texts.

    Attributes:
        sequences: For each text, the token ids of [CLS] text [SEP].
        num_truncated: How many texts were truncated to the model's maximum length.
    """

    sequences: list[list[int]]
    num_truncated: int


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of one text and their vectors.

    Attributes:
        tokens: The tokens as strings.
        ids: The token ids.
        offsets: The range [start, end) of the characters of each token; an empty range for [CLS]
            and [SEP].
        vectors: float32 [S, W].
        is_truncated: Whether the text was longer than the model's maximum length.
    """

    tokens: list[str]
    ids: list[int]
    offsets: list[tuple[int, int]]
    vectors: Floats
    is_truncated: bool


@dataclass(frozen=True)
class WordVector:
    """The vector of one occurrence of a word.

    Attributes:
        text_index: Index of the text that contains the word, from 0.
        start: Index of the word's first character in the text.
        end: Index after the word's last character in the text.
        vector: float32 [W].
    """

    text_index: int
    start: int
    end: int
    vector: Floats


def find_word(text: str, word: str, *, ignore_case: bool) -> list[tuple[int, int]]:
    """Return the range [start, end) of the characters of each occurrence of a word.

    If the word occurs only as the beginning of longer words, these count as occurrences.
    """
    word = word.strip()
    if not word:
        return []
    flags = re.IGNORECASE if ignore_case else 0
    prefix_pattern = rf"(?<!\w){re.escape(word)}"
    spans: list[tuple[int, int]] = []
    for pattern, is_prefix in ((rf"{prefix_pattern}(?!\w)", False), (prefix_pattern, True)):
        spans = spans or [
            match.span()
            for match in re.finditer(pattern, text, flags)
            if not is_inside_word(text, match.start())
            and not is_followed_by_mark(text, match.end(), accents_only=is_prefix)
        ]
    return spans


def find_word_in_texts(
    texts: Sequence[str], word: str, *, ignore_case: bool, skip: bool
) -> dict[int, list[tuple[int, int]]]:
    """Return the character ranges of the word by text index, for texts that contain it.

    Args:
        texts: The texts.
        word: The word.
        ignore_case: As for ``find_word``.
        skip: Whether to skip texts without the word.

    Raises:
        InputError: ``texts`` is a single string, or a text does not contain the word and ``skip``
            is False.
    """
    check_is_text_list(texts)
    spans_by_text = {
        index: find_word(text, word, ignore_case=ignore_case) for index, text in enumerate(texts)
    }
    for index, spans in spans_by_text.items():
        if not spans and not skip:
            raise InputError(
                f"text {index + 1}: the word {word!r} is not in {texts[index][:60]!r}; "
                "expected the word in every text"
            )
    return {index: spans for index, spans in spans_by_text.items() if spans}


def average_word_tokens(
    word: str,
    spans_by_text: Mapping[int, list[tuple[int, int]]],
    vectors: Sequence[TokenVectors],
    max_seqlen: int,
    *,
    skip: bool = False,
) -> list[WordVector]:
    """Return the mean vector of the tokens of each occurrence of the word.

    Args:
        word: The word.
        spans_by_text: The character ranges of the word by text index.
        vectors: The token vectors of these texts.
        max_seqlen: Number of tokens to which the texts were truncated.
        skip: Whether to skip occurrences that were removed by truncation.

    Raises:
        InputError: An occurrence was removed by truncation, and ``skip`` is False.
    """
    word_vectors = []
    for (index, spans), tokens in zip(spans_by_text.items(), vectors, strict=True):
        for start, end in spans:
            token_indices = [
                token_index
                for token_index, (token_start, token_end) in enumerate(tokens.offsets)
                if token_start < end and token_end > start
            ]
            if token_indices:
                vector = tokens.vectors[token_indices].mean(0)
                word_vectors.append(WordVector(index, start, end, vector))
            elif not skip:
                raise InputError(
                    f"text {index + 1}: the word {word!r} is beyond the model's limit of "
                    f"{max_seqlen} tokens; shorten the text"
                )
    return word_vectors
