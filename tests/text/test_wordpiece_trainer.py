"""Training a WordPiece vocabulary: determinism, alphabet, limits, and its quality."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import TokenizerError
from bertsmith.progress import NullProgress
from bertsmith.text.alphabet import CharacterCounts
from bertsmith.text.corpus import CorpusOptions, find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec, build_normalizer
from bertsmith.text.vocabulary import HELD_OUT_EVERY, VocabularyOptions, learn_vocabulary
from bertsmith.text.vocabulary_report import describe_vocabulary, measure_fit
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import _divide_text, _train_in_thread, train_wordpiece


def make_texts(seed: int = 0) -> list[str]:
    """Return texts of random words in Latin, Cyrillic, Hangul and Chinese letters."""
    rng = random.Random(seed)
    alphabets = ["abcdefghijklmnop", "абвгдежзик", "가나다라마바사아자차", "天地玄黃宇宙洪荒"]
    words = [
        "".join(rng.choices(alphabet, k=rng.randint(1, 5)))
        for alphabet in alphabets
        for _ in range(150)
    ]
    return [" ".join(rng.choices(words, k=40)) + "." for _ in range(300)]


#: Numbers of pieces of the ASCII characters. Only digits and letters have a piece with "##": there
#: are 10 digits, 26 letters (52 in a cased vocabulary) and 32 punctuation characters.
NUM_ASCII_PIECES = 2 * (10 + 26) + 32
NUM_CASED_ASCII_PIECES = 2 * (10 + 52) + 32

#: Trains a tokenizer. Arguments: JSON file with texts, output directory.
TRAINING_SCRIPT = """
import json, sys
from pathlib import Path
from bertsmith.text.wordpiece_trainer import train_wordpiece
texts = json.loads(Path(sys.argv[1]).read_text())
train_wordpiece(texts, 700).save(Path(sys.argv[2]))
"""


def test_training_is_deterministic(tmp_path: Path) -> None:
    """Three processes write the same bytes, although each seeds its hash tables randomly."""
    (tmp_path / "texts").write_text(json.dumps(make_texts()))
    for name in ("one", "two", "three"):
        arguments = [str(tmp_path / "texts"), str(tmp_path / name)]
        command = [sys.executable, "-c", TRAINING_SCRIPT, *arguments]
        subprocess.run(command, check=True, timeout=120)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["bertsmith.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    for name in files:
        expected = (tmp_path / "one" / name).read_bytes()
        assert (tmp_path / "two" / name).read_bytes() == expected
        assert (tmp_path / "three" / name).read_bytes() == expected


def test_entries_are_ordered_by_type() -> None:
    """The vocabulary has special tokens, sorted characters, sorted "##" characters, then words."""
    tokenizer = train_wordpiece(make_texts(), 500)
    assert tokenizer.vocab[:5] == SPECIAL_TOKENS
    assert tokenizer.vocab_size == 500
    assert len(set(tokenizer.vocab)) == 500
    characters = [word for word in tokenizer.vocab if len(word) == 1]
    continuations = [word for word in tokenizer.vocab if len(word) == 3 and word[:2] == "##"]
    assert list(tokenizer.vocab[5 : 5 + len(characters)]) == sorted(characters)
    start = 5 + len(characters)
    assert list(tokenizer.vocab[start : start + len(continuations)]) == sorted(continuations)


def test_iterators_and_lists_give_the_same_vocabulary() -> None:
    """An iterator, a list, and a single long text give the same vocabulary."""

    def iterate_texts() -> Iterator[str]:
        yield from make_texts()

    expected = train_wordpiece(make_texts(), 500)
    assert train_wordpiece(iterate_texts(), 500).hash == expected.hash
    assert train_wordpiece([" ".join(make_texts())], 500).hash == expected.hash


def test_full_coverage_leaves_no_unknown_words() -> None:
    """With a coverage of 1 no word is unknown; Chinese characters have no "##" entry."""
    tokenizer = train_wordpiece(make_texts(), 600, coverage=1.0)
    assert measure_fit(tokenizer, make_texts()).num_unknown == 0
    assert tokenizer.token_to_id("天") is not None
    assert tokenizer.token_to_id("##天") is None
    unsplit = train_wordpiece(make_texts(), 600, split_chinese=False)
    assert unsplit.token_to_id("##天") is not None


def test_rare_characters_leave_room_for_words() -> None:
    """Of thousands of characters the most frequent are used, for at most half of the entries."""
    rare_chinese = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    texts = [*make_texts(), rare_chinese, "가나다라 " * 2000]
    tokenizer = train_wordpiece(texts, 400)
    characters = [word for word in tokenizer.vocab if len(word.removeprefix("##")) == 1]
    beyond_ascii = [word for word in characters if not word.isascii()]
    assert len(beyond_ascii) <= (400 - len(SPECIAL_TOKENS) - NUM_ASCII_PIECES) // 2
    assert tokenizer.token_to_id("가") is not None
    assert tokenizer.token_to_id("##나") is not None
    assert tokenizer.vocab_size == 400


@pytest.mark.parametrize("strip_accents", [False, True])
def test_character_counts_match_the_tokenizer(strip_accents: bool) -> None:
    """The character counts equal those of the words that the pre-tokenizer produces."""
    texts = [
        "Ünïcödé! 天地a地 \u0130stanbul q\u00adw a\u0000b x-y 가나 ﬁ ½ é\u0301e",
        *make_texts(1),
    ]
    spec = TokenizerSpec(
        vocab=SPECIAL_TOKENS, strip_accents=strip_accents, keep_hangul_syllables=False
    )
    normalize = build_normalizer(spec).normalize_str
    counts = CharacterCounts(normalize)
    for text in texts:
        counts.add(text)
    tokenizer = Tokenizer(spec)
    words = [
        word
        for text in texts
        for word, _ in tokenizer._plain_backend.pre_tokenizer.pre_tokenize_str(normalize(text))
    ]
    totals, continuations = counts._normalize_counts()
    assert totals == Counter("".join(words))
    assert continuations == {character for word in words for character in word[1:]}


@pytest.mark.parametrize("strip_accents", [False, True])
def test_too_long_words_are_ignored(strip_accents: bool) -> None:
    """Words of more than 100 characters, which become [UNK], do not change the vocabulary."""
    texts = [*make_texts(20), "q" * 100]

    def train_vocabulary(texts: list[str]) -> tuple[str, ...]:
        return train_wordpiece(texts, 300, strip_accents=strip_accents, min_frequency=1).vocab

    expected = train_vocabulary(texts)
    too_long = ["яю" * 10_000, "ab" * 50 + "c", "x-" + "y" * 101 + "-z", "я" * 50_000]
    assert train_vocabulary([*texts, *too_long]) == expected
    # Characters that the normalizer removes are not counted.
    with_soft_hyphens = "\u00ad".join("q" * 100)
    assert train_vocabulary([*texts[:-1], with_soft_hyphens]) == expected


@settings(max_examples=200)
@given(st.text(alphabet="ab \n,天。", max_size=400), st.integers(5, 60))
def test_long_texts_are_divided_between_words(text: str, size: int) -> None:
    """Parts have at most ``size`` characters, and a word is divided only if it is that long."""
    parts = list(_divide_text(text, size))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= size
    for left, right in pairwise(parts):
        word = re.search("[ab]*$", left)[0] + re.search("^[ab]*", right)[0]  # type: ignore[index]
        is_inside_word = left[-1:] in "ab" and right[0] in "ab"
        # Text without spaces and punctuation, such as Chinese, may be divided anywhere.
        assert not is_inside_word or len(word) >= size or "天" in text


def test_large_vocabulary_can_be_learned(tmp_path: Path) -> None:
    """A vocabulary with more than 65,536 entries can be learned, saved and loaded."""
    rng = random.Random(3)
    letters = [chr(0xAC00 + number) for number in range(400)]
    words = {rng.choice(letters) + rng.choice(letters) for _ in range(300_000)}
    texts = [" ".join(sorted(words))] * 2
    tokenizer = train_wordpiece(texts, 100_001, coverage=1.0)
    assert tokenizer.vocab_size == 100_001
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.hash == tokenizer.hash
    assert max(loaded.encode(texts[0])) > 99_000


@pytest.mark.parametrize("strip_accents", [False, True])
def test_pieces_occur_in_the_text(*, strip_accents: bool) -> None:
    """Words with a character outside the alphabet are ignored, but not the words next to them."""
    texts = ["the helmet must fuzz and wax by the river bank, yet the boats went"] * 400
    texts += ["river-ьhełmut,bank xyłzw"] * 4
    tokenizer = train_wordpiece(texts, 400, coverage=0.999, strip_accents=strip_accents)
    words = " ".join(tokenizer.spec.vocab)
    assert "ł" not in words
    assert "river" in words
    # Without "ł", the letters around it must not be joined.
    assert "hemut" not in words
    assert "xyzw" not in words


@pytest.mark.parametrize("coverage", [0.0, 1.5])
def test_invalid_coverage_is_rejected(coverage: float) -> None:
    """The coverage must be above 0 and at most 1."""
    with pytest.raises(TokenizerError, match="the coverage is out of range"):
        train_wordpiece(make_texts(), 200, coverage=coverage)


@pytest.mark.parametrize(
    ("cased", "num_ascii_pieces"), [(False, NUM_ASCII_PIECES), (True, NUM_CASED_ASCII_PIECES)]
)
def test_too_small_size_is_rejected(*, cased: bool, num_ascii_pieces: int) -> None:
    """The error has the numbers of special tokens and ASCII pieces, and the largest bad size."""
    size = len(SPECIAL_TOKENS) + num_ascii_pieces
    message = rf"too small: {size}, .* 5 special tokens .* {num_ascii_pieces} pieces .* take {size}"
    with pytest.raises(TokenizerError, match=message):
        train_wordpiece(make_texts(), size, cased=cased)
    assert train_wordpiece(make_texts(), size + 1, cased=cased).vocab_size == size + 1


@pytest.mark.parametrize("cased", [False, True])
def test_ascii_text_is_never_unknown(*, cased: bool) -> None:
    """ASCII digits, letters and punctuation are in the vocabulary even if the corpus lacks them."""
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


@pytest.mark.parametrize(
    ("size", "min_frequency"), [(10**20, 2), (200, 0), (200, -4), (200, 10**20)]
)
def test_numbers_out_of_range_are_rejected(size: int, min_frequency: int) -> None:
    """The trainer uses 32-bit integers, and the minimum frequency must be positive."""
    with pytest.raises(TokenizerError, match=r"too large|out of range"):
        train_wordpiece(make_texts(), size, min_frequency=min_frequency)


def test_text_without_words_is_rejected() -> None:
    """Learning a vocabulary from whitespace is an error."""
    with pytest.raises(TokenizerError, match="no word"):
        train_wordpiece([" ", "\n"], 200)


def test_fit_counts_words_and_pieces() -> None:
    """Counts, shares and listed words equal those counted by hand."""
    vocab = (*SPECIAL_TOKENS, "the", "cat", "sat", "##s", "c", "##a", "##t", ".")
    tokenizer = Tokenizer(TokenizerSpec(vocab=vocab))
    report = measure_fit(tokenizer, ["The cats sat.", "The dog. The ca"])
    # The words are: the cats sat . the dog . the ca. The tokenizer splits cats into cat ##s and ca
    # into c ##a, and replaces dog by [UNK].
    assert (report.num_words, report.num_pieces, report.num_unknown, report.num_single_piece) == (
        9,
        11,
        1,
        6,
    )
    assert report.unknown_share == 1 / 9
    assert report.pieces_per_word == 11 / 9
    assert report.longest[0] == "sat"
    assert sorted(report.most_pieces[:2]) == ["c ##a", "cat ##s"]
    assert report.unknown_words == ["dog"]
    assert "[UNK]" in "\n".join(report.lines())


def test_description_counts_all_entries_of_a_vocabulary() -> None:
    """The counts of all types of entries add up to the size; the scripts of words are listed."""
    tokenizer = train_wordpiece(make_texts(), 500)
    description = describe_vocabulary(tokenizer)
    num_entries = description.word_starts + description.continuations + len(SPECIAL_TOKENS)
    assert num_entries == description.size == 500
    assert set(description.scripts) >= {"Latin", "Cyrillic", "Hangul", "Cjk"}
    assert description.special["[MASK]"] == 4
    assert any("accents kept" in line for line in description.lines())


def test_vocabulary_is_measured_on_held_out_documents(tmp_path: Path) -> None:
    """About one document in a hundred is held out; a corpus of few documents has none."""
    texts = make_texts() * 10 + make_texts(1)
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    sources = find_sources([str(tmp_path / "a.jsonl")])
    options = VocabularyOptions(size=500)
    learned = learn_vocabulary(sources, CorpusOptions(), options, NullProgress())
    assert learned.has_held_out_sample
    assert learned.corpus.documents == len(texts)
    assert 0 < learned.quality.num_characters < 0.1 * learned.corpus.characters
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:3]))
    options = VocabularyOptions(size=200)
    learned = learn_vocabulary(sources, CorpusOptions(), options, NullProgress())
    assert not learned.has_held_out_sample
    assert learned.quality.num_characters == learned.corpus.characters


def test_only_document_is_not_held_out(tmp_path: Path) -> None:
    """The vocabulary is never learned from less text than is held out, whatever the hash is."""
    selected = (f"word {number} " for number in itertools.count())
    text = next(text for text in selected if is_selected(text.strip()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    sources = find_sources([str(tmp_path / "a.jsonl")])
    learned = learn_vocabulary(
        sources, CorpusOptions(), VocabularyOptions(size=170), NullProgress()
    )
    assert not learned.has_held_out_sample
    assert learned.tokenizer.encode("word") != [learned.tokenizer.unk_id]


def is_selected(text: str) -> bool:
    """Return whether a document is held out from a large corpus."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0


