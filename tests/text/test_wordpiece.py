"""WordPiece as the original defines it, by a table of cases, and as ``transformers`` runs it.

These tests never learn a vocabulary.
"""

import json
import lzma
import pickle
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

LATIN = "un want ##want ##ed wa runn ##ing low ##er ##est ##aff ##able hello how are you ah ##zz zz"
MORE = "cafe café h ##é ##llo world ##wan mask sep Hello UN ##s a b ##b don t 1 ##9 ##8"
OTHER = ", . ! ? [ ] ' - $ ` ~ 博 推 한국 ##어 한 국 어"
PIECES = f"{LATIN} {MORE} {OTHER}".split()


def made(**choices: Any) -> Tokenizer:
    """Return a tokenizer with the little vocabulary."""
    words = dict.fromkeys([*SPECIAL_TOKENS, *PIECES])
    return Tokenizer(TokenizerSpec(vocab=tuple(words), **choices))


LOWER: dict[str, bool] = {}
CASED = {"lowercase": False}
STRIP = {"strip_accents": True}
ORIGINAL = {"strip_accents": True, "whole_hangul": False}
#: choices, text, tokens: most after the tests of the original release (tokenization_test.py).
GOLDEN: list[tuple[dict[str, bool], str, str]] = [
    (LOWER, "", ""),
    (LOWER, "unwanted running", "un ##want ##ed runn ##ing"),
    (LOWER, "unwantedX running", "[UNK] runn ##ing"),
    (LOWER, "UNwanted,running", "un ##want ##ed , runn ##ing"),
    (LOWER, "unaffable", "un ##aff ##able"),
    (LOWER, " \tHeLLo!how  \n Are yoU?  ", "hello ! how are you ?"),
    (CASED, "Hello hello UN", "Hello hello UN"),
    (CASED, "HELLO", "[UNK]"),
    (LOWER, "ah\u535a\u63a8zz", "ah 博 推 zz"),
    ({"split_chinese": False}, "ah\u535a\u63a8zz", "[UNK]"),
    (LOWER, "CAFÉ cafe", "café cafe"),
    (LOWER, "héllo", "h ##é ##llo"),
    (STRIP, "Café héllo", "cafe hello"),
    (ORIGINAL, "Café héllo", "cafe hello"),
    (STRIP, "한국어 한", "한국 ##어 한"),
    (ORIGINAL, "한국어 한", "[UNK] [UNK]"),
    (LOWER, "한국어 한", "한국 ##어 한"),
    (STRIP, "e\u0301 \u1112\u1161\u11ab", "[UNK] 한"),
    (LOWER, "don't $1.98-`~", "don ' t $ 1 . [UNK] - ` ~"),
    (LOWER, "a[b]$s", "a [ b ] $ [UNK]"),
    (LOWER, "low\u00adest lo\u200bw", "low ##est low"),
    (LOWER, "lower\u0000\ufffd low\u00a0low\u3000low\rlow", "low ##er low low low low"),
    (LOWER, "a" + "b" * 99, "a" + " ##b" * 99),
    (LOWER, "a" + "b" * 100, "[UNK]"),
    (LOWER, "[MASK] [sep]", "[ mask ] [ sep ]"),
]


@pytest.mark.parametrize(("choices", "text", "tokens"), GOLDEN)
def test_golden_cases(choices: dict[str, bool], text: str, tokens: str) -> None:
    """Each text becomes the tokens that the original's rules give."""
    tokenizer = made(**choices)
    assert tokenizer.ids_to_tokens(tokenizer.encode(text)) == tokens.split()


def test_special_tokens_are_read_out_of_text_only_when_asked() -> None:
    """In a corpus "[MASK]" is plain text; with ``special`` it is the special token."""
    tokenizer = made()
    text = "hello [MASK] you[SEP]"
    assert tokenizer.mask_id not in tokenizer.encode(text)
    found = tokenizer.encode(text, allow_special=True)
    assert tokenizer.ids_to_tokens(found) == ["hello", "[MASK]", "you", "[SEP]"]
    assert tokenizer.decode([tokenizer.cls_id, *found]) == "hello [MASK] you"


def test_offsets_point_into_the_text_as_written() -> None:
    """The characters of each token are those of the given text, capitals and accents included."""
    text = "UNwanted, Café!"
    ids, offsets = made(strip_accents=True).encode_with_offsets(text)
    assert [text[start:end] for start, end in offsets] == ["UN", "want", "ed", ",", "Café", "!"]
    assert len(ids) == len(offsets)


