"""Parses tokenizer.json, the file format of Hugging Face's `tokenizers`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import (
    CONTINUATION_PREFIX,
    DEFAULT_MAX_WORD_CHARS,
    SPECIAL_TOKENS,
    UNK,
    AddedTokenSpec,
    TokenizerSpec,
    index_vocabulary,
)

#: Number of unused ids that are accepted in addition to the number of words.
_MAX_UNUSED_IDS: Final = 1000


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object; raise TokenizerError if it does not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value


def get_object(values: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object at ``key``; empty if missing or null.

    Raises:
        TokenizerError: The value is not an object.
    """
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {value!r} at {key!r}; expected an object")
    return value


def get_bool(values: Mapping[str, Any], key: str, path: Path) -> bool | None:
    """Return the boolean at ``key``; None if missing or null.

    Raises:
        TokenizerError: The value is not a boolean.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"{path}: {key} is {value!r}; expected true, false or null")
    return value


def parse_tokenizer_json(path: Path, vocab_lines: tuple[str, ...]) -> TokenizerSpec:
    """Read a tokenizer.json.

    Args:
        path: The file.
        vocab_lines: Lines of the vocab.txt in the same directory, for ids that have no word in
            tokenizer.json; empty without a vocab.txt.

    Raises:
        TokenizerError: The file is invalid, or the tokenizer is not BERT's.
    """
    file = read_json_object(path)
    model = get_object(file, "model", path)
    is_untyped_wordpiece = "max_input_chars_per_word" in model
    model_type = model.get("type") or ("WordPiece" if is_untyped_wordpiece else "unknown")
    if model_type != "WordPiece":
        raise TokenizerError(
            f"{path}: found a {model_type} tokenizer; expected WordPiece, as BERT has"
        )
    prefix = model.get("continuing_subword_prefix")
    _check_value(path, "continuing prefix", prefix, CONTINUATION_PREFIX)
    _check_value(path, "unknown token", model.get("unk_token"), UNK)
    pre_tokenizer = get_object(file, "pre_tokenizer", path).get("type")
    _check_value(path, "pre-tokenizer", pre_tokenizer, "BertPreTokenizer")
    vocab = _sort_vocabulary(get_object(model, "vocab", path), vocab_lines, path)
    added = parse_added_tokens(file.get("added_tokens") or [], vocab, path)
    options = _parse_normalizer(get_object(file, "normalizer", path), path)
    max_length = model.get("max_input_chars_per_word", DEFAULT_MAX_WORD_CHARS)
    if type(max_length) is not int or not 0 < max_length < 2**31:
        raise TokenizerError(
            f"{path}: max_input_chars_per_word is {max_length!r}; expected an integer "
            "from 1 to 2,147,483,647"
        )
    return TokenizerSpec(vocab=vocab, added=added, max_word_chars=max_length, **options)


def _check_value(path: Path, name: str, value: object, expected: str) -> None:
    """Raise TokenizerError unless a value of the file is the expected one."""
    if value != expected:
        raise TokenizerError(f"{path}: found {name} {value!r}; expected {expected!r}, as BERT has")


def _sort_vocabulary(
    ids: Mapping[str, Any], vocab_lines: tuple[str, ...], path: Path
) -> tuple[str, ...]:
    """Return the words in the order of their ids.

    An id without a word in tokenizer.json gets the word on its line of vocab.txt.
    """
    if not ids:
        raise TokenizerError(f"{path}: the vocabulary is empty")
    for word, index in ids.items():
        if type(index) is not int or index < 0:
            raise TokenizerError(
                f"{path}: the word {word!r} has the id {index!r}; expected 0, 1, 2, ..."
            )
    if len(set(ids.values())) != len(ids):
        raise TokenizerError(f"{path}: two words have the same id; expected different ids")
    last = max(ids.values())
    # Some ids may be unused, because a repeated word only has its last id. But a single huge id
    # must not allocate much memory.
    if last >= max(2 * len(ids), len(vocab_lines)) + _MAX_UNUSED_IDS:
        raise TokenizerError(
            f"{path}: an id is {last:,}, but there are only {len(ids):,} words; expected ids "
            "without large gaps"
        )
    words: list[str | None] = [None] * (last + 1)
    for word, index in ids.items():
        words[index] = word
    if None in words:
        vocab_lines += tuple(f"[no word {index}]" for index in range(len(vocab_lines), len(words)))
        words = [vocab_lines[index] if word is None else word for index, word in enumerate(words)]
    return tuple(word for word in words if word is not None)


def parse_added_tokens(
    tokens: Any, vocab: tuple[str, ...], path: Path
) -> tuple[AddedTokenSpec, ...]:
    """Parse the added tokens of a tokenizer, without the special tokens of BERT.

    Args:
        tokens: A list of objects with ``content`` and optionally ``id`` and boolean options.
        vocab: The vocabulary.
        path: File of the tokens, for error messages.

    Raises:
        TokenizerError: The tokens are not such a list, or the id of a token is neither its id in
            the vocabulary nor the next free id after the vocabulary.
    """
    is_valid = isinstance(tokens, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens
    )
    if not is_valid:
        raise TokenizerError(
            f"{path}: the added tokens are invalid; expected a list of objects with their content"
        )
    # TokenizerSpec reports special tokens that are missing in the vocabulary.
    tokens = [token for token in tokens if token["content"] not in SPECIAL_TOKENS]
    if all(type(token.get("id")) is int for token in tokens):
        tokens.sort(key=lambda token: int(token["id"]))
    vocab_ids = index_vocabulary(vocab)
    next_id = len(vocab)
    added = []
    for token in tokens:
        content = token["content"]
        expected_id = vocab_ids.get(content, next_id)
        if token.get("id", expected_id) != expected_id or not content:
            raise TokenizerError(
                f"{path}: the added token {content!r} has the id {token.get('id')!r}; expected "
                f"{expected_id:,}: its id in the vocabulary, or the next one after the vocabulary"
            )
        if expected_id == next_id:
            next_id += 1
        values = {name: get_bool(token, name, path) for name in AddedTokenSpec._fields[1:]}
        options = {name: value for name, value in values.items() if value is not None}
        added.append(AddedTokenSpec(content, **options))
    return tuple(added)


def _parse_normalizer(normalizer: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the options of ``TokenizerSpec`` that a normalizer implies."""
    is_sequence = normalizer.get("type") == "Sequence"
    parts = normalizer.get("normalizers", []) if is_sequence else [normalizer]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise TokenizerError(f"{path}: the normalizer is {parts!r}; expected a list of objects")
    types = [part.get("type") for part in parts]
    recomposes_hangul = types == ["BertNormalizer", "NFD", "StripAccents", "NFC"]
    if not recomposes_hangul and types != ["BertNormalizer"]:
        raise TokenizerError(
            f"{path}: found the normalizer {' + '.join(map(str, types))}; expected BertNormalizer"
        )
    bert = parts[0]
    if not bert.get("clean_text", True):
        raise TokenizerError(
            f"{path}: found a BertNormalizer that does not clean text; expected one that does"
        )
    lowercase = bool(bert.get("lowercase", True))
    strip_accents = bert.get("strip_accents")
    if recomposes_hangul:
        strip_accents = True
    elif strip_accents is None:
        # As in the original code, accents are stripped if text is lowercased.
        strip_accents = lowercase
    return {
        "lowercase": lowercase,
        "strip_accents": bool(strip_accents),
        "keep_hangul_syllables": recomposes_hangul or not strip_accents,
        "split_chinese": bool(bert.get("handle_chinese_chars", True)),
    }
