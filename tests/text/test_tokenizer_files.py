"""Tokenizer files of Hugging Face: classes, options, and directories with only a vocab.txt."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

WORDS = ("cafe", "Cafe", "café", "Café", "a", "##b")
BERT = {"model_type": "bert"}


def write_directory(
    folder: Path,
    words: tuple[str, ...] = WORDS,
    model_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    spec_options: dict[str, Any] | None = None,
) -> Path:
    """Write a directory with vocab.txt and, if they are given, other files; return it.

    Args:
        folder: The directory.
        words: The vocabulary without special tokens.
        model_config: Content of config.json.
        tokenizer_config: Content of tokenizer_config.json.
        spec_options: Options of the tokenizer in tokenizer.json.
    """
    folder.mkdir(exist_ok=True)
    vocab = (*SPECIAL_TOKENS, *words)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocab))
    if spec_options is not None:
        Tokenizer(TokenizerSpec(vocab=vocab, **spec_options)).save(folder)
        (folder / "tokenizer_config.json").unlink()
    for name, content in (("config", model_config), ("tokenizer_config", tokenizer_config)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("model_config", "tokenizer_config", "message"),
    [
        (BERT, {"tokenizer_class": "BertJapaneseTokenizer"}, "is 'BertJapaneseTokenizer'"),
        (BERT | {"tokenizer_class": "BertJapaneseTokenizer"}, {}, r"/config\.json: tokenizer_clas"),
        (BERT, {"tokenizer_class": "RoFormerTokenizerFast"}, "is 'RoFormerTokenizerFast'; expect"),
        (BERT, {"tokenizer_class": ["BertTokenizer"]}, "expected BertTokenizer"),
        (BERT, {"word_tokenizer_type": "mecab"}, "word_tokenizer_type is 'mecab'; expected 'bas"),
        (BERT, {"subword_tokenizer_type": "character"}, "'character'; expected 'wordpiece'"),
    ],
)
@pytest.mark.parametrize("spec_options", [None, {}])
def test_tokenizers_of_other_classes_are_rejected(
    tmp_path: Path,
    model_config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    message: str,
    spec_options: dict[str, bool] | None,
) -> None:
    """A tokenizer that splits text in another way is not read as a plain WordPiece vocabulary."""
    write_directory(tmp_path, WORDS, model_config, tokenizer_config, spec_options)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["BertTokenizerFast", "DistilBertTokenizer", "ElectraTokenizerFast", "PreTrainedTokenizerFast"],
)
def test_tokenizers_of_equal_classes_are_read(tmp_path: Path, name: str) -> None:
    """Classes with the tokenizer of BERT are accepted; the class in the first file counts."""
    model_config = BERT | {"tokenizer_class": "BertJapaneseTokenizer"}
    options = {
        "tokenizer_class": name,
        "do_lower_case": False,
        "word_tokenizer_type": "basic",
        "subword_tokenizer_type": "wordpiece",
    }
    write_directory(tmp_path, WORDS, model_config, options)
    assert Tokenizer.load(tmp_path).ids_to_tokens([5, 10]) == ["cafe", "##b"]


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer_78b3253a26.model"])
def test_vocabulary_of_sentencepiece_is_rejected(tmp_path: Path, name: str) -> None:
    """A vocab.txt next to a SentencePiece model lists the pieces of that model."""
    write_directory(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(TokenizerError, match="of another kind, SentencePiece"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("spec_options", [{"lowercase": False}, {"strip_accents": True}])
@pytest.mark.parametrize(
    "tokenizer_config",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": True, "tokenizer_class": "MobileBertTokenizer"},
        {"do_lower_case": True, "tokenizer_class": "TokenizersBackend"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_config", [BERT, {}])
def test_options_without_a_class_are_read_like_transformers(
    tmp_path: Path,
    model_config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    spec_options: dict[str, bool],
) -> None:
    """In the directory of a BERT, tokenizer_config.json takes precedence over tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    write_directory(tmp_path, WORDS, model_config, tokenizer_config, spec_options)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).tokenize("Café café")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.ids_to_tokens(tokenizer.encode("Café café")) == expected


@pytest.mark.parametrize("tokenizer_class", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_maximum_length_of_words_is_read_and_written_like_transformers(
    tmp_path: Path, tokenizer_class: str
) -> None:
    """BERT's classes split words of at most 100 characters, others follow tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    write_directory(tmp_path, WORDS, BERT, {"tokenizer_class": tokenizer_class}, {})
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["model"]["max_input_chars_per_word"] = 200
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    word = "cafe" + "b" * 146
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).tokenize(word)
    assert len(expected) == (1 if tokenizer_class == "BertTokenizer" else 147)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.ids_to_tokens(tokenizer.encode(word)) == expected
    tokenizer.save(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").tokenize(word) == expected


def test_missing_options_do_not_change_the_normalizer(tmp_path: Path) -> None:
    """tokenizer_config.json without casing leaves the casing of tokenizer.json unchanged."""
    for name, lowercase in (("cased", False), ("uncased", True)):
        options = {"lowercase": lowercase, "strip_accents": False}
        folder = write_directory(tmp_path / name, WORDS, BERT, {"model_max_length": 8}, options)
        spec = Tokenizer.load(folder).spec
        assert (spec.lowercase, spec.strip_accents) == (lowercase, False)


@pytest.mark.parametrize(
    ("words", "is_stripped"),
    [
        (("cafe", "≠", "[URL]"), True),
        (("cafe", "café"), False),
        (("cafe", "한"), False),
        (("cafe", "Cafe"), False),
    ],
)
def test_accents_are_stripped_for_a_model_without_tokenizer_config(
    tmp_path: Path, words: tuple[str, ...], is_stripped: bool
) -> None:
    """An uncased model with only vocab.txt strips accents, unless its vocabulary has any."""
    transformers = pytest.importorskip("transformers")
    write_directory(tmp_path, words)
    assert not Tokenizer.load(tmp_path).strip_accents
    write_directory(tmp_path, words, BERT)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.strip_accents is is_stripped
    if is_stripped:
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path).tokenize("Café 한")
        assert tokenizer.ids_to_tokens(tokenizer.encode("Café 한")) == expected


def test_placeholders_do_not_determine_the_casing(tmp_path: Path) -> None:
    """Capital letters in brackets, such as [URL], do not make a vocabulary cased."""
    assert Tokenizer.load(write_directory(tmp_path, ("a", "[URL]", "[unused1]"))).lowercase
    assert not Tokenizer.load(write_directory(tmp_path, ("a", "[", "URL]"))).lowercase
