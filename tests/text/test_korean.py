"""Korean text: Hangul stays whole for every reader, and morphemes are parted the same everywhere.

These tests never leave the machine; real text comes from the shared corpora.
"""

import json
import lzma
import pickle
import unicodedata
from pathlib import Path

import pytest

from bertsmith.errors import TokenizerError
from bertsmith.text.segmenter import insert_spaces, load_segmenter, segment_texts
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece


def _jamo(words: list[str] | tuple[str, ...]) -> list[str]:
    """Return the words that hold a conjoining jamo, which whole Hangul never does."""
    return [word for word in words if any("\u1100" <= letter <= "\u11ff" for letter in word)]


@pytest.fixture(scope="module")
def korean(shared_text: Path) -> list[str]:
    """Return some hundred articles of the Korean Wikipedia."""
    with lzma.open(shared_text / "ko-wiki.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(600), strict=False)]


@pytest.mark.data
@pytest.mark.parametrize("strip", [False, True])
def test_hangul_stays_whole_for_every_reader(
    tmp_path: Path, korean: list[str], strip: bool
) -> None:
    """On ko-wiki the tokenizer, ``tokenizers``, AutoTokenizer and the bare vocab.txt agree.

    No jamo stand in the vocabulary, and syllables of the text come back from the ids.
    """
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    learn, held_out = korean[100:], korean[:100]
    tokenizer = train_wordpiece(learn, 6000, strip_accents=strip)
    assert not _jamo(tokenizer.vocab)
    expected = tokenizer.encode_batch(held_out)
    unknown = sum(ids.count(tokenizer.unk_id) for ids in expected)
    assert unknown < 0.02 * sum(map(len, expected))
    assert tokenizer.decode(tokenizer.encode("대한민국의 역사")) == "대한민국의 역사"
    tokenizer.save(tmp_path)
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [one.ids for one in file.encode_batch(held_out, add_special_tokens=False)] == expected
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto(held_out, add_special_tokens=False)["input_ids"] == expected
    (tmp_path / "bare").mkdir()
    (tmp_path / "vocab.txt").rename(tmp_path / "bare" / "vocab.txt")
    bare = Tokenizer.load(tmp_path / "bare", strip_accents=strip or None)
    assert bare.encode_batch(held_out) == expected


@pytest.mark.data
def test_the_originals_cleaning_would_have_left_jamo(korean: list[str]) -> None:
    """The same training with the original's NFD gives a vocabulary of jamo: the danger is real."""
    taken_apart = [unicodedata.normalize("NFD", text) for text in korean[:50]]
    assert len(_jamo(train_wordpiece(taken_apart, 1000).vocab)) > 500


@pytest.fixture(scope="module")
def kiwi() -> object:
    """Return Kiwi; skip without the extra."""
    pytest.importorskip("kiwipiepy", reason="the extra bertsmith[korean] is not installed")
    return load_segmenter("kiwi")


def test_a_text_keeps_its_letters_when_it_is_segmented(kiwi: object) -> None:
    """Morphemes are parted by spaces and nothing else changes; a contraction stays whole."""
    text = "나는 학교에 갔다. Hello 😀 세계는 하나다."
    (parted,) = segment_texts(kiwi, [text])  # type: ignore[arg-type]
    assert parted == "나 는 학교 에 갔 다 . Hello 😀 세계 는 하나 다 ."
    assert parted.replace(" ", "") == text.replace(" ", "")
    assert insert_spaces("abc", [1, 2]) == "a b c"


def test_the_segmenter_travels_with_the_tokenizer(tmp_path: Path, kiwi: object) -> None:
    """Saved, loaded and pickled, the tokenizer parts morphemes; offsets point into the text."""
    vocab = (*SPECIAL_TOKENS, "나", "는", "학교", "에", "갔", "다", ".")
    version = kiwi.version  # type: ignore[attr-defined]
    Tokenizer(TokenizerSpec(vocab=vocab, segmenter=("kiwi", version))).save(tmp_path)
    said = json.loads((tmp_path / "bertsmith.json").read_text())["tokenizer"]["segmenter"]
    assert said == {"name": "kiwi", "version": version}
    tokenizer = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path)))
    text = "나는  학교에 갔다."
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == list(range(5, 12)) == tokenizer.encode(text)
    assert [text[start:end] for start, end in offsets] == list(vocab[5:])
    masked = tokenizer.encode("나는 [MASK]에 갔다.", allow_special=True)
    assert tokenizer.ids_to_tokens(masked)[2] == "[MASK]"


def test_another_segmenter_or_version_is_refused(kiwi: object) -> None:
    """Other words than at training would be other ids, so a mismatch is an error."""
    with pytest.raises(TokenizerError, match=r"pip install kiwipiepy==0\.1\.0"):
        load_segmenter("kiwi", "0.1.0")
    with pytest.raises(TokenizerError, match="no segmenter is named 'mecab'"):
        load_segmenter("mecab")
