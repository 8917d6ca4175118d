"""Locating and reading of the checkpoint, config and vocabulary of an original BERT release."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from bertsmith.bundle.config import HF_FIELD_NAMES, check_required_keys, read_json
from bertsmith.bundle.directory import locate_model
from bertsmith.bundle.metadata import read_metadata
from bertsmith.errors import ModelError, SettingsError
from bertsmith.interop.tensorflow.arrays import Array
from bertsmith.interop.tensorflow.checkpoint_v1 import CheckpointV1
from bertsmith.interop.tensorflow.checkpoint_v2 import INDEX_SUFFIX, CheckpointV2
from bertsmith.interop.tensorflow.sstable import is_table
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, VOCAB_FILE
from bertsmith.text.wordpiece import Tokenizer

CONFIG_FILE: Final = "bert_config.json"
#: ``ModelConfig`` field -> key of bert_config.json. Hugging Face's config.json has the same keys,
#: and the epsilon of LayerNorm.
_ORIGINAL_FIELDS: Final = {
    field: key for field, key in HF_FIELD_NAMES.items() if field != "norm_eps"
}
#: ``ModelConfig.activation`` -> value of hidden_act in bert_config.json. The original BERT calls
#: the tanh form of GELU "gelu".
_ORIGINAL_ACTIVATIONS: Final = {"gelu_tanh": "gelu", "relu": "relu"}
#: The epsilon of LayerNorm, which bert_config.json does not contain. It is the default of
#: tf.contrib.layers.layer_norm.
_NORM_EPS: Final = 1e-12
#: The default of type_vocab_size in the original code (BertConfig).
_DEFAULT_SEGMENTS: Final = 16
#: Parts of folder names, and whether text is lowercased for models in such folders. The first match
#: counts, as in the original code (tokenization.py, validate_case_matches_checkpoint).
_CASE_BY_FOLDER_NAME: Final = (
    ("uncased", True), ("cased", False), ("multilingual_L", True), ("chinese_L", True),
)  # fmt: skip


class Checkpoint(Protocol):
    """An open checkpoint in any format."""

    path: Path
    format_name: str
    shapes: dict[str, tuple[int, ...]]

    def check_data(self, names: list[str]) -> None:
        """Raise ModelError unless the data of these tensors is complete."""

    def read(self, name: str) -> Array:
        """Return the values of a tensor."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint.

    Args:
        path: A folder, one of the checkpoint's files, or the common prefix of their names.

    Raises:
        ModelError: There is no checkpoint, or the folder has several.
    """
    if path.is_dir():
        path = _find_prefix(path)
    prefix = path.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name))
    index = prefix.with_name(prefix.name + INDEX_SUFFIX)
    if index.is_file():
        return CheckpointV2(index)
    if prefix.is_file() and is_table(prefix):
        return CheckpointV1(prefix)
    if not path.exists():
        raise ModelError(
            f"{path}: no such folder or checkpoint; pass the folder of a model, or the common "
            f"prefix of the files of a TensorFlow checkpoint (such as {index.name})"
        )
    raise ModelError(
        f"{path}: not a TensorFlow checkpoint in V1 or V2 format (V2 needs {index.name}); pass the "
        "folder or the prefix of a checkpoint"
    )


def _find_prefix(folder: Path) -> Path:
    """Return the prefix of the only or latest checkpoint in a folder."""
    state_file = folder / "checkpoint"
    if state_file.is_file():
        # The path of the latest checkpoint is in the first line.
        text = state_file.read_bytes()[:65536].decode("utf-8", "replace")
        if match := re.search(r'^model_checkpoint_path: "([^"\n]+)"', text, re.MULTILINE):
            # The path in the file may be a path on another machine. Only its file name is used.
            latest = folder / Path(match[1]).name
            if latest.is_file() or latest.with_name(latest.name + INDEX_SUFFIX).is_file():
                return latest
    files = [path for path in folder.iterdir() if path.is_file()]
    prefixes = {
        path.name.removesuffix(INDEX_SUFFIX) for path in files if path.suffix == INDEX_SUFFIX
    }
    prefixes |= {path.name for path in files if _is_v1_checkpoint(path)}
    if len(prefixes) == 1:
        return folder / prefixes.pop()
    if prefixes:
        raise ModelError(
            f"{folder}: found several checkpoints ({', '.join(sorted(prefixes)[:5])}); "
            f"choose one of them, such as {folder / min(prefixes)}"
        )
    raise ModelError(
        f"{folder}: found no TensorFlow checkpoint; expected files such as bert_model.ckpt.index "
        "and bert_model.ckpt.data-00000-of-00001"
    )


def _is_v1_checkpoint(path: Path) -> bool:
    """Return whether a file is a V1 checkpoint, and not one of the files of a V2 checkpoint."""
    is_v2_file = ".meta" in path.name or ".data-" in path.name or path.suffix == INDEX_SUFFIX
    return ".ckpt" in path.name and not is_v2_file and is_table(path)


def read_config(path: Path, *, nsp: bool, positions: str) -> ModelConfig:
    """Read bert_config.json.

    Args:
        path: The file.
        nsp: Whether the model has a pooler and a next-sentence head.
        positions: Type of the position embeddings: "learned" or "sinusoidal".

    Raises:
        ModelError: The file is missing or not the config of a supported model.
    """
    if not path.is_file():
        raise ModelError(
            f"{path}: no such file; copy it to the folder of the checkpoint, or pass the folder "
            "that contains it and vocab.txt with --files-from FOLDER"
        )
    raw = read_json(path)
    check_required_keys(raw, path)
    values: dict[str, Any] = {
        "segments": _DEFAULT_SEGMENTS,
        "norm_eps": _NORM_EPS,
        "positions": positions,
    }
    values |= {
        field: raw[original] for field, original in _ORIGINAL_FIELDS.items() if original in raw
    }
    activation = raw.get("hidden_act", "gelu")
    activations = {original: name for name, original in _ORIGINAL_ACTIVATIONS.items()}
    if activation not in activations:
        supported = ", ".join(activations)
        raise ModelError(f"{path}: hidden_act is {activation!r}; supported: {supported}")
    values |= {"activation": activations[activation], "nsp": nsp}
    try:
        return ModelConfig.parse(values, str(path))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def check_original_config(model: Path) -> None:
    """Raise ModelError if the original BERT cannot represent a model; does not load torch."""
    _, config, _ = read_metadata(locate_model(model))
    to_original_config(config)


def to_original_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of bert_config.json.

    Raises:
        ModelError: The original BERT cannot represent the model.
    """
    required = {"norm": "post", "attention": "bidirectional", "norm_eps": _NORM_EPS}
    for name, value in required.items():
        if getattr(config, name) != value:
            raise ModelError(
                f"the original BERT only supports {name} = {value!r}, but this model has {name} = "
                f"{getattr(config, name)!r}; export it in another format"
            )
    if config.activation not in _ORIGINAL_ACTIVATIONS:
        advice = "; export it in another format"
        if config.activation == "gelu":
            advice = (
                " (its gelu is the tanh form); to export this model anyway, with slightly "
                "different outputs, set hidden_act to gelu_new in its config.json"
            )
        raise ModelError(
            f"the original BERT does not support activation {config.activation!r}{advice}"
        )
    values = config.model_dump()
    result = {original: values[field] for field, original in _ORIGINAL_FIELDS.items()}
    return result | {"hidden_act": _ORIGINAL_ACTIVATIONS[config.activation]}


