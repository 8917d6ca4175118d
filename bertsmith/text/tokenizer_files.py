"""Reads and writes a tokenizer's files, as this package, Hugging Face and the original do.

It never knows a text.
"""

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import TokenizerError
from bertsmith.files import write_atomic, write_json
from bertsmith.text.tokenizer_json import (
    get_bool,
    get_object,
    parse_added_tokens,
    parse_tokenizer_json,
    read_json_object,
)
from bertsmith.text.tokenizer_spec import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    UNK,
    AddedTokenSpec,
    TokenizerSpec,
    build_backend,
    index_vocabulary,
)

TOKENIZER_FILE, VOCAB_FILE, TOKENIZER_CONFIG_FILE = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
)
#: Where releases before tokenizer.json kept the ids of added tokens.
_ADDED: Final = "added_tokens.json"
#: Where this package writes what the files above cannot say.
BERTSMITH_FILE: Final = "bertsmith.json"
#: Files by which tokenizers of other kinds are known, to name them when they are refused.
FOREIGN: Final = {
    "merges.txt": "byte-pair encoding (merges.txt)",
    "spiece.model": "SentencePiece (spiece.model)",
    "sentencepiece.bpe.model": "SentencePiece (sentencepiece.bpe.model)",
    "tokenizer.model": "SentencePiece (tokenizer.model)",
}


def read_tokenizer_spec(
    path: Path, *, lowercase: bool | None = None, strip_accents: bool | None = None
) -> TokenizerSpec:
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
            beside = file.with_name(VOCAB_FILE)
            recipe = parse_tokenizer_json(file, _words(beside) if beside.is_file() else ())
        else:
            recipe = _from_vocab(file, directory / TOKENIZER_CONFIG_FILE, lowercase, strip_accents)
    except TokenizerError as error:
        # A recipe that cannot be does not know its file.
        known = any(str(one) in str(error) for one in (file, directory / TOKENIZER_CONFIG_FILE))
        raise error if known else TokenizerError(f"{file}: {error}") from None
    segmenter = _segmenter(directory / BERTSMITH_FILE)
    return _with(recipe, segmenter=segmenter) if segmenter else recipe


def write_tokenizer_spec(
    recipe: TokenizerSpec, directory: Path, max_length: int | None = None
) -> None:
    """Write tokenizer.json, vocab.txt, tokenizer_config.json and the key in bertsmith.json.

    ``max_length``: the longest sequence, in tokens, that the model beside it takes, if known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / TOKENIZER_FILE, build_backend(recipe).to_str(pretty=True) + "\n")
    write_atomic(directory / VOCAB_FILE, "".join(f"{word}\n" for word in recipe.vocab))
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
    if max_length is not None:
        config["model_max_length"] = max_length
    if recipe.added:
        ids = index_vocabulary(recipe.words)
        config["added_tokens_decoder"] = {
            str(ids[own.content]): own._asdict()
            for own in (*(AddedTokenSpec(token, special=True, normalized=False) for token in SPECIAL_TOKENS),
                        *recipe.added)
        }  # fmt: skip
    write_json(directory / TOKENIZER_CONFIG_FILE, config)
    own = (
        read_json_object(directory / BERTSMITH_FILE)
        if (directory / BERTSMITH_FILE).is_file()
        else {}
    )
    own["tokenizer"] = {"hash": recipe.fingerprint(), "words": len(recipe.words)}
    if recipe.segmenter:
        name, version = recipe.segmenter
        own["tokenizer"]["segmenter"] = {"name": name, "version": version}
    write_json(directory / BERTSMITH_FILE, own)


def _segmenter(path: Path) -> tuple[str, str] | None:
    """Return name and version of the segmenter that this package's own file names, if any."""
    own = get_object(read_json_object(path), "tokenizer", path) if path.is_file() else {}
    said = get_object(own, "segmenter", path)
    if not said:
        return None
    if not {"name", "version"} <= said.keys():
        raise TokenizerError(f"{path}: found the segmenter {said}; expected a name and a version")
    return str(said["name"]), str(said["version"])


def _with(recipe: TokenizerSpec, **changes: Any) -> TokenizerSpec:
    return TokenizerSpec(**(vars(recipe) | changes))


def find_vocabulary_file(path: Path) -> Path | None:
    """Return the file that holds the vocabulary: the path itself or one in it; None without any."""
    places = (path, path / TOKENIZER_FILE, path / VOCAB_FILE)
    return next((place for place in places if place.is_file()), None)


def _tokenizer_file(path: Path) -> Path:
    """Return the file that holds the vocabulary."""
    if not path.exists():
        raise TokenizerError(f"{path}: no such tokenizer; make one with: bertsmith vocab")
    if (file := find_vocabulary_file(path)) is not None:
        return file
    foreign = [what for name, what in FOREIGN.items() if (path / name).is_file()]
    found = f"a tokenizer of another kind, {foreign[0]}" if foreign else "no tokenizer"
    raise TokenizerError(
        f"{path}: found {found}; expected {TOKENIZER_FILE} or {VOCAB_FILE}, as bertsmith vocab writes them"
    )


def _from_vocab(
    path: Path, config: Path, lowercase: bool | None, strip_accents: bool | None
) -> TokenizerSpec:
    vocab = _words(path)
    said = read_json_object(config) if config.is_file() else {}
    if lowercase is None:
        lowercase = get_bool(said, "do_lower_case", config)
    if lowercase is None:
        lowercase = all(word == word.lower() for word in vocab if word not in SPECIAL_TOKENS)
    whole = True
    if strip_accents is None and not said and lowercase and _in_jamo(vocab):
        strip_accents, whole = True, False
    if strip_accents is None and said:
        # The file says it in the terms of the original, where accents follow the case.
        strip_accents = get_bool(said, "strip_accents", config)
        strip_accents, whole = lowercase if strip_accents is None else strip_accents, False
    split_chinese = get_bool(said, "tokenize_chinese_chars", config)
    return TokenizerSpec(
        vocab=vocab,
        added=_added_beside(config, said, vocab),
        lowercase=lowercase,
        strip_accents=bool(strip_accents),
        whole_hangul=whole or not strip_accents,
        split_chinese=True if split_chinese is None else split_chinese,
    )


def _added_beside(
    config: Path, said: Mapping[str, Any], vocab: tuple[str, ...]
) -> tuple[AddedTokenSpec, ...]:
    """Return the tokens that were added to a vocab.txt, in the order of their ids."""
    told, older = get_object(said, "added_tokens_decoder", config), config.with_name(_ADDED)
    if not told and older.is_file():
        ids = read_json_object(older)
        return parse_added_tokens([{"content": one, "id": ids[one]} for one in ids], vocab, older)
    listed = [{**own, "id": int(key) if key.isdecimal() else key}
              for key, own in told.items() if isinstance(own, dict)]  # fmt: skip
    return parse_added_tokens(listed if len(listed) == len(told) else None, vocab, config)


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
