"""The WordPiece tokenizer: golden cases of the original code, files, and ``transformers``."""

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
from bertsmith.text.unknown import TokenCounts
from bertsmith.text.wordpiece import Tokenizer

ORIGINAL_WORDS = (
    "un want ##want ##ed wa runn ##ing low ##er ##est ##aff ##able hello how are you ah ##zz zz"
)
OTHER_WORDS = "cafe café h ##é ##llo world ##wan mask sep Hello UN ##s a b ##b don t 1 ##9 ##8"
SYMBOLS = ", . ! ? [ ] ' - $ ` ~ 博 推 한국 ##어 한 국 어"
PIECES = f"{ORIGINAL_WORDS} {OTHER_WORDS} {SYMBOLS}".split()


def make_tokenizer(**options: Any) -> Tokenizer:
    """Return a tokenizer with the small vocabulary."""
    words = dict.fromkeys([*SPECIAL_TOKENS, *PIECES])
    return Tokenizer(TokenizerSpec(vocab=tuple(words), **options))


# Options of the tokenizer; the default is to lowercase and keep accents.
LOWER: dict[str, bool] = {}
CASED = {"lowercase": False}
STRIP = {"strip_accents": True}
ORIGINAL = {"strip_accents": True, "keep_hangul_syllables": False}
OPTIONS = [LOWER, CASED, STRIP, ORIGINAL, {"split_chinese": False}]
#: Options, text and expected tokens; most are from the original tests (tokenization_test.py).
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


@pytest.mark.parametrize(("options", "text", "tokens"), GOLDEN)
def test_tokens_equal_those_of_the_original_code(
    options: dict[str, bool], text: str, tokens: str
) -> None:
    """Each text is split into the tokens that the original code gives."""
    tokenizer = make_tokenizer(**options)
    assert tokenizer.ids_to_tokens(tokenizer.encode(text)) == tokens.split()


def test_special_tokens_in_text_need_allow_special() -> None:
    """The text "[MASK]" is plain text, or the special token with ``allow_special``."""
    tokenizer = make_tokenizer()
    text = "hello [MASK] you[SEP]"
    assert tokenizer.mask_id not in tokenizer.encode(text)
    ids = tokenizer.encode(text, allow_special=True)
    assert tokenizer.ids_to_tokens(ids) == ["hello", "[MASK]", "you", "[SEP]"]
    assert tokenizer.decode([tokenizer.cls_id, *ids]) == "hello [MASK] you"


def test_equal_texts_are_encoded_once_and_counted_each_time() -> None:
    """The ids of equal texts are a single list, and all of their tokens are counted."""
    counts = TokenCounts()
    tokenizer = make_tokenizer().with_counter(counts)
    first, other, second = tokenizer.encode_batch(["hello you [MASK]", "hello", "hello you [MASK]"],
                                                  allow_special=True)  # fmt: skip
    assert first is second
    assert first == tokenizer.encode("hello you [MASK]", allow_special=True)
    assert other == tokenizer.encode("hello")
    # Tokens without special ones: 2, 1, 2, and 2 and 1 of the calls that encode a single text.
    assert (counts.num_tokens, counts.num_unknown) == (8, 0)


def test_offsets_refer_to_the_original_text() -> None:
    """The offsets of a token select its characters as written, with capitals and accents."""
    text = "UNwanted, Café!"
    ids, offsets = make_tokenizer(strip_accents=True).encode_with_offsets(text)
    assert [text[start:end] for start, end in offsets] == ["UN", "want", "ed", ",", "Café", "!"]
    assert len(ids) == len(offsets)


def test_properties_match_the_vocabulary() -> None:
    """Special ids, continuation pieces and the size match the vocabulary."""
    tokenizer = make_tokenizer()
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id)
    assert (*ids, tokenizer.mask_id) == (0, 1, 2, 3, 4)
    assert tokenizer.vocab_size == len(tokenizer.vocab) == len(tokenizer.is_continuation)
    continuations = [token for token in tokenizer.vocab if token.startswith("##")]
    assert tokenizer.is_continuation.sum() == len(continuations)
    assert tokenizer.token_to_id("hello") == tokenizer.vocab.index("hello")
    assert tokenizer.token_to_id("nothing") is None