def read_tokenizer(folder: Path, lowercase: bool | None) -> tuple[Tokenizer, str]:
    """Read the tokenizer of a release.

    If the folder contains tokenizer files of Bertsmith or Hugging Face, and ``lowercase`` is None,
    they are used. Otherwise text is normalized as in the original code, which strips accents if and
    only if it lowercases.

    Args:
        folder: The folder with vocab.txt.
        lowercase: Whether text is lowercased. If None, the tokenizer files determine the casing,
            or else the folder's name, or else whether the vocabulary has capital letters.

    Returns:
        The tokenizer, and a note about what determined the casing.
    """
    tokenizer_files = [
        name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE) if (folder / name).is_file()
    ]
    if lowercase is None and tokenizer_files:
        return Tokenizer.load(folder), f"the casing is that in {tokenizer_files[0]}"
    reason = "as requested"
    if lowercase is None:
        lowercase, reason = _detect_lowercase(folder)
    spec = Tokenizer.load(folder / VOCAB_FILE, lowercase=lowercase).spec
    case = "lowercased, without accents" if spec.lowercase else "left as it is (cased)"
    spec = replace(spec, strip_accents=spec.lowercase, keep_hangul_syllables=not spec.lowercase)
    return Tokenizer(spec), f"text is {case}, {reason}; change it with --cased or --uncased"


def _detect_lowercase(folder: Path) -> tuple[bool, str]:
    """Return whether text is lowercased, and the reason, for a folder with only vocab.txt."""
    for part, lowercase in _CASE_BY_FOLDER_NAME:
        if part in folder.resolve().name:
            return lowercase, f"because the folder's name contains {part!r}"
    # Without a casing, ``load`` looks for capital letters in the vocabulary.
    if Tokenizer.load(folder / VOCAB_FILE).lowercase:
        return True, "because no word in the vocabulary has a capital letter"
    return False, "because words in the vocabulary have capital letters"
