"""A vocabulary is learnt the same way every time, and holds what its text needs.

These tests never read a vocabulary from elsewhere.
"""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import TokenizerError
from bertsmith.progress import NullProgress
from bertsmith.text.alphabet import CharacterCounts
from bertsmith.text.corpus import CorpusOptions, find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec, build_normalizer
from bertsmith.text.vocabulary import VocabularyOptions, learn_vocabulary
from bertsmith.text.vocabulary_report import describe_vocabulary, measure_fit
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import _divide, train_wordpiece


def little_text(seed: int = 0) -> list[str]:
    """Return texts of invented words in Latin, Cyrillic, Hangul and Chinese letters."""
    chance = random.Random(seed)
    alphabets = ["abcdefghijklmnop", "абвгдежзик", "가나다라마바사아자차", "天地玄黃宇宙洪荒"]
    words = [
        "".join(chance.choices(alphabet, k=chance.randint(1, 5)))
        for alphabet in alphabets
        for _ in range(150)
    ]
    return [" ".join(chance.choices(words, k=40)) + "." for _ in range(300)]


SCRIPT = """
import json, sys
from pathlib import Path
from bertsmith.text.wordpiece_trainer import train_wordpiece
texts = json.loads(Path(sys.argv[1]).read_text())
train_wordpiece(texts, 700).save(Path(sys.argv[2]))
"""


