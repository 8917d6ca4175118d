"""Reads and writes a tokenizer's files, in the formats of Hugging Face and the original BERT."""

import re
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
    DEFAULT_MAX_WORD_CHARS,
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
#: File with the special tokens, which transformers only reads without ``added_tokens_decoder``.
_SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
#: Keys with special tokens in addition to BERT's: the current one and the older one.
_EXTRA_KEY, _OLD_EXTRA_KEY = "extra_special_tokens", "additional_special_tokens"
#: Keys with one special token each that BERT does not have.
_SENTENCE_KEYS: Final = ("bos_token", "eos_token")
#: File for properties that Hugging Face's files cannot express.
BERTSMITH_FILE: Final = "bertsmith.json"
#: A model's config, which determines how transformers reads the tokenizer in the same directory.
_MODEL_CONFIG_FILE: Final = "config.json"
#: Classes of transformers, without the suffix "Fast", that build BERT's tokenizer from a vocabulary
#: and the options in tokenizer_config.json.
_BERT_CLASSES: Final = frozenset(
    {
        "BertTokenizer", "ConvBertTokenizer", "DistilBertTokenizer", "DPRContextEncoderTokenizer",
        "DPRQuestionEncoderTokenizer", "DPRReaderTokenizer", "ElectraTokenizer",
        "LayoutLMTokenizer", "LxmertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer",
    }
)  # fmt: skip
#: Classes of transformers, without the suffix "Fast", that follow tokenizer.json.
_GENERIC_CLASSES: Final = frozenset({"PreTrainedTokenizer", "PythonBackend", "TokenizersBackend"})
#: Options of tokenizer_config.json that select the steps of a tokenizer, and the values for BERT's.
_TOKENIZER_TYPES: Final = {
    "word_tokenizer_type": "basic",
    "subword_tokenizer_type": "wordpiece",
}
#: Tokens such as [MASK], [unused0] and [URL], which text does not contain.
_PLACEHOLDER: Final = re.compile(r"\[.+\]")
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
    Hangul stays composed. But accents are stripped as in the original code if a lowercase
    vocabulary contains neither accented letters nor Hangul syllables, and either contains jamo,
    like the vocabulary of the original uncased BERT, or is in a model directory.

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
    has_bert_class = _read_tokenizer_class(directory) in _BERT_CLASSES
    try:
        if file.suffix == ".json":
            vocab_file = file.with_name(VOCAB_FILE)
            vocab_lines = _read_vocab_lines(vocab_file) if vocab_file.is_file() else ()
            spec = parse_tokenizer_json(file, vocab_lines)
            spec = _add_tokens_of_other_files(spec, directory / TOKENIZER_CONFIG_FILE)
            if has_bert_class:
                spec = _replace_options(spec, directory / TOKENIZER_CONFIG_FILE)
        else:
            _check_no_other_tokenizer(file)
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
    # AutoTokenizer builds a BertTokenizer from the options below, and no option recomposes Hangul
    # or sets the length of a word. Only PreTrainedTokenizerFast follows tokenizer.json.
    recomposes_hangul = spec.strip_accents and spec.keep_hangul_syllables
    is_plain_bert = not recomposes_hangul and spec.max_word_chars == DEFAULT_MAX_WORD_CHARS
    config: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer" if is_plain_bert else "PreTrainedTokenizerFast",
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


def _check_no_other_tokenizer(vocab_file: Path) -> None:
    """Raise TokenizerError if a SentencePiece model is in the folder of a vocab.txt."""
    names = {file.name for file in vocab_file.parent.glob("tokenizer*.model")}
    names |= {name for name in _UNSUPPORTED_FILES if name.endswith(".model")}
    for name in sorted(names):
        if vocab_file.with_name(name).is_file():
            raise TokenizerError(
                f"{vocab_file}: found next to it a tokenizer of another kind, SentencePiece "
                f"({name}); expected {VOCAB_FILE} of a WordPiece tokenizer; use another model"
            )


def _read_optional_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    return read_json_object(path) if path.is_file() else {}


