"""Reads and writes a tokenizer's files, in the formats of Hugging Face and the original BERT."""

import unicodedata
from collections.abc import Mapping
from dataclasses import replace
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

TOKENIZER_FILE = "tokenizer.json"
VOCAB_FILE = "vocab.txt"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
#: File with the ids of added tokens, in tokenizers that are older than tokenizer.json.
_ADDED_TOKENS_FILE: Final = "added_tokens.json"
#: File for properties that Hugging Face's files cannot express.
BERTSMITH_FILE: Final = "bertsmith.json"
#: Files of tokenizers that are not WordPiece, with the type of tokenizer for the error message.
_UNSUPPORTED_FILES: Final = {
    "merges.txt": "byte-pair encoding (merges.txt)",
    "spiece.model": "SentencePiece (spiece.model)",
    "sentencepiece.bpe.model": "SentencePiece (sentencepiece.bpe.model)",
    "tokenizer.model": "SentencePiece (tokenizer.model)",
}


def read_tokenizer_spec(
    path: Path, *, lowercase: bool | None = None, strip_accents: bool | None = None
) -> TokenizerSpec:
    """Read a tokenizer from its directory, or from a tokenizer.json or vocab.txt.

    A vocab.txt without tokenizer_config.json does not say how text is normalized. By default, text
    is lowercased if no word of the vocabulary has a capital letter. Accents are kept, so that
    Hangul stays composed. But if a lowercase vocabulary contains Hangul only as jamo, like the
    vocabulary of the original uncased BERT, accents are stripped as in the original code.

    Args:
        path: Directory or file.
        lowercase: Whether text is lowercased; only used for a vocab.txt. None for the default
            described above.
        strip_accents: Whether accents are stripped; only used for a vocab.txt. None for the
            default described above.

    Raises:
        TokenizerError: There is no tokenizer, its files are damaged, or it is not WordPiece.
    """
    directory = path if path.is_dir() else path.parent
    file = _find_tokenizer_file(path)
    try:
        if file.suffix == ".json":
            vocab_file = file.with_name(VOCAB_FILE)
            vocab_lines = _read_vocab_lines(vocab_file) if vocab_file.is_file() else ()
            spec = parse_tokenizer_json(file, vocab_lines)
            spec = _replace_normalization(spec, directory / TOKENIZER_CONFIG_FILE)
        else:
            config = directory / TOKENIZER_CONFIG_FILE
            spec = _read_vocab_txt(file, config, lowercase, strip_accents)
    except TokenizerError as error:
        message = str(error)
        if str(file) in message or str(directory / TOKENIZER_CONFIG_FILE) in message:
            raise error from None
        # An error raised by TokenizerSpec does not name the file.
        raise TokenizerError(f"{file}: {message}") from None
    segmenter = _read_segmenter(directory / BERTSMITH_FILE)
    return replace(spec, segmenter=segmenter) if segmenter else spec


