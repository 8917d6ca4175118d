"""Korean text: Hangul stays composed, and words are segmented into morphemes consistently.

Real text comes from the shared corpora.
"""

import contextlib
import json
import lzma
import pickle
import sys
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertsmith.errors import TokenizerError
from bertsmith.text.segmenter import KiwiSegmenter, insert_spaces, load_segmenter, segment_texts
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece


def find_words_with_jamo(words: Iterable[str]) -> list[str]:
    """Return the words with a conjoining jamo, which composed Hangul does not contain."""
    return [word for word in words if any("\u1100" <= letter <= "\u11ff" for letter in word)]


@pytest.fixture(scope="module")
def articles(shared_text: Path) -> list[str]:
    """The texts of 600 articles of the Korean Wikipedia."""
    with lzma.open(shared_text / "ko-wiki.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(600), strict=False)]


@pytest.mark.data
@pytest.mark.parametrize("strip_accents", [False, True])
def test_hangul_stays_composed(tmp_path: Path, articles: list[str], strip_accents: bool) -> None:
    """The tokenizer, ``tokenizers``, AutoTokenizer and a bare vocab.txt give the same ids.

    The vocabulary has no jamo, and decoding restores the syllables of the text.
    """
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    training, held_out = articles[100:], articles[:100]
    tokenizer = train_wordpiece(training, 6000, strip_accents=strip_accents)
    assert not find_words_with_jamo(tokenizer.vocab)
    expected = tokenizer.encode_batch(held_out)
    num_unknown = sum(ids.count(tokenizer.unk_id) for ids in expected)
    assert num_unknown < 0.02 * sum(map(len, expected))
    assert tokenizer.decode(tokenizer.encode("대한민국의 역사")) == "대한민국의 역사"
    tokenizer.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encodings = backend.encode_batch(held_out, add_special_tokens=False)
    assert [encoding.ids for encoding in encodings] == expected
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert auto_tokenizer(held_out, add_special_tokens=False)["input_ids"] == expected
    (tmp_path / "bare").mkdir()
    (tmp_path / "vocab.txt").rename(tmp_path / "bare" / "vocab.txt")
    bare_tokenizer = Tokenizer.load(tmp_path / "bare", strip_accents=strip_accents or None)
    assert bare_tokenizer.encode_batch(held_out) == expected


@pytest.mark.data
def test_original_normalization_decomposes_hangul(articles: list[str]) -> None:
    """Training on NFD text, as in the original code, gives a vocabulary of jamo."""
    decomposed = [unicodedata.normalize("NFD", text) for text in articles[:50]]
    assert len(find_words_with_jamo(train_wordpiece(decomposed, 1000).vocab)) > 500


@pytest.fixture(scope="module")
def kiwi() -> KiwiSegmenter:
    """The Kiwi segmenter; skips without the extra."""
    pytest.importorskip("kiwipiepy", reason="the extra bertsmith[korean] is not installed")
    return KiwiSegmenter()


def test_segmentation_only_inserts_spaces(kiwi: KiwiSegmenter) -> None:
    """Morphemes are separated by spaces, except in contractions; no character changes."""
    text = "나는 학교에 갔다. Hello 😀 세계는 하나다."
    (segmented,) = segment_texts(kiwi, [text])
    assert segmented == "나 는 학교 에 갔 다 . Hello 😀 세계 는 하나 다 ."
    assert segmented.replace(" ", "") == text.replace(" ", "")
    assert insert_spaces("abc", [1, 2]) == "a b c"


def test_segmenter_is_saved_with_the_tokenizer(tmp_path: Path, kiwi: KiwiSegmenter) -> None:
    """A loaded and pickled tokenizer segments; its offsets refer to the original text."""
    words = ["나", "는", "학교", "에", "갔", "다", "."]
    vocab = (*SPECIAL_TOKENS, *words)
    Tokenizer(TokenizerSpec(vocab=vocab, segmenter=("kiwi", kiwi.version))).save(tmp_path)
    entries = json.loads((tmp_path / "bertsmith.json").read_text())
    assert entries["tokenizer"]["segmenter"] == {"name": "kiwi", "version": kiwi.version}
    tokenizer = pickle.loads(pickle.dumps(Tokenizer.load(tmp_path)))
    text = "나는  학교에 갔다."
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.ids_to_tokens(ids) == words
    assert [text[start:end] for start, end in offsets] == words
    masked_ids = tokenizer.encode("나는 [MASK]에 갔다.", allow_special=True)
    assert tokenizer.ids_to_tokens(masked_ids)[2] == "[MASK]"


def test_other_segmenter_or_version_is_rejected(kiwi: KiwiSegmenter) -> None:
    """Loading an unknown segmenter or another version of Kiwi is an error."""
    with pytest.raises(TokenizerError, match=r"pip install kiwipiepy==0\.1\.0"):
        load_segmenter("kiwi", "0.1.0")
    with pytest.raises(TokenizerError, match="no segmenter is named 'mecab'"):
        load_segmenter("mecab")


def test_vocabulary_segments_documents_line_by_line() -> None:
    """A segmenter gets single lines; its memory grows with the length of a text."""
    lines = ["나는 학교에", "갔다", "세계는 하나다"]

    class HalfSegmenter:
        """A segmenter that splits each text after its first character."""

        name, version = "kiwi", "1.0"

        def __init__(self) -> None:
            self.texts: list[str] = []

        def find_boundaries(self, texts: Sequence[str]) -> list[list[int]]:
            """Return the offset 1 for each text."""
            self.texts += texts
            return [[1]] * len(texts)

    segmenter = HalfSegmenter()
    tokenizer = train_wordpiece(["\n".join(lines)] * 3, 200, segmenter=segmenter)
    assert segmenter.texts == lines * 3
    assert "나" in tokenizer.vocab
    assert "갔다" not in tokenizer.vocab


def test_threads_load_kiwi_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that segment their first texts at the same time share one Kiwi."""
    pytest.importorskip("kiwipiepy", reason="the extra bertsmith[korean] is not installed")
    barrier = threading.Barrier(2, timeout=60)
    loaded: list[Any] = []

    class SlowKiwi:
        """Kiwi that finds nothing; its constructor waits for another one."""

        def __init__(self, **_: Any) -> None:
            loaded.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(0.3)

        def tokenize(self, texts: list[str]) -> list[list[Any]]:
            """Return no morphemes."""
            return [[] for _ in texts]

    monkeypatch.setitem(sys.modules, "kiwipiepy", SimpleNamespace(Kiwi=SlowKiwi))
    segmenter = KiwiSegmenter()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(segmenter.find_boundaries, [["가"], ["나"]]))
    assert results == [[[]], [[]]]
    assert len(loaded) == 1