def _read_tokenizer_class(directory: Path) -> str | None:
    """Return the class with which transformers reads a tokenizer, without the suffix "Fast".

    Returns:
        The class in tokenizer_config.json, or else in config.json, or else the default of a BERT;
        None if none of them specifies it.

    Raises:
        TokenizerError: The files describe a tokenizer that is not WordPiece.
    """
    config_file = directory / TOKENIZER_CONFIG_FILE
    model_config_file = directory / _MODEL_CONFIG_FILE
    config, model_config = map(_read_optional_json, (config_file, model_config_file))
    class_name = "BertTokenizer" if model_config.get("model_type") == "bert" else None
    for path, values in ((config_file, config), (model_config_file, model_config)):
        name = values.get("tokenizer_class")
        if name is None:
            continue
        class_name = str(name).removesuffix("Fast")
        if class_name not in _BERT_CLASSES | _GENERIC_CLASSES:
            raise TokenizerError(
                f"{path}: tokenizer_class is {name!r}; expected BertTokenizer or another class "
                "with the same WordPiece tokenizer; use another model"
            )
        break
    for key, expected in _TOKENIZER_TYPES.items():
        if config.get(key) not in (None, expected):
            raise TokenizerError(
                f"{config_file}: {key} is {config[key]!r}; expected {expected!r}, as BERT has; use "
                "another model"
            )
    return class_name


def _add_tokens_of_other_files(spec: TokenizerSpec, config_file: Path) -> TokenizerSpec:
    """Return the tokenizer with the added tokens that tokenizer.json does not have.

    transformers adds the tokens of tokenizer_config.json, special_tokens_map.json and
    added_tokens.json to those of tokenizer.json.
    """
    names = {token.content for token in spec.added}
    config = _read_optional_json(config_file)
    tokens = _read_added_tokens(config_file, config, spec.tokens, uses_ids=False)
    return replace(
        spec, added=spec.added + tuple(token for token in tokens if token.content not in names)
    )


def _replace_options(spec: TokenizerSpec, config_file: Path) -> TokenizerSpec:
    """Return the tokenizer with the options in tokenizer_config.json.

    transformers' BertTokenizer reads only the vocabulary from tokenizer.json. The two files may
    contradict each other, for example after one of them was edited.
    """
    config = _read_optional_json(config_file)
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
        max_word_chars=DEFAULT_MAX_WORD_CHARS,
    )


def _read_vocab_txt(
    path: Path, config_file: Path, lowercase: bool | None, strip_accents: bool | None
) -> TokenizerSpec:
    """Read a vocab.txt, with the options of a tokenizer_config.json if there is one."""
    vocab = _read_vocab_lines(path)
    config = _read_optional_json(config_file)
    if lowercase is None:
        lowercase = get_bool(config, "do_lower_case", config_file)
    if lowercase is None:
        lowercase = all(word == word.lower() for word in vocab if not _PLACEHOLDER.fullmatch(word))
    keep_hangul_syllables = True
    if strip_accents is None and config:
        # As in the original code, accents are stripped if text is lowercased, unless the file says
        # otherwise, and Hangul is not recomposed.
        configured = get_bool(config, "strip_accents", config_file)
        strip_accents = lowercase if configured is None else configured
        keep_hangul_syllables = False
    elif strip_accents is None and lowercase and _is_decomposed(vocab):
        # transformers strips accents for each uncased BERT without tokenizer_config.json.
        is_model = path.with_name(_MODEL_CONFIG_FILE).is_file()
        strip_accents = is_model or _has_jamo(vocab)
        keep_hangul_syllables = not strip_accents
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
    config_file: Path, config: Mapping[str, Any], vocab: tuple[str, ...], *, uses_ids: bool = True
) -> tuple[AddedTokenSpec, ...]:
    """Return the added tokens and extra special tokens in files other than tokenizer.json.

    Added tokens are in tokenizer_config.json or added_tokens.json, and are ordered by id. Extra
    special tokens, which follow, have no id in the files. As they have no embedding otherwise, only
    those in the vocabulary are returned.

    Args:
        config_file: The tokenizer_config.json.
        config: Its content.
        vocab: The vocabulary.
        uses_ids: Whether a wrong id of an added token is an error. Otherwise, the ids only order
            the tokens, as in transformers if there is a tokenizer.json.
    """
    decoder = get_object(config, "added_tokens_decoder", config_file)
    old_file = config_file.with_name(_ADDED_TOKENS_FILE)
    if not decoder and old_file.is_file():
        ids = read_json_object(old_file)
        special_names = _list_special_names(config_file, config)
        tokens = [
            {
                "content": content,
                "id": token_id,
                "special": content in special_names,
                "normalized": content not in special_names,
            }
            for content, token_id in ids.items()
        ]
        added = parse_added_tokens(tokens if uses_ids else _drop_ids(tokens), vocab, old_file)
    else:
        tokens = [
            {**token, "id": int(key) if key.isdecimal() else key}
            for key, token in decoder.items()
            if isinstance(token, dict)
        ]
        is_valid = len(tokens) == len(decoder)
        tokens = tokens if uses_ids else _drop_ids(tokens)
        added = parse_added_tokens(tokens if is_valid else None, vocab, config_file)
    special_tokens = parse_added_tokens(
        _list_extra_special_tokens(config_file, config), vocab, config_file
    )
    names = set(vocab) - {token.content for token in added}
    return added + tuple(token for token in special_tokens if token.content in names)


