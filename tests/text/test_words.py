"""Words counted as WordPiece meets them, in bounded memory."""

from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_report import measure_fit
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

TOKENIZER = Tokenizer(
    TokenizerSpec(vocab=(*SPECIAL_TOKENS, "the", "ca", "##t", "한", "##국"), longest_word=7)
)


def test_words_are_counted_as_the_tokenizer_meets_them() -> None:
    """Lowered, parted at punctuation and spaces; Hangul stays whole."""
    counted = WordCounts.from_texts(TOKENIZER, ["The Cat, the cat.", "한국 THE"])
    assert counted.counts == {"the": 3, "cat": 2, ",": 1, ".": 1, "한국": 1}
    assert counted.num_characters == len("The Cat, the cat.") + len("한국 THE")
    assert counted.num_dropped == counted.num_too_long == 0


def test_words_that_are_too_long_are_counted_and_not_kept() -> None:
    """They are [UNK] whatever they are, so that text without spaces takes no memory."""
    texts = ["the " + "x" * 8, "x" * 7]
    counted = WordCounts.from_texts(TOKENIZER, texts)
    assert (counted.counts, counted.num_too_long) == ({"the": 1, "x" * 7: 1}, 1)
    report = measure_fit(TOKENIZER, texts)
    assert (report.words, report.pieces, report.unknown, report.whole) == (3, 3, 2, 1)


def test_the_rarest_words_are_forgotten_where_there_are_too_many() -> None:
    """Never more than the most words are held after a text; frequent ones keep their counts."""
    counted = WordCounts(TOKENIZER, max_distinct_words=10)
    for number in range(100):
        counted.add(f"the cat the w{number} v{number}")
        assert len(counted.counts) <= 10
    assert counted.counts["the"] == 200
    assert counted.counts["cat"] == 100
    assert counted.counts.total() + counted.num_dropped == 500


def test_words_are_cut_by_themselves() -> None:
    """Each word comes with the ids of its pieces, in the order given."""
    found = {word: list(ids) for word, ids in tokenize_words(TOKENIZER, ["cat", "한국", "zz"])}
    assert found == {"cat": [6, 7], "한국": [8, 9], "zz": [1]}
