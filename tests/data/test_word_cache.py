"""The memo gives the tokenizer's own ids."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABIé\u03c3ςµ\u0131ß.,()[]'\"-=<한글가나中文"]
WORDS = ["the", "end", "##ing", "walk", "##ed", "##s", "istanbul", "한국", "##어", "café"]
VOCAB = (*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS)
RECIPES = [
    TokenizerSpec(vocab=VOCAB),
    TokenizerSpec(vocab=VOCAB, lowercase=False),
    TokenizerSpec(vocab=VOCAB, strip_accents=True),
    TokenizerSpec(vocab=VOCAB, strip_accents=True, whole_hangul=False, split_chinese=False),
]
#: Signs at which a shortcut could go wrong: combining marks after a mark or a space, letters
#: whose lower case depends on their place or has two signs, odd spaces and control characters.
ODD = st.sampled_from(
    "aB .,-[]=<Σ\u03c3İ\u0131ßée\u0301e\u0301\u0338\u0307\u00a0\u2028\t\x1c\x00\u200d가中ᆨ\ufeff"
)
LINES = st.lists(st.text(ODD | st.characters(codec="utf-8"), min_size=1), max_size=5)


def assert_same(tokenizer: Tokenizer, memo: CachedTokenizer, sentences: list[str]) -> None:
    """Compare the memo with the tokenizer, sentence by sentence."""
    expected = tokenizer.encode_batch(sentences)
    ids, sizes = memo.encode(sentences)
    assert sizes.tolist() == [len(found) for found in expected]
    assert ids.tolist() == list(chain.from_iterable(expected))


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=150)
@given(lines=LINES)
def test_equals_the_tokenizer_on_any_text(recipe: TokenizerSpec, lines: list[str]) -> None:
    """On any Unicode text without line ends, ids and sizes equal the tokenizer's."""
    sentences = [line.replace("\n", " ") for line in lines]
    assert_same(Tokenizer(recipe), CachedTokenizer(Tokenizer(recipe)), sentences)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_looks_like_a_special_token_is_text(recipe: TokenizerSpec) -> None:
    """The text "[SEP]" never becomes a special token, and does not confuse the memo."""
    tokenizer = Tokenizer(recipe)
    sentences = ["[SEP]", "the [SEP] end", "a[SEP]b", "[MASK] [CLS", "[sep] [ SEP ]"]
    assert_same(tokenizer, CachedTokenizer(tokenizer), sentences)
    ids, _ = CachedTokenizer(tokenizer).encode(sentences)
    assert not {tokenizer.sep_id, tokenizer.mask_id, tokenizer.cls_id} & set(ids.tolist())


def test_forgetting_changes_nothing() -> None:
    """A memo that is full forgets and goes on with the same ids."""
    tokenizer = Tokenizer(RECIPES[0])
    memo = CachedTokenizer(tokenizer, max_cached_words=3)
    for sentences in (["walked the end", "walking"], ["한국어 the"], ["the end", "walks."], []):
        assert_same(tokenizer, memo, sentences)


def test_a_sentence_without_a_token() -> None:
    """Sentences of which nothing is left have size 0, wherever they stand."""
    tokenizer = Tokenizer(RECIPES[0])
    assert_same(tokenizer, CachedTokenizer(tokenizer), ["\x00", "the", "", " ", "end", "\u200d"])


def test_letters_whose_lower_case_depends_on_their_place() -> None:
    """A capital sigma at a word's end is lowered as the tokenizer does it, not as Python does."""
    assert "BΣ".lower() == "b\u03c2"
    tokenizer = Tokenizer(RECIPES[0])
    assert_same(tokenizer, CachedTokenizer(tokenizer), ["BΣ end", "İ \u0131 aΣ Σ", "the"])
