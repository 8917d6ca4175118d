"""Reads and writes a tokenizer's files, as this package, Hugging Face and the original do.

It never knows a text.
"""

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import TokenizerError
from bertsmith.files import write_json, write_whole
from bertsmith.text.recipe import CLS, CONTINUES, MASK, PAD, SEP, SPECIAL, UNK, Recipe, engine

TOKENIZER, VOCAB, CONFIG = "tokenizer.json", "vocab.txt", "tokenizer_config.json"
#: Where this package writes what the files above cannot say.
OWN: Final = "bertsmith.json"
#: Files by which tokenizers of other kinds are known, to name them when they are refused.
FOREIGN: Final = {
    "merges.txt": "byte-pair encoding (merges.txt)",
    "spiece.model": "SentencePiece (spiece.model)",
    "sentencepiece.bpe.model": "SentencePiece (sentencepiece.bpe.model)",
    "tokenizer.model": "SentencePiece (tokenizer.model)",
}
#: Ids without a word that are no matter, beside as many as there are words.
_HOLES: Final = 1000


def read_recipe(
    path: Path, *, lowercase: bool | None = None, strip_accents: bool | None = None
) -> Recipe:
    """Read a tokenizer from its directory, or from one file (tokenizer.json or vocab.txt).

    A bare vocab.txt does not say how text is to be cleaned: unless asked for here, it is lowered
    if no word of the vocabulary has a capital letter, and accents stay, so that Hangul is whole;
    but a vocabulary that holds Hangul in jamo only, as the original's uncased one does, is read
    as the original reads it.
    Raises TokenizerError for a path without a tokenizer, a broken one, or one of another kind.
    """
    directory = path if path.is_dir() else path.parent
    file = _tokenizer_file(path)
    try:
        if file.suffix == ".json":
            recipe = _from_json(file)
        else:
            recipe = _from_vocab(file, directory / CONFIG, lowercase, strip_accents)
    except TokenizerError as error:
        # A recipe that cannot be does not know its file.
        known = any(str(one) in str(error) for one in (file, directory / CONFIG))
        raise error if known else TokenizerError(f"{file}: {error}") from None
    segmenter = _segmenter(directory / OWN)
    return _with(recipe, segmenter=segmenter) if segmenter else recipe


def write_recipe(recipe: Recipe, directory: Path, longest: int | None = None) -> None:
    """Write tokenizer.json, vocab.txt, tokenizer_config.json and the key in bertsmith.json.

    ``longest``: the longest sequence, in tokens, that the model beside it takes, if known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / TOKENIZER, engine(recipe).to_str(pretty=True) + "\n")
    write_whole(directory / VOCAB, "".join(f"{word}\n" for word in recipe.vocab))
    # AutoTokenizer builds a BertTokenizer anew from these flags; only the plain class keeps the
    # normalizer of tokenizer.json, which the flags cannot describe.
    plain = recipe.strip_accents and recipe.whole_hangul
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if plain else "BertTokenizer",
        "do_lower_case": recipe.lowercase,
        "strip_accents": recipe.strip_accents,
        "tokenize_chinese_chars": recipe.split_chinese,
        "pad_token": PAD,
        "unk_token": UNK,
        "cls_token": CLS,
        "sep_token": SEP,
        "mask_token": MASK,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    if longest is not None:
        config["model_max_length"] = longest
    write_json(directory / CONFIG, config)
    own = _json(directory / OWN) if (directory / OWN).is_file() else {}
    own["tokenizer"] = {"hash": recipe.fingerprint(), "words": len(recipe.vocab)}
    if recipe.segmenter:
        name, version = recipe.segmenter
        own["tokenizer"]["segmenter"] = {"name": name, "version": version}
    write_json(directory / OWN, own)


def _segmenter(path: Path) -> tuple[str, str] | None:
    """Return name and version of the segmenter that this package's own file names, if any."""
    own = _table(_json(path), "tokenizer", path) if path.is_file() else {}
    said = _table(own, "segmenter", path)
    if not said:
        return None
    if not {"name", "version"} <= said.keys():
        raise TokenizerError(f"{path}: found the segmenter {said}; expected a name and a version")
    return str(said["name"]), str(said["version"])