def test_hash_covers_words_order_and_options() -> None:
    """Another word, order or option gives another hash; equal specs give the same hash."""
    vocab = (*SPECIAL_TOKENS, "a", "b")
    specs = [
        TokenizerSpec(vocab=vocab),
        TokenizerSpec(vocab=(*SPECIAL_TOKENS, "b", "a")),
        TokenizerSpec(vocab=(*vocab, "c")),
        TokenizerSpec(vocab=vocab, lowercase=False),
        TokenizerSpec(vocab=vocab, strip_accents=True),
        TokenizerSpec(vocab=vocab, strip_accents=True, keep_hangul_syllables=False),
        TokenizerSpec(vocab=vocab, split_chinese=False),
        TokenizerSpec(vocab=vocab, segmenter=("kiwi", "0.22")),
    ]
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert TokenizerSpec(vocab=vocab).fingerprint() == specs[0].fingerprint()


def test_pickled_tokenizer_gives_the_same_ids() -> None:
    """A pickled tokenizer gives the same ids and hash."""
    tokenizer = make_tokenizer(strip_accents=True)
    unpickled = pickle.loads(pickle.dumps(tokenizer))
    assert unpickled.encode("unaffable café") == tokenizer.encode("unaffable café")
    assert unpickled.hash == tokenizer.hash


@pytest.mark.parametrize("options", OPTIONS)
def test_loaded_tokenizer_has_the_saved_spec(tmp_path: Path, options: dict[str, bool]) -> None:
    """A loaded tokenizer has the saved spec; saving keeps other entries of bertsmith.json."""
    (tmp_path / "bertsmith.json").write_text('{"task": "x"}')
    tokenizer = make_tokenizer(**options)
    tokenizer.save(tmp_path, max_length=512)
    assert Tokenizer.load(tmp_path).spec == tokenizer.spec
    assert Tokenizer.load(tmp_path / "tokenizer.json").spec == tokenizer.spec
    assert json.loads((tmp_path / "bertsmith.json").read_text())["task"] == "x"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 512


@pytest.mark.parametrize("options", OPTIONS)
def test_auto_tokenizer_gives_the_same_ids(tmp_path: Path, options: dict[str, bool]) -> None:
    """``transformers.AutoTokenizer`` loads the saved files and agrees on all golden texts."""
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer(**options)
    tokenizer.save(tmp_path)
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # transformers treats "[MASK]" in a text as the special token.
    texts = [text for _, text, _ in GOLDEN if "[MASK]" not in text]
    for text in texts:
        ids = auto_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text), text
    pair = auto_tokenizer("hello you", "how")
    cls_id, sep_id = auto_tokenizer.cls_token_id, auto_tokenizer.sep_token_id
    first, second = tokenizer.encode("hello you"), tokenizer.encode("how")
    assert pair["input_ids"] == [cls_id, *first, sep_id, *second, sep_id]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert (auto_tokenizer.mask_token_id, auto_tokenizer.pad_token_id) == (4, 0)


@pytest.mark.parametrize("options", [LOWER, CASED, ORIGINAL])
@pytest.mark.parametrize(
    "changes",
    [
        {"do_lower_case": True, "strip_accents": None},
        {"do_lower_case": False, "strip_accents": None},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
    ],
)
def test_contradicting_files_are_read_like_transformers(
    tmp_path: Path, options: dict[str, bool], changes: dict[str, Any]
) -> None:
    """The options in tokenizer_config.json take precedence over the normalizer."""
    transformers = pytest.importorskip("transformers")
    make_tokenizer(**options).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("Hello UN café", "한국어 cafe\u0301", "a博推b"):
        expected = auto_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == expected, text


def test_repeated_words_do_not_shift_ids(tmp_path: Path) -> None:
    """An id is a line number of vocab.txt; a repeated word has the id of its last line."""
    words = [*SPECIAL_TOKENS, "a", "b", "a", "", "c"]
    # The ids of the special tokens are 0 to 4, that of the last "a" is 7.
    expected = [7, 6, 9]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for _ in range(2):
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("a b c") == expected
        assert tokenizer.vocab_size == len(words)
        # The second iteration reads tokenizer.json, which cannot contain a word twice.
        tokenizer.save(tmp_path)
    assert (tmp_path / "vocab.txt").read_text().split("\n")[:-1] == words
    (tmp_path / "vocab.txt").unlink()
    assert Tokenizer.load(tmp_path).encode("a b c") == expected


