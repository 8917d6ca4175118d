"""Counting words as WordPiece splits them, in bounded memory."""

from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_report import measure_fit
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

VOCAB = (*SPECIAL_TOKENS, "the", "ca", "##t", "한", "##국")
TOKENIZER = Tokenizer(TokenizerSpec(vocab=VOCAB, max_word_chars=7))


def test_words_are_normalized_and_split() -> None:
    """Words are lowercased and split at punctuation and spaces; Hangul is not decomposed."""
    word_counts = WordCounts.from_texts(TOKENIZER, ["The Cat, the cat.", "한국 THE"])
    assert word_counts.counts == {"the": 3, "cat": 2, ",": 1, ".": 1, "한국": 1}
    assert word_counts.num_characters == len("The Cat, the cat.") + len("한국 THE")
    assert word_counts.num_dropped == word_counts.num_too_long == 0


def test_too_long_words_are_only_counted() -> None:
    """Words that become [UNK] because of their length are not stored, to bound the memory."""
    texts = ["the " + "x" * 8, "x" * 7]
    word_counts = WordCounts.from_texts(TOKENIZER, texts)
    assert (word_counts.counts, word_counts.num_too_long) == ({"the": 1, "x" * 7: 1}, 1)
    report = measure_fit(TOKENIZER, texts)
    assert (report.num_words, report.num_pieces, report.num_unknown, report.num_single_piece) == (
        3,
        3,
        2,
        1,
    )


def test_rare_words_are_dropped() -> None:
    """The number of distinct words is limited, and frequent words keep their exact counts."""
    word_counts = WordCounts(TOKENIZER, max_distinct_words=10)
    for number in range(100):
        word_counts.add(f"the cat the w{number} v{number}")
        assert len(word_counts.counts) <= 10
    assert word_counts.counts["the"] == 200
    assert word_counts.counts["cat"] == 100
    assert word_counts.counts.total() + word_counts.num_dropped == 100 * 5


def test_words_are_tokenized_separately() -> None:
    """Each word is returned with the ids of its pieces, in the order of the input."""
    words = ["cat", "한국", "zz"]
    pieces = [
        (word, TOKENIZER.ids_to_tokens(ids)) for word, ids in tokenize_words(TOKENIZER, words)
    ]
    assert pieces == [("cat", ["ca", "##t"]), ("한국", ["한", "##국"]), ("zz", ["[UNK]"])]