def test_facts_of_the_vocabulary() -> None:
    """Special ids, continuing pieces and sizes are those of the vocabulary's lines."""
    tokenizer = made()
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id)
    assert (*ids, tokenizer.mask_id) == (0, 1, 2, 3, 4)
    assert tokenizer.vocab_size == len(tokenizer.vocab) == len(tokenizer.is_continuation)
    continuing = [word for word in tokenizer.vocab if word.startswith("##")]
    assert tokenizer.is_continuation.sum() == len(continuing)
    assert tokenizer.token_to_id("hello") == tokenizer.vocab.index("hello")
    assert tokenizer.token_to_id("nothing") is None


def test_the_hash_covers_words_order_and_choices() -> None:
    """Any change of a word, of the order or of a choice changes the hash; the same keeps it."""
    vocab = (*SPECIAL_TOKENS, "a", "b")
    recipes = [
        TokenizerSpec(vocab=vocab),
        TokenizerSpec(vocab=(*SPECIAL_TOKENS, "b", "a")),
        TokenizerSpec(vocab=(*vocab, "c")),
        TokenizerSpec(vocab=vocab, lowercase=False),
        TokenizerSpec(vocab=vocab, strip_accents=True),
        TokenizerSpec(vocab=vocab, strip_accents=True, whole_hangul=False),
        TokenizerSpec(vocab=vocab, split_chinese=False),
        TokenizerSpec(vocab=vocab, segmenter=("kiwi", "0.22")),
    ]
    assert len({recipe.fingerprint() for recipe in recipes}) == len(recipes)
    assert TokenizerSpec(vocab=vocab).fingerprint() == recipes[0].fingerprint()


def test_a_tokenizer_travels_to_other_processes() -> None:
    """A pickled tokenizer gives the same ids and hash."""
    tokenizer = made(strip_accents=True)
    other = pickle.loads(pickle.dumps(tokenizer))
    assert other.encode("unaffable café") == tokenizer.encode("unaffable café")
    assert other.hash == tokenizer.hash


@pytest.mark.parametrize("choices", [LOWER, CASED, STRIP, ORIGINAL, {"split_chinese": False}])
def test_saving_and_loading_keeps_everything(tmp_path: Path, choices: dict[str, bool]) -> None:
    """A saved tokenizer loads with equal recipe; other keys of bertsmith.json stay."""
    (tmp_path / "bertsmith.json").write_text('{"task": "x"}')
    tokenizer = made(**choices)
    tokenizer.save(tmp_path, max_length=512)
    assert Tokenizer.load(tmp_path).spec == tokenizer.spec
    assert Tokenizer.load(tmp_path / "tokenizer.json").spec == tokenizer.spec
    assert json.loads((tmp_path / "bertsmith.json").read_text())["task"] == "x"
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert said["model_max_length"] == 512


@pytest.mark.parametrize("choices", [LOWER, CASED, STRIP, ORIGINAL, {"split_chinese": False}])
def test_auto_tokenizer_gives_the_same_ids(tmp_path: Path, choices: dict[str, bool]) -> None:
    """``transformers.AutoTokenizer`` reads the saved files and agrees on every golden text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = made(**choices)
    tokenizer.save(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # "[MASK]" is read as the special token there.
    for text in (text for _, text, _ in GOLDEN if "[MASK]" not in text):
        assert auto(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text), text
    pair = auto("hello you", "how")
    ids = [auto.cls_token_id, *tokenizer.encode("hello you"), auto.sep_token_id]
    assert pair["input_ids"] == [*ids, *tokenizer.encode("how"), auto.sep_token_id]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert (auto.mask_token_id, auto.pad_token_id) == (4, 0)


def test_a_repeated_line_moves_no_id(tmp_path: Path) -> None:
    """Ids are line numbers, whatever is repeated or empty; the last of equal lines holds."""
    words = [*SPECIAL_TOKENS, "a", "b", "a", "", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for _ in range(2):
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("a b c") == [7, 6, 9]
        assert tokenizer.vocab_size == 10
        # Now through tokenizer.json, which cannot hold a word twice.
        tokenizer.save(tmp_path)
    assert (tmp_path / "vocab.txt").read_text().split("\n")[:-1] == words
    (tmp_path / "vocab.txt").unlink()
    assert Tokenizer.load(tmp_path).encode("a b c") == [7, 6, 9]


def test_a_repeated_line_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """The bare vocab.txt and the saved files give the same ids there, behind the line as well."""
    transformers = pytest.importorskip("transformers")
    words = [*SPECIAL_TOKENS, "a", "b", "a", "한", "c", "b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = Tokenizer.load(tmp_path)
    expected = [7, 10, 8, 9, 11]
    assert tokenizer.encode("a b 한 cc") == expected
    tokenizer.save(tmp_path / "saved")
    for peer in (
        transformers.BertTokenizer(str(tmp_path / "vocab.txt"), strip_accents=False),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    ):
        assert peer("a b 한 cc", add_special_tokens=False)["input_ids"] == expected


def test_the_case_of_a_bare_vocabulary_is_told_by_its_words(tmp_path: Path) -> None:
    """A capital letter in a word means that case is kept; what is asked for goes before."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, "a", "é"]))
    assert Tokenizer.load(path).lowercase
    assert not Tokenizer.load(path).strip_accents
    assert Tokenizer.load(path, strip_accents=True).strip_accents
    path.write_text("\n".join([*SPECIAL_TOKENS, "a", "##A"]))
    assert not Tokenizer.load(path).lowercase
    assert Tokenizer.load(path, lowercase=True).lowercase


