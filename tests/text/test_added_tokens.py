"""Tokens added to a tokenizer with ``transformers``: loading, encoding and saving them."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, BertTokenizer, BertTokenizerFast

from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_files import write_tokenizer_spec
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.text.wordpiece import Tokenizer

PIECES = "new york covid ##19 ##s a city e1 e 1 [ ] ne ##w spot [unused0] unused0"
WORDS = (*SPECIAL_TOKENS, *PIECES.split())
#: Fingerprint of WORDS in the last release without added tokens.
OLD_HASH = "6c6f0fa318d4bf3a7a4074c0a0553bfdb66529b387284d80884f35e29fd362a1"
TEXTS = [
    "New York",
    "new york",
    "a new  york city",
    "COVID19 covid19s covid19",
    "[E1] new [E1]york[E1]",
    "[unused0] spots spot a spot",
    "[MASK] new york [SEP]",
]


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    """A tokenizer saved by ``transformers``, with added tokens of every kind."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    hf_tokenizer = BertTokenizerFast.from_pretrained(tmp_path)
    hf_tokenizer.add_tokens(["new york", "covid19"])
    hf_tokenizer.add_tokens([AddedToken("spot", single_word=True, normalized=False)])
    hf_tokenizer.add_special_tokens({"additional_special_tokens": ["[E1]", "[unused0]"]})
    hf_tokenizer.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_ids_equal_those_of_transformers(hf_directory: Path) -> None:
    """Added tokens have the ids of ``transformers``, before and after saving."""
    hf_tokenizer = AutoTokenizer.from_pretrained(hf_directory)
    expected = [hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    tokenizer = Tokenizer.load(hf_directory)
    # "new york", "covid19" and "[E1]" have new ids; "spot" and "[unused0]" are in WORDS.
    assert tokenizer.vocab_size == len(hf_tokenizer) == len(WORDS) + 3
    assert tokenizer.encode_batch(TEXTS, allow_special=True) == expected
    assert tokenizer.ids_to_tokens(expected[0]) == ["new york"]
    saved = hf_directory.parent / "saved"
    tokenizer.save(saved)
    reloaded = Tokenizer.load(saved)
    assert reloaded.spec == tokenizer.spec
    assert reloaded.hash == tokenizer.hash
    hf_reloaded = AutoTokenizer.from_pretrained(saved)
    assert [hf_reloaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == expected
    ids_with_special_tokens = expected[TEXTS.index("[E1] new [E1]york[E1]")]
    hf_decoded = hf_tokenizer.decode(ids_with_special_tokens, skip_special_tokens=True)
    assert hf_reloaded.decode(ids_with_special_tokens, skip_special_tokens=True) == hf_decoded


def test_added_tokens_are_read_without_tokenizer_json(hf_directory: Path) -> None:
    """Added tokens are read from tokenizer_config.json, or from an older added_tokens.json."""
    expected = Tokenizer.load(hf_directory)
    shutil.copy(hf_directory.parent / "vocab.txt", hf_directory)
    (hf_directory / "tokenizer.json").unlink()
    config_file = hf_directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    ids = {token.content: expected.token_to_id(token.content) for token in expected.spec.added}
    decoder = {str(ids[token.content]): token._asdict() for token in expected.spec.added}
    config |= {"strip_accents": False, "added_tokens_decoder": decoder}
    config_file.write_text(json.dumps(config))
    assert set(Tokenizer.load(hf_directory).spec.added) == set(expected.spec.added)
    assert Tokenizer.load(hf_directory).encode_batch(TEXTS) == expected.encode_batch(TEXTS)
    del config["added_tokens_decoder"]
    config_file.write_text(json.dumps(config))
    (hf_directory / "added_tokens.json").write_text(json.dumps(ids))
    older = Tokenizer.load(hf_directory)
    assert older.vocab == expected.vocab
    assert older.token_to_id("covid19") == len(WORDS) + 1
    (hf_directory / "added_tokens.json").write_text(json.dumps({"new york": "x"}))
    message = f"'new york' has the id 'x'; expected {len(WORDS)}"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(hf_directory)


@pytest.mark.parametrize("file_name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize(
    "token", ["[E1]", {"__type": "AddedToken", "content": "[E1]", "lstrip": True}]
)
def test_extra_special_tokens_are_read_without_tokenizer_json(
    tmp_path: Path, file_name: str, key: str, token: object
) -> None:
    """An extra special token in the vocabulary is one token, as with ``transformers``."""
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "[E1]"]))
    (tmp_path / file_name).write_text(json.dumps({"do_lower_case": True, key: [token, "[SEP]"]}))
    hf_tokenizer = BertTokenizer.from_pretrained(tmp_path)
    expected = [hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_batch(TEXTS, allow_special=True) == expected
    assert tokenizer.ids_to_tokens(tokenizer.encode("[E1]")) == ["[E1]"]
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").spec == tokenizer.spec


@pytest.mark.parametrize("has_tokenizer_json", [False, True])
@pytest.mark.parametrize(
    ("file_name", "special_tokens"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["[E9]"]}),
        ("tokenizer_config.json", {"extra_special_tokens": ["[E9]"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"entity": "[E9]"}}),
        ("tokenizer_config.json", {"eos_token": "[E9]"}),
        ("special_tokens_map.json", {"additional_special_tokens": ["[E9]"]}),
        ("special_tokens_map.json", {"extra_special_tokens": ["[E9]"]}),
        ("special_tokens_map.json", {"eos_token": "[E9]"}),
        ("special_tokens_map.json", {"eos_token": "city"}),
    ],
    ids=str,
)
def test_special_tokens_of_added_tokens_json_are_read_like_transformers(
    tmp_path: Path, file_name: str, special_tokens: dict[str, object], has_tokenizer_json: bool
) -> None:
    """A special token in added_tokens.json is not normalized, as with ``transformers``."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    if has_tokenizer_json:
        Tokenizer(TokenizerSpec(vocab=WORDS)).save(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values: dict[str, object] = {}
        if name == "tokenizer_config.json":
            values = {"do_lower_case": True, "strip_accents": False}
        values |= special_tokens if name == file_name else {}
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[E9]": len(WORDS)}))
    hf_tokenizer = BertTokenizer.from_pretrained(tmp_path)
    texts = ["[E9] new [e9]york[E9]", "a citya CITY city"]
    expected = [hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert Tokenizer.load(tmp_path).encode_batch(texts, allow_special=True) == expected


@pytest.mark.parametrize("tokenizer_class", ["BertTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_outside_tokenizer_json_are_read(
    tmp_path: Path, hf_directory: Path, tokenizer_class: str, key: str
) -> None:
    """Extra special tokens of tokenizer_config.json are added to those of tokenizer.json."""
    config_file = hf_directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": tokenizer_class}
    config.pop("extra_special_tokens", None)
    config_file.write_text(json.dumps(config | {key: ["[E1]", "city"]}))
    hf_tokenizer = AutoTokenizer.from_pretrained(hf_directory)
    texts = [*TEXTS, "new citya"]
    expected = [hf_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokenizer = Tokenizer.load(hf_directory)
    assert tokenizer.encode_batch(texts, allow_special=True) == expected
    assert tokenizer.ids_to_tokens(expected[-1]) == ["new", "city", "a"]


@pytest.mark.parametrize("token_id", [len(WORDS), len(WORDS) + 9, 7])
def test_ids_in_other_files_than_tokenizer_json_are_ignored(tmp_path: Path, token_id: int) -> None:
    """An added token that tokenizer.json lacks has the next free id, as in ``transformers``."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path / "hf")
    config_file = tmp_path / "hf" / "tokenizer_config.json"
    decoder = {str(token_id): {"content": "[E9]", "special": True}}
    config = json.loads(config_file.read_text()) | {"added_tokens_decoder": decoder}
    config_file.write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path / "hf")("a [E9]", add_special_tokens=False)
    tokenizer = Tokenizer.load(tmp_path / "hf")
    assert tokenizer.encode("a [E9]", allow_special=True) == expected["input_ids"]
    assert tokenizer.vocab_size == len(WORDS) + 1