def test_two_processes_learn_the_same_bytes(tmp_path: Path) -> None:
    """Every file is equal byte for byte, though hash tables are seeded anew in each process."""
    (tmp_path / "texts").write_text(json.dumps(little_text()))
    for name in ("one", "two", "three"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "texts"), str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=120)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["bertsmith.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    for name in files:
        one = (tmp_path / "one" / name).read_bytes()
        assert one == (tmp_path / "two" / name).read_bytes()
        assert one == (tmp_path / "three" / name).read_bytes()


def test_the_order_is_special_tokens_then_characters_then_words() -> None:
    """Ids 0 to 4 are the special tokens; characters follow in order, "##" ones after them."""
    tokenizer = train_wordpiece(little_text(), 500)
    assert tokenizer.vocab[:5] == SPECIAL_TOKENS
    assert tokenizer.vocab_size == 500
    assert len(set(tokenizer.vocab)) == 500
    single = [word for word in tokenizer.vocab if len(word) == 1]
    continuing = [word for word in tokenizer.vocab if len(word) == 3 and word[:2] == "##"]
    assert list(tokenizer.vocab[5 : 5 + len(single)]) == sorted(single)
    after = 5 + len(single)
    assert list(tokenizer.vocab[after : after + len(continuing)]) == sorted(continuing)


def test_a_stream_that_can_be_read_once_gives_the_same() -> None:
    """An iterator, a list, and the same text in other portions give equal vocabularies."""

    def once() -> Iterator[str]:
        yield from little_text()

    listed = train_wordpiece(little_text(), 500)
    assert train_wordpiece(once(), 500).hash == listed.hash
    assert train_wordpiece([" ".join(little_text())], 500).hash == listed.hash


def test_every_character_of_the_text_is_known() -> None:
    """With full coverage no word of the text is unknown; Chinese characters take no "##"."""
    tokenizer = train_wordpiece(little_text(), 600, coverage=1.0)
    assert measure_fit(tokenizer, little_text()).unknown == 0
    assert tokenizer.token_to_id("天") is not None
    assert tokenizer.token_to_id("##天") is None
    assert train_wordpiece(little_text(), 600, split_chinese=False).token_to_id("##天") is not None


def test_rare_characters_do_not_eat_the_vocabulary() -> None:
    """Of thousands of characters the most frequent are kept; half of the size is left for words."""
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    texts = [*little_text(), rare, "가나다라 " * 2000]
    tokenizer = train_wordpiece(texts, 400)
    single = [word for word in tokenizer.vocab if len(word.removeprefix("##")) == 1]
    beyond_ascii = [word for word in single if not word.isascii()]
    assert len(beyond_ascii) <= (400 - 109) // 2
    assert tokenizer.token_to_id("가") is not None
    assert tokenizer.token_to_id("##나") is not None
    assert tokenizer.vocab_size == 400


@pytest.mark.parametrize("strip", [False, True])
def test_characters_are_counted_as_the_tokenizer_sees_them(strip: bool) -> None:
    """The counted characters equal those of every word that the tokenizer itself cuts."""
    texts = [
        "Ünïcödé! 天地a地 \u0130stanbul q\u00adw a\u0000b x-y 가나 ﬁ ½ é\u0301e",
        *little_text(1),
    ]
    recipe = TokenizerSpec(vocab=SPECIAL_TOKENS, strip_accents=strip, whole_hangul=False)
    clean = build_normalizer(recipe).normalize_str
    counts = CharacterCounts(clean)
    for text in texts:
        counts.add(text)
    tokenizer = Tokenizer(recipe)
    words = [
        word
        for text in texts
        for word, _ in tokenizer._plain_backend.pre_tokenizer.pre_tokenize_str(clean(text))
    ]
    totals, continuing = counts._normalized_counts()
    assert totals == Counter("".join(words))
    assert continuing == {character for word in words for character in word[1:]}


@pytest.mark.parametrize("strip", [False, True])
def test_words_that_are_too_long_change_nothing(strip: bool) -> None:
    """Words that the tokenizer makes [UNK] add no piece and no character; 100 is not too long."""
    texts = [*little_text(20), "q" * 100]
    plain = train_wordpiece(texts, 300, strip_accents=strip, min_frequency=1).vocab
    too_long = ["яю" * 10_000, "ab" * 50 + "c", "x-" + "y" * 101 + "-z", "я" * 50_000]
    assert (
        train_wordpiece([*texts, *too_long], 300, strip_accents=strip, min_frequency=1).vocab
        == plain
    )
    # What the tokenizer removes does not count.
    soft = "­".join("q" * 100)
    assert (
        train_wordpiece([*texts[:-1], soft], 300, strip_accents=strip, min_frequency=1).vocab
        == plain
    )


@settings(max_examples=200)
@given(st.text(alphabet="ab \n,天。", max_size=400), st.integers(5, 60))
def test_long_texts_are_cut_between_words(text: str, size: int) -> None:
    """Pieces have at most so many characters; words that fit in half of it stay whole."""
    pieces = list(_divide(text, size))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= size
    for left, right in pairwise(pieces):
        word = re.search("[ab]*$", left)[0] + re.search("^[ab]*", right)[0]  # type: ignore[index]
        cut_inside = left[-1:] in "ab" and right[0] in "ab"
        assert not cut_inside or len(word) >= size or "天" in text


def test_more_than_a_hundred_thousand_words(tmp_path: Path) -> None:
    """A vocabulary beyond 16 bits is learnt, saved and read like any other."""
    chance = random.Random(3)
    letters = [chr(0xAC00 + number) for number in range(400)]
    words = {chance.choice(letters) + chance.choice(letters) for _ in range(300_000)}
    texts = [" ".join(sorted(words))] * 2
    tokenizer = train_wordpiece(texts, 100_001, coverage=1.0)
    assert tokenizer.vocab_size == 100_001
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.hash == tokenizer.hash
    assert max(loaded.encode(texts[0])) > 99_000


@pytest.mark.parametrize("strip_accents", [False, True])
def test_no_word_is_learnt_that_does_not_occur(*, strip_accents: bool) -> None:
    """A letter beyond the alphabet takes its word with it; what it stands beside stays."""
    texts = ["the helmet must fuzz and wax by the river bank, yet the boats went"] * 400
    texts += ["river-ьhełmut,bank xyłzw"] * 4
    tokenizer = train_wordpiece(texts, 400, coverage=0.999, strip_accents=strip_accents)
    words = " ".join(tokenizer.spec.vocab)
    assert "ł" not in words
    assert "river" in words
    assert "hemut" not in words
    assert "xyzw" not in words


@pytest.mark.parametrize("coverage", [0.0, 1.5])
def test_a_coverage_out_of_range_is_refused(coverage: float) -> None:
    """A coverage that is no share is an error."""
    with pytest.raises(TokenizerError, match="expected"):
        train_wordpiece(little_text(), 200, coverage=coverage)


@pytest.mark.parametrize(("cased", "minimum"), [(False, 5 + 104), (True, 5 + 156)])
def test_a_size_without_room_for_words_is_refused(*, cased: bool, minimum: int) -> None:
    """The error names the size, what special tokens and ASCII characters take, and the minimum."""
    message = (
        rf"too small: {minimum}, .* 5 special tokens .* {minimum - 5} pieces .* take {minimum}"
    )
    with pytest.raises(TokenizerError, match=message):
        train_wordpiece(little_text(), minimum, cased=cased)
    assert train_wordpiece(little_text(), minimum + 1, cased=cased).vocab_size == minimum + 1


@pytest.mark.parametrize("cased", [False, True])
def test_every_vocabulary_writes_ascii_text(*, cased: bool) -> None:
    """Digits, letters and punctuation that the corpus lacks are encoded without [UNK]."""
    novel = ["call me ishmael some years ago never mind how long precisely"] * 50
    korean = ["옛날 옛적에 호랑이가 담배를 피우던 시절에"] * 50
    printable = "".join(map(chr, range(33, 127)))
    texts = ["1984", "Q&A", "q&a", "x86_64", "http://a.b/?c=1#d~e", printable, printable[::-1]]
    for corpus in (novel, korean):
        tokenizer = train_wordpiece(corpus, 400, cased=cased)
        for text in texts:
            assert tokenizer.unk_id not in tokenizer.encode(text), text
        assert tokenizer.unk_id not in tokenizer.encode(corpus[0])
        capitals = [word for word in tokenizer.vocab if len(word) == 1 and "A" <= word <= "Z"]
        assert len(capitals) == (26 if cased else 0)
        assert tokenizer.hash == train_wordpiece(corpus, 400, cased=cased).hash


@pytest.mark.parametrize(("size", "frequency"), [(10**20, 2), (200, 0), (200, -4), (200, 10**20)])
def test_numbers_beyond_the_trainers_are_refused(size: int, frequency: int) -> None:
    """It counts in 32 bits, and what occurs never cannot be joined."""
    with pytest.raises(TokenizerError, match="expected"):
        train_wordpiece(little_text(), size, min_frequency=frequency)


def test_text_without_words_is_refused() -> None:
    """Blanks give no vocabulary."""
    with pytest.raises(TokenizerError, match="no word"):
        train_wordpiece([" ", "\n"], 200)


def test_quality_counts_words_and_pieces() -> None:
    """Shares and named words follow from the words of a text, counted by hand."""
    vocab = (*SPECIAL_TOKENS, "the", "cat", "sat", "##s", "c", "##a", "##t", ".")
    report = measure_fit(
        Tokenizer(TokenizerSpec(vocab=vocab)), ["The cats sat.", "The dog. The ca"]
    )
    # the cats sat . the dog . the ca -> cats = cat ##s, ca = c ##a, dog = [UNK]
    assert (report.words, report.pieces, report.unknown, report.whole) == (9, 11, 1, 6)
    assert report.unknown_share == 1 / 9
    assert report.pieces_per_word == 11 / 9
    assert report.longest[0] == "sat"
    assert sorted(report.most_pieces[:2]) == ["c ##a", "cat ##s"]
    assert report.unknown_words == ["dog"]
    assert "[UNK]" in "\n".join(report.lines())


def test_a_vocabulary_describes_itself() -> None:
    """Counts by kind and script add up to the size."""
    tokenizer = train_wordpiece(little_text(), 500)
    found = describe_vocabulary(tokenizer)
    assert found.whole_words + found.continuations + len(SPECIAL_TOKENS) == found.size == 500
    assert set(found.scripts) >= {"Latin", "Cyrillic", "Hangul", "Cjk"}
    assert found.special["[MASK]"] == 4
    assert any("accents kept" in line for line in found.lines())


def test_held_out_documents_are_not_learnt_from(tmp_path: Path) -> None:
    """About one document in a hundred is set aside, by its text; few documents leave none."""
    lines = [json.dumps({"text": text}) for text in little_text() * 10 + little_text(1)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = find_sources([str(tmp_path / "a.jsonl")])
    learnt = learn_vocabulary(found, CorpusOptions(), VocabularyOptions(size=500), NullProgress())
    assert learnt.held_out
    assert learnt.corpus.documents == 3300
    assert 0 < learnt.quality.characters < 0.1 * learnt.corpus.characters
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:3]))
    few = learn_vocabulary(found, CorpusOptions(), VocabularyOptions(size=200), NullProgress())
    assert not few.held_out
    assert few.quality.characters == few.corpus.characters
