"""The cached tokenizer gives the same ids as the tokenizer."""

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
SPECS = [
    TokenizerSpec(vocab=VOCAB),
    TokenizerSpec(vocab=VOCAB, lowercase=False),
    TokenizerSpec(vocab=VOCAB, strip_accents=True),
    TokenizerSpec(
        vocab=VOCAB, strip_accents=True, keep_hangul_syllables=False, split_chinese=False
    ),
]
#: Characters for which caching words could give wrong ids: combining marks after punctuation or a
#: space, letters whose lower case depends on the context or has two characters, unusual spaces and
#: control characters.
DIFFICULT_CHARACTERS = st.sampled_from(
    "aB .,-[]=<Σ\u03c3İ\u0131ßée\u0301e\u0301\u0338\u0307\u00a0\u2028\t\x1c\x00\u200d가中ᆨ\ufeff"
)
LINES = st.lists(
    st.text(DIFFICULT_CHARACTERS | st.characters(codec="utf-8"), min_size=1), max_size=5
)


def assert_same_ids(tokenizer: Tokenizer, cached: CachedTokenizer, sentences: list[str]) -> None:
    """Compare the ids of both tokenizers, sentence by sentence."""
    expected = tokenizer.encode_batch(sentences)
    ids, sizes = cached.encode(sentences)
    assert sizes.tolist() == [len(sentence_ids) for sentence_ids in expected]
    assert ids.tolist() == list(chain.from_iterable(expected))


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=150)
@given(lines=LINES)
def test_any_text_gets_the_same_ids(spec: TokenizerSpec, lines: list[str]) -> None:
    """On any Unicode text without line breaks, the ids equal those of the tokenizer."""
    sentences = [line.replace("\n", " ") for line in lines]
    assert_same_ids(Tokenizer(spec), CachedTokenizer(Tokenizer(spec)), sentences)


@pytest.mark.parametrize("spec", SPECS)
def test_special_tokens_in_text_are_plain_text(spec: TokenizerSpec) -> None:
    """The text "[SEP]" is plain text, although the cached tokenizer inserts [SEP] internally."""
    tokenizer = Tokenizer(spec)
    sentences = ["[SEP]", "the [SEP] end", "a[SEP]b", "[MASK] [CLS", "[sep] [ SEP ]"]
    assert_same_ids(tokenizer, CachedTokenizer(tokenizer), sentences)
    ids, _ = CachedTokenizer(tokenizer).encode(sentences)
    assert not {tokenizer.sep_id, tokenizer.mask_id, tokenizer.cls_id} & set(ids.tolist())


def test_clearing_the_cache_does_not_change_ids() -> None:
    """A full cache is cleared, and the next ids are still correct."""
    tokenizer = Tokenizer(SPECS[0])
    cached = CachedTokenizer(tokenizer, max_cached_words=3)
    for sentences in (["walked the end", "walking"], ["한국어 the"], ["the end", "walks."], []):
        assert_same_ids(tokenizer, cached, sentences)


def test_sentences_without_tokens_have_size_zero() -> None:
    """Empty sentences, and sentences that are empty after normalization, have size 0."""
    tokenizer = Tokenizer(SPECS[0])
    sentences = ["\x00", "the", "", " ", "end", "\u200d"]
    assert_same_ids(tokenizer, CachedTokenizer(tokenizer), sentences)


def test_final_sigma_is_lowercased_as_by_the_tokenizer() -> None:
    """A final capital sigma is lowercased as by the tokenizer, which differs from Python."""
    assert "BΣ".lower() == "b\u03c2"
    tokenizer = Tokenizer(SPECS[0])
    assert_same_ids(tokenizer, CachedTokenizer(tokenizer), ["BΣ end", "İ \u0131 aΣ Σ", "the"])