def test_the_configuration_beside_a_vocabulary_is_read_as_transformers_reads_it(
    tmp_path: Path,
) -> None:
    """Left open there, accents follow the case, as in the original."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "é"]))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.lowercase, tokenizer.strip_accents) == (True, True)
    assert not tokenizer.spec.whole_hangul
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert not Tokenizer.load(tmp_path).strip_accents


def _changed(folder: Path, part: Sequence[str], value: Any) -> None:
    """Change one entry of a saved tokenizer.json."""
    file = json.loads((folder / "tokenizer.json").read_text())
    inner = file
    for key in part[:-1]:
        inner = inner[key]
    inner[part[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(file))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (["model"], {"type": "BPE", "vocab": {}, "merges": []}, "found a BPE tokenizer"),
        (["model"], {"type": "Unigram", "vocab": []}, "found a Unigram tokenizer"),
        (["model", "continuing_subword_prefix"], "@@", "continuing prefix '@@'"),
        (["normalizer"], {"type": "Lowercase"}, "found the normalizer Lowercase"),
        (["normalizer", "clean_text"], False, "does not clean text"),
        (["pre_tokenizer"], {"type": "Whitespace"}, "pre-tokenizer 'Whitespace'"),
        (["added_tokens"], [{"content": "<s>", "id": 9999}], "'<s>' has the id 9999; expected"),
        (["added_tokens"], [{"content": ""}], "the added token '' has"),
        (["added_tokens"], [{"content": "<s>", "lstrip": 3}], "lstrip is 3; expected true, false"),
        (["model", "vocab"], {"a": 0}, r"has no \[PAD\], \[UNK\]"),
        (["model", "vocab"], {}, "is empty"),
        (["model"], "WordPiece", "found 'WordPiece' at 'model'; expected an object"),
    ],
)
def test_other_tokenizers_are_refused_by_name(
    tmp_path: Path, part: list[str], value: Any, message: str
) -> None:
    """What a BERT tokenizer is not is named, with what was expected."""
    made().save(tmp_path)
    _changed(tmp_path, part, value)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    """A missing path, an empty folder, a folder of another kind, broken files: each its message."""
    with pytest.raises(TokenizerError, match="no such tokenizer"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="found no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").touch()
    with pytest.raises(TokenizerError, match="byte-pair encoding"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(TokenizerError, match="not a readable JSON file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(TokenizerError, match="not UTF-8 at byte 2"):
        Tokenizer.load(tmp_path / "vocab.txt")


@pytest.fixture(scope="module")
def original_vocabularies(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """Return a folder with the vocabularies of the original release."""
    folder = tmp_path_factory.mktemp("original")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as pack:
        for member in pack:
            if member.name.startswith("labelled/vocab/") and member.isfile():
                pack.extract(member, folder, filter="data")
    return folder / "labelled" / "vocab"


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "lowercase"),
    [
        ("bert-base-uncased", True),
        ("bert-base-cased", False),
        ("bert-base-multilingual-cased", False),
    ],
)
def test_the_originals_vocabularies_give_what_transformers_gives(
    tmp_path: Path,
    original_vocabularies: Path,
    shared_text: Path,
    name: str,
    lowercase: bool,
) -> None:
    """On real English and Korean the bare vocab.txt gives the ids of ``BertTokenizer``.

    The uncased one holds Hangul in jamo, which tells that its text was taken apart.
    """
    transformers = pytest.importorskip("transformers")
    shutil.copy(original_vocabularies / f"{name}.txt", tmp_path / "vocab.txt")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    assert tokenizer.lowercase is lowercase
    peer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    texts = ["Ünïcödé café 한국어 나는 학교에 갔다 ½ ﬁ İ ß"]
    for language in ("en-wiki", "ko-wiki"):
        with lzma.open(shared_text / f"{language}.jsonl.xz", "rt", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line, _ in zip(file, range(40), strict=False)]
    assert tokenizer.encode_batch(texts) == peer(texts, add_special_tokens=False)["input_ids"]
    tokenizer.save(tmp_path / "saved")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.encode_batch(texts) == auto(texts, add_special_tokens=False)["input_ids"]