def write_tokenizer_spec(
    spec: TokenizerSpec, directory: Path, max_length: int | None = None
) -> None:
    """Write tokenizer.json, vocab.txt, tokenizer_config.json and an entry in bertsmith.json.

    Args:
        spec: The tokenizer.
        directory: Where to write the files.
        max_length: Maximum sequence length of the model, in tokens; None if unknown.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / TOKENIZER_FILE, build_backend(spec).to_str(pretty=True) + "\n")
    write_atomic(directory / VOCAB_FILE, "".join(f"{word}\n" for word in spec.vocab))
    write_json(directory / TOKENIZER_CONFIG_FILE, _build_tokenizer_config(spec, max_length))
    bertsmith_file = directory / BERTSMITH_FILE
    entries = read_json_object(bertsmith_file) if bertsmith_file.is_file() else {}
    entries["tokenizer"] = {"hash": spec.fingerprint(), "words": len(spec.tokens)}
    if spec.segmenter:
        name, version = spec.segmenter
        entries["tokenizer"]["segmenter"] = {"name": name, "version": version}
    write_json(bertsmith_file, entries)


def _build_tokenizer_config(spec: TokenizerSpec, max_length: int | None) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; see ``write_tokenizer_spec``."""
    # AutoTokenizer builds a BertTokenizer from the options below, and no option recomposes Hangul.
    # Only PreTrainedTokenizerFast uses the normalizer of tokenizer.json.
    recomposes_hangul = spec.strip_accents and spec.keep_hangul_syllables
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if recomposes_hangul else "BertTokenizer",
        "do_lower_case": spec.lowercase,
        "strip_accents": spec.strip_accents,
        "tokenize_chinese_chars": spec.split_chinese,
        "pad_token": PAD,
        "unk_token": UNK,
        "cls_token": CLS,
        "sep_token": SEP,
        "mask_token": MASK,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    if spec.added:
        ids = index_vocabulary(spec.tokens)
        special_tokens = (
            AddedTokenSpec(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        )
        config["added_tokens_decoder"] = {
            str(ids[token.content]): token._asdict() for token in (*special_tokens, *spec.added)
        }
    return config


def _read_segmenter(path: Path) -> tuple[str, str] | None:
    """Return the name and version of the segmenter in bertsmith.json; None if it has none."""
    tokenizer = get_object(read_json_object(path), "tokenizer", path) if path.is_file() else {}
    segmenter = get_object(tokenizer, "segmenter", path)
    if not segmenter:
        return None
    if not {"name", "version"} <= segmenter.keys():
        raise TokenizerError(
            f"{path}: found the segmenter {segmenter}; expected an object with name and version"
        )
    return str(segmenter["name"]), str(segmenter["version"])


def find_vocabulary_file(path: Path) -> Path | None:
    """Return the tokenizer.json or vocab.txt at or in ``path``; None if there is none."""
    candidates = (path, path / TOKENIZER_FILE, path / VOCAB_FILE)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _find_tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json or vocab.txt at or in ``path``; raise TokenizerError if missing."""
    if not path.exists():
        raise TokenizerError(f"{path}: no such tokenizer; make one with: bertsmith vocab")
    file = find_vocabulary_file(path)
    if file is not None:
        return file
    other_kinds = [kind for name, kind in _UNSUPPORTED_FILES.items() if (path / name).is_file()]
    finding = f"a tokenizer of another kind, {other_kinds[0]}" if other_kinds else "no tokenizer"
    raise TokenizerError(
        f"{path}: found {finding}; expected {TOKENIZER_FILE} or {VOCAB_FILE}, "
        "as bertsmith vocab writes them"
    )


def _replace_normalization(spec: TokenizerSpec, config_file: Path) -> TokenizerSpec:
    """Return the tokenizer with the options in tokenizer_config.json, if it names BERT's class.

    transformers' BertTokenizer reads only the vocabulary from tokenizer.json. The two files may
    contradict each other, for example after one of them was edited.
    """
    config = read_json_object(config_file) if config_file.is_file() else {}
    if config.get("tokenizer_class") not in ("BertTokenizer", "BertTokenizerFast"):
        return spec
    lowercase = get_bool(config, "do_lower_case", config_file)
    strip_accents = get_bool(config, "strip_accents", config_file)
    split_chinese = get_bool(config, "tokenize_chinese_chars", config_file)
    if lowercase is None:
        lowercase = spec.lowercase
    if strip_accents is None:
        # As in the original code, null means that accents are stripped if text is lowercased.
        is_unchanged = "strip_accents" not in config and lowercase == spec.lowercase
        strip_accents = spec.strip_accents if is_unchanged else lowercase
    recomposes_hangul = spec.strip_accents and spec.keep_hangul_syllables
    return replace(
        spec,
        lowercase=lowercase,
        strip_accents=strip_accents,
        keep_hangul_syllables=recomposes_hangul or not strip_accents,
        split_chinese=spec.split_chinese if split_chinese is None else split_chinese,
    )


def _read_vocab_txt(
    path: Path, config_file: Path, lowercase: bool | None, strip_accents: bool | None
) -> TokenizerSpec:
    """Read a vocab.txt, with the options of a tokenizer_config.json if there is one."""
    vocab = _read_vocab_lines(path)
    config = read_json_object(config_file) if config_file.is_file() else {}
    if lowercase is None:
        lowercase = get_bool(config, "do_lower_case", config_file)
    if lowercase is None:
        lowercase = all(word == word.lower() for word in vocab if word not in SPECIAL_TOKENS)
    keep_hangul_syllables = True
    if strip_accents is None and config:
        # As in the original code, accents are stripped if text is lowercased, unless the file says
        # otherwise, and Hangul is not recomposed.
        configured = get_bool(config, "strip_accents", config_file)
        strip_accents = lowercase if configured is None else configured
        keep_hangul_syllables = False
    elif strip_accents is None and lowercase and _has_only_jamo(vocab):
        strip_accents = True
        keep_hangul_syllables = False
    split_chinese = get_bool(config, "tokenize_chinese_chars", config_file)
    return TokenizerSpec(
        vocab=vocab,
        added=_read_added_tokens(config_file, config, vocab),
        lowercase=lowercase,
        strip_accents=bool(strip_accents),
        keep_hangul_syllables=keep_hangul_syllables or not strip_accents,
        split_chinese=True if split_chinese is None else split_chinese,
    )


def _read_added_tokens(
    config_file: Path, config: Mapping[str, Any], vocab: tuple[str, ...]
) -> tuple[AddedTokenSpec, ...]:
    """Return the added tokens in tokenizer_config.json or added_tokens.json, ordered by id."""
    decoder = get_object(config, "added_tokens_decoder", config_file)
    old_file = config_file.with_name(_ADDED_TOKENS_FILE)
    if not decoder and old_file.is_file():
        ids = read_json_object(old_file)
        tokens = [{"content": content, "id": token_id} for content, token_id in ids.items()]
        return parse_added_tokens(tokens, vocab, old_file)
    tokens = [
        {**token, "id": int(key) if key.isdecimal() else key}
        for key, token in decoder.items()
        if isinstance(token, dict)
    ]
    is_valid = len(tokens) == len(decoder)
    return parse_added_tokens(tokens if is_valid else None, vocab, config_file)


def _has_only_jamo(vocab: tuple[str, ...]) -> bool:
    """Return whether the vocabulary has jamo but no composed character, as after NFD."""
    text = "".join(vocab)
    has_jamo = any("\u1100" <= character <= "\u1112" for character in text)
    return has_jamo and unicodedata.is_normalized("NFD", text)


def _read_vocab_lines(path: Path) -> tuple[str, ...]:
    """Read one word per line, including repeated and empty ones: the line number is the id."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path}: not UTF-8 at byte {error.start:,}; expected a word on each line"
        ) from None
    return tuple(word.strip() for word in text.rstrip().split("\n"))
