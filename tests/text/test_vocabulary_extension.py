"""Adding words to a vocabulary: accepted words, their ids, and their former pieces."""

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
#: A vocabulary in which "im" occurs twice.
VOCAB = (*SPECIAL_TOKENS, *PIECES.split())


def make_tokenizer(**options: bool) -> Tokenizer:
    """Return a tokenizer with the small vocabulary."""
    return Tokenizer(TokenizerSpec(vocab=VOCAB, **options))  # type: ignore[arg-type]


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
def test_words_are_normalized(line: str, word: str) -> None:
    """Case and invisible characters are normalized as in a text, and the change is reported."""
    check = check_words(make_tokenizer(), ["", line, word])
    assert check.accepted == [word]
    assert check.normalized == ({} if line == word else {line.strip(): word})
    assert not check.existing
    assert not check.rejected


@pytest.mark.parametrize(
    ("line", "reason"),
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
def test_words_that_never_occur_are_rejected(line: str, reason: str) -> None:
    """A word that the tokenizer always splits is rejected: its embedding would never be used."""
    check = check_words(make_tokenizer(), [line])
    assert reason in check.rejected[line]
    assert not check.accepted


def test_cased_vocabulary_keeps_capitals() -> None:
    """In a cased vocabulary, the capitalized and the lowercase form are two words."""
    check = check_words(make_tokenizer(lowercase=False), ["Immuno", "immuno"])
    assert (check.accepted, check.normalized) == (["Immuno", "immuno"], {})


def test_existing_words_are_not_added() -> None:
    """Words that are in the vocabulary, before or after normalization, are reported, not added."""
    check = check_words(make_tokenizer(), ["the", "The", "[MASK]", "##glo", "한"])
    assert check.existing == ["the", "The", "[MASK]", "##glo", "한"]
    assert not check.accepted
    with pytest.raises(TokenizerError, match="no word to add"):
        extend_vocabulary(make_tokenizer(), check.accepted)


class HalvingSegmenter:
    """A segmenter that splits words of four characters in the middle."""

    name, version = "halves", "1.0"

    def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the middle of each text of four characters."""
        return [[2] if len(text) == 4 else [] for text in texts]


def test_segmented_words_are_rejected() -> None:
    """A word that the segmenter splits is rejected; a "##" piece is not segmented."""
    spec = TokenizerSpec(vocab=VOCAB, segmenter=("halves", "1.0"))
    tokenizer = Tokenizer(spec, HalvingSegmenter())
    check = check_words(tokenizer, ["학교에서", "학교", "##학교에서"])
    assert check.rejected == {"학교에서": "halves splits it: 학교 | 에서"}
    assert check.accepted == ["학교", "##학교에서"]
    word_counts = WordCounts.from_texts(tokenizer, ["학교에서"])
    assert word_counts.counts == {"학교": 1, "에서": 1}


def test_existing_ids_do_not_change() -> None:
    """Every existing word keeps its id, even a repeated one; new ids follow the last."""
    old = make_tokenizer()
    extension = extend_vocabulary(old, ["immunoglobulin", "한국어", "##globu"])
    new, first_id = extension.tokenizer, extension.first_id
    assert first_id == len(VOCAB)
    assert new.vocab[: len(VOCAB)] == VOCAB
    assert all(new.token_to_id(word) == old.token_to_id(word) for word in VOCAB)
    # The second "im" of VOCAB, whose id is used, is right before "##im".
    assert old.token_to_id("im") == VOCAB.index("##im") - 1
    expected = [first_id, first_id + 1, VOCAB.index("the")]
    assert new.encode("Immunoglobulin 한국어 the") == expected
    assert new.hash != old.hash


def test_new_words_have_the_pieces_of_the_old_vocabulary() -> None:
    """New words and "##" pieces are split with the old vocabulary; [UNK] if that is impossible."""
    old = make_tokenizer()
    words = ["immunoglobulin", "한국어", "zz", "antibodyo"]
    piece_ids = extend_vocabulary(old, [*words, "##globu", "##zz", "##imim"]).piece_ids
    assert piece_ids[:4] == tuple(tuple(old.encode(word)) for word in words)
    assert old.ids_to_tokens(piece_ids[0]) == ["im", "##mun", "##o", "##glo", "##bu", "##lin"]
    assert old.ids_to_tokens(piece_ids[4]) == ["##glo", "##bu"]
    assert piece_ids[5] == (old.unk_id,)
    assert old.ids_to_tokens(piece_ids[6]) == ["##im", "##im"]


TEXTS = [
    "Immunoglobulin, immunoglobulin! The 한국어 한국어 한국어 antibody.",
    "antibody immunoglobulin 한국어 imim the zz zz zz zz the 12 12",
]


def test_frequent_split_words_are_found() -> None:
    """Words are found if they have a letter, are split and occur twice; frequent words first."""
    tokenizer = make_tokenizer()
    word_counts = WordCounts.from_texts(tokenizer, TEXTS)
    assert word_counts.counts["imim"] == 1
    words = find_frequent_words(tokenizer, word_counts, 10)
    assert words == ["한국어", "immunoglobulin", "antibody"]
    assert find_frequent_words(tokenizer, word_counts, 2) == words[:2]


def test_fit_is_compared_before_and_after_the_extension() -> None:
    """The number of pieces of the same words is measured before and after the extension."""
    tokenizer = make_tokenizer()
    word_counts = WordCounts.from_texts(tokenizer, TEXTS)
    words = find_frequent_words(tokenizer, word_counts, 10)
    extension = extend_vocabulary(tokenizer, words)
    comparison = compare_fit(tokenizer, extension.tokenizer, word_counts)
    # 4 한국어 of 3 pieces, 3 immunoglobulin of 6 and 2 antibody of 2 are now one piece each.
    assert comparison.before.num_words == comparison.after.num_words == word_counts.counts.total()
    assert comparison.before.num_pieces - comparison.after.num_pieces == 4 * 2 + 3 * 5 + 2
    assert comparison.to_json()["num_dropped"] == 0