def test_special_tokens_map_is_ignored_with_added_tokens_decoder(tmp_path: Path) -> None:
    """With ``added_tokens_decoder``, special_tokens_map.json is not read, as in transformers.

    Extra special tokens outside the vocabulary are ignored, because they have no embedding.
    """
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "[E1]"]))
    config_file = tmp_path / "tokenizer_config.json"
    config_file.write_text(json.dumps({"added_tokens_decoder": {}}))
    special_tokens = {"additional_special_tokens": ["[E1]"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    assert not Tokenizer.load(tmp_path).spec.added
    config_file.write_text(json.dumps({"additional_special_tokens": ["[E2]"]}))
    assert not Tokenizer.load(tmp_path).spec.added


def test_added_tokens_are_matched_in_plain_text(hf_directory: Path) -> None:
    """In plain text, "[MASK]" is not a special token, but added tokens are matched."""
    tokenizer = Tokenizer.load(hf_directory)
    assert tokenizer.mask_id not in tokenizer.encode("[MASK] [E1]")
    assert tokenizer.encode("[MASK] [E1]")[-1] == tokenizer.token_to_id("[E1]")


def test_cached_tokenizer_supports_added_tokens(hf_directory: Path) -> None:
    """``prepare`` does not cache words if there are added tokens, which can contain spaces."""
    tokenizer = Tokenizer.load(hf_directory)
    ids, sizes = CachedTokenizer(tokenizer).encode(TEXTS)
    expected = tokenizer.encode_batch(TEXTS)
    assert ids.tolist() == [token_id for text_ids in expected for token_id in text_ids]
    assert sizes.tolist() == [len(text_ids) for text_ids in expected]


def test_hash_without_added_tokens_is_unchanged() -> None:
    """Without added tokens, the hash equals that of older releases, so their stores still match."""
    assert TokenizerSpec(vocab=WORDS).fingerprint() == OLD_HASH


def test_vocabulary_with_added_tokens_cannot_be_extended(hf_directory: Path) -> None:
    """A vocabulary with added tokens is rejected, because new words would need their ids."""
    with pytest.raises(TokenizerError, match=r"new york, covid19, \[E1\]"):
        extend_vocabulary(Tokenizer.load(hf_directory), ["cities"])


def test_gap_in_the_ids_is_rejected(tmp_path: Path, hf_directory: Path) -> None:
    """An added token whose id is not the next one is an error with the expected id."""
    file = hf_directory / "tokenizer.json"
    first_id = len(WORDS)
    # With this change of the id of "new york", "covid19" has the lowest id.
    file.write_text(file.read_text().replace(f'"id": {first_id},', '"id": 99999,'))
    message = f"'covid19' has the id {first_id + 1}; expected {first_id}"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(hf_directory)


def test_added_tokens_are_not_written_to_vocab_txt(hf_directory: Path) -> None:
    """vocab.txt contains only the WordPiece vocabulary, as with ``transformers``."""
    saved = hf_directory.parent / "saved"
    write_tokenizer_spec(Tokenizer.load(hf_directory).spec, saved)
    assert (saved / "vocab.txt").read_text().split("\n")[:-1] == list(WORDS)
