"""Reads a tokenizer.json: the form that Hugging Face's `tokenizers` writes.

It never knows the files beside it, nor a text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import (
    CONTINUATION_PREFIX,
    SPECIAL_TOKENS,
    UNK,
    AddedTokenSpec,
    TokenizerSpec,
    index_vocabulary,
)

#: Ids without a word that are no matter, beside as many as there are words.
_HOLES: Final = 1000


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; TokenizerError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value


def get_object(values: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object at ``key``, an empty one if there is none."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {value!r} at {key!r}; expected an object")
    return value


def get_bool(values: Mapping[str, Any], key: str, path: Path) -> bool | None:
    """Return a switch, None where it is not there or left open."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"{path}: {key} is {value!r}; expected true, false or null")
    return value


def parse_tokenizer_json(path: Path, lines: tuple[str, ...]) -> TokenizerSpec:
    """Return what a tokenizer.json says.

    lines: the words of a vocab.txt beside it, for ids that no word of the file has. Raises
    TokenizerError for a broken file, or a tokenizer that is not BERT's.
    """
    file = read_json_object(path)
    model = get_object(file, "model", path)
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else "unknown")
    if kind != "WordPiece":
        raise TokenizerError(f"{path}: found a {kind} tokenizer; expected WordPiece, as BERT has")
    _expect(path, "continuing prefix", model.get("continuing_subword_prefix"), CONTINUATION_PREFIX)
    _expect(path, "unknown token", model.get("unk_token"), UNK)
    splitter = get_object(file, "pre_tokenizer", path).get("type")
    _expect(path, "pre-tokenizer", splitter, "BertPreTokenizer")
    vocab = _in_order(get_object(model, "vocab", path), lines, path)
    added = parse_added_tokens(file.get("added_tokens") or [], vocab, path)
    choices = _choices(get_object(file, "normalizer", path), path)
    longest = model.get("max_input_chars_per_word", 100)
    if type(longest) is not int or not 0 < longest < 2**31:
        raise TokenizerError(f"{path}: max_input_chars_per_word is {longest!r}; expected a number")
    return TokenizerSpec(vocab=vocab, added=added, longest_word=longest, **choices)


def _expect(path: Path, what: str, found: object, expected: str) -> None:
    if found != expected:
        raise TokenizerError(f"{path}: found {what} {found!r}; expected {expected!r}, as BERT has")


def _in_order(ids: Mapping[str, Any], lines: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Return the words in the order of their ids; ids that no word has come from vocab.txt."""
    if not ids:
        raise TokenizerError(f"{path}: the vocabulary is empty")
    strange = next((own for own in ids.items() if type(own[1]) is not int or own[1] < 0), None)
    if strange is not None:
        raise TokenizerError(f"{path}: the word {strange[0]!r} has the id {strange[1]!r}")
    if len(set(ids.values())) != len(ids):
        raise TokenizerError(f"{path}: two words have the same id; expected one each")
    last = max(ids.values())
    # A repeated word leaves a hole at its first id. A single id must not ask for any memory.
    if last >= max(2 * len(ids), len(lines)) + _HOLES:
        raise TokenizerError(
            f"{path}: an id is {last:,}, but there are only {len(ids):,} words; expected ids "
            "without large gaps"
        )
    words: list[str | None] = [None] * (last + 1)
    for word, index in ids.items():
        words[index] = word
    if None in words:
        lines += tuple(f"[no word {index}]" for index in range(len(lines), len(words)))
        words = [lines[i] if word is None else word for i, word in enumerate(words)]
    return tuple(word for word in words if word is not None)


def parse_added_tokens(
    listed: Any, vocab: tuple[str, ...], path: Path
) -> tuple[AddedTokenSpec, ...]:
    """Read the tokens that stand beside a vocabulary, all but the special ones of BERT itself.

    listed: objects with a content, and perhaps an id and switches. Raises TokenizerError, with
    ``path`` in it, for anything else, and for ids that do not follow those of the vocabulary.
    """
    named = isinstance(listed, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in listed
    )
    if not named:
        raise TokenizerError(f"{path}: the added tokens are no list of tokens with their content")
    # A special token that is missing is told with the vocabulary.
    others = [token for token in listed if token["content"] not in SPECIAL_TOKENS]
    if all(type(token.get("id")) is int for token in others):
        others.sort(key=lambda token: int(token["id"]))
    known, found, free = index_vocabulary(vocab), [], len(vocab)
    for token in others:
        content = token["content"]
        wanted = known.get(content, free)
        if token.get("id", wanted) != wanted or not content:
            raise TokenizerError(
                f"{path}: the added token {content!r} has the id {token.get('id')!r}; expected "
                f"{wanted:,}: the vocabulary's own, or the next after it"
            )
        free += wanted == free
        switches = {name: get_bool(token, name, path) for name in AddedTokenSpec._fields[1:]}
        said = {name: value for name, value in switches.items() if value is not None}
        found.append(AddedTokenSpec(content, **said))
    return tuple(found)


def _choices(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the choices out of a normalizer, this package's or Hugging Face's."""
    parts = found.get("normalizers", []) if found.get("type") == "Sequence" else [found]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise TokenizerError(f"{path}: the normalizer is {parts!r}; expected a list of objects")
    kinds = [part.get("type") for part in parts]
    whole = kinds == ["BertNormalizer", "NFD", "StripAccents", "NFC"]
    if not whole and kinds != ["BertNormalizer"]:
        raise TokenizerError(
            f"{path}: found the normalizer {' + '.join(map(str, kinds))}; expected BertNormalizer"
        )
    bert = parts[0]
    if not bert.get("clean_text", True):
        raise TokenizerError(
            f"{path}: found a BertNormalizer that does not clean text; expected one that does"
        )
    lowercase = bool(bert.get("lowercase", True))
    strip = bert.get("strip_accents")
    # Left open, it follows the case, as in the original.
    strip = whole or (lowercase if strip is None else bool(strip))
    return {
        "lowercase": lowercase,
        "strip_accents": strip,
        "whole_hangul": whole or not strip,
        "split_chinese": bool(bert.get("handle_chinese_chars", True)),
    }