def test_repeated_words_are_read_like_transformers(tmp_path: Path) -> None:
    """The bare vocab.txt and the saved files give the ids of ``transformers``."""
    transformers = pytest.importorskip("transformers")
    words = [*SPECIAL_TOKENS, "a", "b", "a", "한", "c", "b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = Tokenizer.load(tmp_path)
    # The last "a" is word 7 and the last "b" word 10; "cc" is split into "c" and "##c".
    expected = [7, 10, 8, 9, 11]
    assert tokenizer.encode("a b 한 cc") == expected
    tokenizer.save(tmp_path / "saved")
    for hf_tokenizer in (
        transformers.BertTokenizer(str(tmp_path / "vocab.txt"), strip_accents=False),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    ):
        assert hf_tokenizer("a b 한 cc", add_special_tokens=False)["input_ids"] == expected


def test_lowercasing_is_detected_from_a_vocabulary(tmp_path: Path) -> None:
    """Text is lowercased unless a word of vocab.txt has a capital; arguments take precedence."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, "a", "é"]))
    assert Tokenizer.load(path).lowercase
    assert not Tokenizer.load(path).strip_accents
    assert Tokenizer.load(path, strip_accents=True).strip_accents
    path.write_text("\n".join([*SPECIAL_TOKENS, "a", "##A"]))
    assert not Tokenizer.load(path).lowercase
    assert Tokenizer.load(path, lowercase=True).lowercase


def test_accents_are_stripped_with_lowercasing_by_default(tmp_path: Path) -> None:
    """If tokenizer_config.json has no strip_accents, lowercased text loses its accents."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "é"]))
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.lowercase, tokenizer.strip_accents) == (True, True)
    assert not tokenizer.spec.keep_hangul_syllables
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert not Tokenizer.load(tmp_path).strip_accents


def change_tokenizer_json(folder: Path, keys: Sequence[str], value: Any) -> None:
    """Set one entry of a saved tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    parent = content
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
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
def test_other_tokenizers_are_rejected(
    tmp_path: Path, keys: list[str], value: Any, message: str
) -> None:
    """The error names the property in which the tokenizer differs from BERT's."""
    make_tokenizer().save(tmp_path)
    change_tokenizer_json(tmp_path, keys, value)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_missing_and_damaged_files_are_rejected(tmp_path: Path) -> None:
    """A missing path, an empty folder, another kind of tokenizer and damaged files are errors."""
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
    """A folder with the vocabularies of the original release."""
    folder = tmp_path_factory.mktemp("original")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as archive:
        for member in archive:
            if member.name.startswith("labelled/vocab/") and member.isfile():
                archive.extract(member, folder, filter="data")
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
def test_original_vocabularies_give_the_ids_of_transformers(
    tmp_path: Path,
    original_vocabularies: Path,
    shared_text: Path,
    name: str,
    lowercase: bool,
) -> None:
    """On real English and Korean text, a bare vocab.txt gives the ids of ``BertTokenizer``.

    The uncased vocabulary contains Hangul as jamo, so its text is decomposed too.
    """
    transformers = pytest.importorskip("transformers")
    shutil.copy(original_vocabularies / f"{name}.txt", tmp_path / "vocab.txt")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    assert tokenizer.lowercase is lowercase
    texts = ["Ünïcödé café 한국어 나는 학교에 갔다 ½ ﬁ İ ß"]
    for corpus in ("en-wiki", "ko-wiki"):
        with lzma.open(shared_text / f"{corpus}.jsonl.xz", "rt", encoding="utf-8") as file:
            texts += [json.loads(line)["text"] for line, _ in zip(file, range(40), strict=False)]
    ids = tokenizer.encode_batch(texts)
    hf_tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    assert ids == hf_tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokenizer.save(tmp_path / "saved")
    auto_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ids == auto_tokenizer(texts, add_special_tokens=False)["input_ids"]