def _drop_ids(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tokens in the order of their ids, without the ids."""
    if all(type(token["id"]) is int for token in tokens):
        tokens = sorted(tokens, key=lambda token: int(token["id"]))
    return [{name: value for name, value in token.items() if name != "id"} for token in tokens]


def _list_extra_special_tokens(config_file: Path, config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens other than BERT's in the form of ``parse_added_tokens``.

    As in transformers, special_tokens_map.json is only used without ``added_tokens_decoder``.
    """
    tokens = _list_tokens(config.get(_EXTRA_KEY) or config.get(_OLD_EXTRA_KEY))
    sentence_tokens = [config[key] for key in _SENTENCE_KEYS if config.get(key)]
    if "added_tokens_decoder" not in config:
        special_tokens = _read_optional_json(config_file.with_name(_SPECIAL_TOKENS_FILE))
        tokens += _list_tokens(special_tokens.get(_EXTRA_KEY))
        tokens = tokens or _list_tokens(special_tokens.get(_OLD_EXTRA_KEY))
        sentence_tokens += [
            special_tokens[key] for key in _SENTENCE_KEYS if special_tokens.get(key)
        ]
    tokens += sentence_tokens
    objects = [{"content": token} if isinstance(token, str) else token for token in tokens]
    unique = {
        str(token.get("content")): {"normalized": False, **token, "special": True}
        for token in objects
        if isinstance(token, dict)
    }
    return [*unique.values(), *(token for token in objects if not isinstance(token, dict))]


def _list_special_names(config_file: Path, config: Mapping[str, Any]) -> set[str]:
    """Return the tokens that transformers makes special if they are in added_tokens.json.

    As in transformers, tokens of ``additional_special_tokens`` in special_tokens_map.json are not
    among them.
    """
    special_tokens = _read_optional_json(config_file.with_name(_SPECIAL_TOKENS_FILE))
    values: list[Any] = [
        file.get(key) for file in (config, special_tokens) for key in _SENTENCE_KEYS
    ]
    for value in (
        config.get(_EXTRA_KEY) or config.get(_OLD_EXTRA_KEY),
        special_tokens.get(_EXTRA_KEY),
    ):
        values += value if isinstance(value, list) else []
    return {value for value in values if isinstance(value, str)}


def _list_tokens(value: Any) -> list[Any]:
    """Return the tokens in a list, or in an object that maps names to tokens."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _is_decomposed(vocab: tuple[str, ...]) -> bool:
    """Return whether the vocabulary has no composed letter, as after NFD."""
    letters = filter(str.isalpha, set("".join(vocab)))
    return all(unicodedata.is_normalized("NFD", letter) for letter in letters)


def _has_jamo(vocab: tuple[str, ...]) -> bool:
    """Return whether the vocabulary has leading consonants of Hangul."""
    return any("\u1100" <= character <= "\u1112" for word in vocab for character in word)


def _read_vocab_lines(path: Path) -> tuple[str, ...]:
    """Read one word per line, including repeated and empty ones: the line number is the id."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path}: not UTF-8 at byte {error.start:,}; expected a word on each line"
        ) from None
    return tuple(word.strip() for word in text.rstrip().split("\n"))