class _InterruptedBackend:
    """A trainer that is interrupted while it reads texts or joins pieces, which never ends."""

    def __init__(self, num_texts: int | None) -> None:
        self.num_texts = num_texts
        self.last_text: object = None
        self.is_released = threading.Event()
        self.is_read = threading.Event()

    def train_from_iterator(self, texts: Iterator[str], _: Any) -> None:
        """Read texts, send Ctrl-C after ``num_texts`` or after the last one, and wait."""
        for number, text in enumerate(texts):
            self.last_text = text
            if number == self.num_texts:
                os.kill(os.getpid(), signal.SIGINT)
        self.is_read.set()
        if self.num_texts is None:
            os.kill(os.getpid(), signal.SIGINT)
        self.is_released.wait(60)


@pytest.mark.parametrize(("texts", "num_texts"), [(range(10**7), 3), (range(5), None)])
def test_interrupt_ends_training_at_once(texts: Any, num_texts: int | None) -> None:
    """Ctrl-C ends training while `tokenizers` reads a long text or joins pieces.

    It stops reading, so that files can be closed.
    """
    backend: Any = _InterruptedBackend(num_texts)
    trainer: Any = None
    with pytest.raises(KeyboardInterrupt):
        _train_in_thread(backend, texts, trainer)
    assert backend.is_read.wait(60)
    assert backend.last_text != texts[-1] or num_texts is None
    assert not backend.is_released.is_set()
    backend.is_released.set()


def test_errors_of_the_texts_are_raised() -> None:
    """An error in the second reading of the texts, while words are counted, is raised."""

    class Texts:
        num_readings = 0

        def __iter__(self) -> Iterator[str]:
            self.num_readings += 1
            yield "a text"
            if self.num_readings == 2:
                raise TokenizerError("unreadable")

    with pytest.raises(TokenizerError, match="unreadable"):
        train_wordpiece(Texts(), 200)
