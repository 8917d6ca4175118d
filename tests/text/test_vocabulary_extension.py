"""Words added to a vocabulary: which it takes, where they stand, and what they were before."""

from collections.abc import Sequence

import pytest

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_extension import (
    check_words,
    compare_fit,
    extend_vocabulary,
    find_frequent_words,
)
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts

PIECES = "im ##mun ##o ##glo ##bu ##lin 한 ##국 ##어 the im ##im anti ##body a 1 ##2"
#: "im" stands on two lines.
VOCAB = (*SPECIAL_TOKENS, *PIECES.split())


def made(**choices: bool) -> Tokenizer:
    """Return a tokenizer with the little vocabulary."""
    return Tokenizer(TokenizerSpec(vocab=VOCAB, **choices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("immunoglobulin", "immunoglobulin"),
        ("  Immunoglobulin\t", "immunoglobulin"),
        ("한국어", "한국어"),
        ("##GLOBU", "##globu"),
        ("im\u00admun", "immun"),
        ("zz", "zz"),
    ],
)
def test_words_are_taken_as_the_tokenizer_meets_them(line: str, word: str) -> None:
    """Case and invisible characters go as they would in a text, and that is told."""
    found = check_words(made(), ["", line, word])
    assert found.accepted == [word]
    assert found.normalized == ({} if line == word else {line.strip(): word})
    assert not found.existing
    assert not found.rejected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("co-op", "it is split: co | - | op"),
        ("im mun", "it is split: im | mun"),
        ("한국 어", "it is split: 한국 | 어"),
        ("추-", "it is split: 추 | -"),
        ("博士", "it is split: 博 | 士"),
        ("##-", "it never continues a word: a | -"),
        ("##博", "it never continues a word: a | 博"),
        ("\u00ad", "nothing is left"),
        ("##", "nothing is left"),
        ("[NEW]", "it is split"),
        ("x" * 101, "more than 100 characters"),
    ],
)
def test_words_that_no_text_can_give_are_refused(line: str, why: str) -> None:
    """What is parted before the vocabulary is asked would be a row that is never read."""
    found = check_words(made(), [line])
    assert found.rejected[line].startswith(why) or why in found.rejected[line]
    assert not found.accepted


def test_capital_letters_stay_where_case_is_kept() -> None:
    """A cased vocabulary takes both forms, as two words."""
    found = check_words(made(lowercase=False), ["Immuno", "immuno"])
    assert (found.accepted, found.normalized) == (["Immuno", "immuno"], {})


def test_words_that_are_there_are_told_and_left() -> None:
    """So are special tokens, and forms that the tokenizer writes as a word that is there."""
    found = check_words(made(), ["the", "The", "[MASK]", "##glo", "한"])
    assert found.existing == ["the", "The", "[MASK]", "##glo", "한"]
    assert not found.accepted
    with pytest.raises(TokenizerError, match="no word to add"):
        extend_vocabulary(made(), found.accepted)


class Halves:
    """Parts every word of four characters in its middle."""

    name, version = "halves", "1.0"

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the middle of each text of four characters."""
        return [[2] if len(text) == 4 else [] for text in texts]


def test_what_the_segmenter_parts_is_refused() -> None:
    """A word of two morphemes never comes to the vocabulary whole."""
    recipe = TokenizerSpec(vocab=VOCAB, segmenter=("halves", "1.0"))
    found = check_words(Tokenizer(recipe, Halves()), ["학교에서", "학교", "##학교에서"])
    assert found.rejected == {"학교에서": "halves splits it: 학교 | 에서"}
    assert found.accepted == ["학교", "##학교에서"]
    counted = WordCounts.from_texts(Tokenizer(recipe, Halves()), ["학교에서"])
    assert counted.counts == {"학교": 1, "에서": 1}


def test_old_ids_stay_and_new_ones_follow() -> None:
    """Every old word has its id, a repeated line included; the new ones come behind the last."""
    old = made()
    new = extend_vocabulary(old, ["immunoglobulin", "한국어", "##globu"])
    assert new.first_id == len(VOCAB)
    assert new.tokenizer.vocab[: len(VOCAB)] == VOCAB
    assert all(new.tokenizer.token_to_id(word) == old.token_to_id(word) for word in VOCAB)
    assert old.token_to_id("im") == VOCAB.index("##im") - 1
    assert new.tokenizer.encode("Immunoglobulin 한국어 the") == [
        new.first_id, new.first_id + 1, VOCAB.index("the"),
    ]  # fmt: skip
    assert new.tokenizer.hash != old.hash


def test_the_pieces_are_what_the_word_was_before() -> None:
    """Of a word what the engine made of it; of a continuing piece what continued; else [UNK]."""
    old = made()
    words = ["immunoglobulin", "한국어", "zz", "antibodyo"]
    found = extend_vocabulary(old, [*words, "##globu", "##zz", "##imim"])
    assert found.piece_ids[:4] == tuple(tuple(old.encode(word)) for word in words)
    assert old.ids_to_tokens(found.piece_ids[0]) == ["im", "##mun", "##o", "##glo", "##bu", "##lin"]
    assert old.ids_to_tokens(found.piece_ids[4]) == ["##glo", "##bu"]
    assert found.piece_ids[5] == (old.unk_id,)
    assert old.ids_to_tokens(found.piece_ids[6]) == ["##im", "##im"]


TEXT = [
    "Immunoglobulin, immunoglobulin! The 한국어 한국어 한국어 antibody.",
    "antibody immunoglobulin 한국어 imim the zz zz zz zz the 12 12",
]


def test_the_most_frequent_split_words_of_a_text_are_found() -> None:
    """Only words with a letter that are in pieces now and occur twice; the most frequent first."""
    tokenizer = made()
    counted = WordCounts.from_texts(tokenizer, TEXT)
    assert counted.counts["imim"] == 1
    assert find_frequent_words(tokenizer, counted, 10) == ["한국어", "immunoglobulin", "antibody"]
    assert find_frequent_words(tokenizer, counted, 2) == ["한국어", "immunoglobulin"]


def test_the_gain_is_told_on_the_same_text() -> None:
    """Pieces a word before and after, over all words of the text."""
    tokenizer = made()
    counted = WordCounts.from_texts(tokenizer, TEXT)
    found = extend_vocabulary(tokenizer, find_frequent_words(tokenizer, counted, 10))
    told = compare_fit(tokenizer, found.tokenizer, counted)
    # 4 한국어 of 3 pieces, 3 immunoglobulin of 6, 2 antibody of 2 became 9 pieces.
    assert told.before.words == told.after.words == counted.counts.total()
    assert told.before.pieces - told.after.pieces == 4 * 2 + 3 * 5 + 2
    assert told.to_json()["forgotten"] == 0