def _with(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe(**(vars(recipe) | changes))


def _tokenizer_file(path: Path) -> Path:
    """Return the file that holds the vocabulary."""
    if path.is_file():
        return path
    if not path.exists():
        raise TokenizerError(f"{path}: no such tokenizer; make one with: bertsmith vocab")
    for name in (TOKENIZER, VOCAB):
        if (path / name).is_file():
            return path / name
    foreign = [what for name, what in FOREIGN.items() if (path / name).is_file()]
    found = f"a tokenizer of another kind, {foreign[0]}" if foreign else "no tokenizer"
    raise TokenizerError(
        f"{path}: found {found}; expected {TOKENIZER} or {VOCAB}, as bertsmith vocab writes them"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found a JSON {type(value).__name__}, expected an object")
    return value


def _table(values: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object at ``key``, an empty one if there is none."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: found {value!r} at {key!r}; expected an object")
    return value


def _from_vocab(
    path: Path, config: Path, lowercase: bool | None, strip_accents: bool | None
) -> Recipe:
    vocab = _words(path)
    said = _json(config) if config.is_file() else {}
    if lowercase is None:
        lowercase = _flag(said, "do_lower_case", config)
    if lowercase is None:
        lowercase = all(word == word.lower() for word in vocab if word not in SPECIAL)
    whole = True
    if strip_accents is None and not said and lowercase and _in_jamo(vocab):
        strip_accents, whole = True, False
    if strip_accents is None and said:
        # The file says it in the terms of the original, where accents follow the case.
        strip_accents = _flag(said, "strip_accents", config)
        strip_accents, whole = lowercase if strip_accents is None else strip_accents, False
    split_chinese = _flag(said, "tokenize_chinese_chars", config)
    return Recipe(
        vocab=vocab,
        lowercase=lowercase,
        strip_accents=bool(strip_accents),
        whole_hangul=whole or not strip_accents,
        split_chinese=True if split_chinese is None else split_chinese,
    )


def _flag(values: Mapping[str, Any], key: str, path: Path) -> bool | None:
    """Return a switch, None where it is not there or left open."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"{path}: {key} is {value!r}; expected true, false or null")
    return value


def _in_jamo(vocab: tuple[str, ...]) -> bool:
    """Tell whether the words were learnt after NFD: jamo are there, nothing composed is."""
    text = "".join(vocab)
    jamo = any("\u1100" <= character <= "\u1112" for character in text)
    return jamo and unicodedata.is_normalized("NFD", text)


def _words(path: Path) -> tuple[str, ...]:
    """Read a word a line; the line decides the id, whatever is repeated or empty above it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path}: not UTF-8 at byte {error.start:,}; expected a word on each line"
        ) from None
    return tuple(word.strip() for word in text.rstrip().split("\n"))


def _from_json(path: Path) -> Recipe:
    file = _json(path)
    model = _table(file, "model", path)
    kind = model.get("type") or ("WordPiece" if "max_input_chars_per_word" in model else "unknown")
    if kind != "WordPiece":
        raise TokenizerError(f"{path}: found a {kind} tokenizer; expected WordPiece, as BERT has")
    _expect(path, "continuing prefix", model.get("continuing_subword_prefix"), CONTINUES)
    _expect(path, "unknown token", model.get("unk_token"), UNK)
    splitter = _table(file, "pre_tokenizer", path).get("type")
    _expect(path, "pre-tokenizer", splitter, "BertPreTokenizer")
    vocab = _in_order(_table(model, "vocab", path), path)
    _check_added(file.get("added_tokens") or [], vocab, path)
    choices = _choices(_table(file, "normalizer", path), path)
    longest = model.get("max_input_chars_per_word", 100)
    if type(longest) is not int or not 0 < longest < 2**31:
        raise TokenizerError(f"{path}: max_input_chars_per_word is {longest!r}; expected a number")
    return Recipe(vocab=vocab, longest_word=longest, **choices)


def _expect(path: Path, what: str, found: object, expected: str) -> None:
    if found != expected:
        raise TokenizerError(f"{path}: found {what} {found!r}; expected {expected!r}, as BERT has")


def _in_order(ids: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the words in the order of their ids; ids that no word has come from vocab.txt."""
    if not ids:
        raise TokenizerError(f"{path}: the vocabulary is empty")
    strange = next((own for own in ids.items() if type(own[1]) is not int or own[1] < 0), None)
    if strange is not None:
        raise TokenizerError(f"{path}: the word {strange[0]!r} has the id {strange[1]!r}")
    if len(set(ids.values())) != len(ids):
        raise TokenizerError(f"{path}: two words have the same id; expected one each")
    beside, last = path.with_name(VOCAB), max(ids.values())
    lines = _words(beside) if beside.is_file() else ()
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


def _check_added(added: Any, vocab: tuple[str, ...], path: Path) -> None:
    known = set(vocab)
    named = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) for token in added
    )
    if not named:
        raise TokenizerError(f"{path}: added_tokens is no list of tokens with their content")
    strange = [token["content"] for token in added if token["content"] not in known]
    # A special token that is missing is told with the vocabulary.
    strange = [content for content in strange if content not in SPECIAL]
    if strange:
        raise TokenizerError(
            f"{path}: found tokens added outside the vocabulary: {', '.join(strange[:5])}; "
            f"expected only {' '.join(SPECIAL)}"
        )


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
