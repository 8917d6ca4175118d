"""The folder of an original release: which checkpoint is in it, its config and its vocabulary.

It never looks at a weight.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from bertsmith.bundle.config import read_json
from bertsmith.errors import ModelError, SettingsError
from bertsmith.interop.tensorflow.arrays import Array
from bertsmith.interop.tensorflow.checkpoint_v1 import CheckpointV1
from bertsmith.interop.tensorflow.checkpoint_v2 import INDEX_SUFFIX, CheckpointV2
from bertsmith.interop.tensorflow.sstable import is_table
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer_files import TOKENIZER_CONFIG_FILE as TOKENIZER_CONFIG
from bertsmith.text.tokenizer_files import TOKENIZER_FILE, VOCAB_FILE
from bertsmith.text.wordpiece import Tokenizer

CONFIG_FILE: Final = "bert_config.json"
#: Our config fields -> the original's names for them.
CONFIG_NAMES: Final = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_range": "initializer_range",
}
#: The original's code computes the tanh form, and calls it gelu.
ACTIVATIONS: Final = {"gelu_tanh": "gelu", "relu": "relu"}
#: What LayerNorm adds to the variance there, always (tf.contrib.layers.layer_norm).
NORM_EPS: Final = 1e-12
#: Kinds of segment ids in a config that does not say it (the original's BertConfig).
_SEGMENTS: Final = 16
#: Folder names that tell the case, as the original's own check of it has them
#: (tokenization.py, validate_case_matches_checkpoint); the first that is found speaks.
_CASES: Final = (("uncased", True), ("cased", False), ("multilingual_L", True), ("chinese_L", True))


class Checkpoint(Protocol):
    """A checkpoint of any form, opened for reading."""

    path: Path
    format_name: str
    shapes: dict[str, tuple[int, ...]]

    def check_data(self, names: list[str]) -> None:
        """Raise ModelError unless the data of these tensors is there."""

    def read(self, name: str) -> Array:
        """Return a tensor."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at ``path``: a folder, a prefix, or one of its files.

    Raises ModelError where there is none, or several and nothing says which.
    """
    if path.is_dir():
        path = _in_folder(path)
    prefix = path.with_name(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name))
    index = prefix.with_name(prefix.name + INDEX_SUFFIX)
    if index.is_file():
        return CheckpointV2(index)
    if prefix.is_file() and is_table(prefix):
        return CheckpointV1(prefix)
    if not path.exists():
        raise ModelError(
            f"{path}: no such folder or checkpoint; expected the folder of a model, or the name of "
            f"a TensorFlow checkpoint ({index.name} beside its data)"
        )
    raise ModelError(
        f"{path}: not a TensorFlow checkpoint, neither of the V2 form (no {index.name}) nor V1"
    )


def _in_folder(folder: Path) -> Path:
    """Return the prefix of the folder's checkpoint."""
    said = folder / "checkpoint"
    if said.is_file():
        text = said.read_bytes()[:65536].decode("utf-8", "replace")
        if found := re.search(r'^model_checkpoint_path: "([^"\n]+)"', text, re.MULTILINE):
            # Its folder is where it was made; wherever that was, only this one is looked into.
            named = folder / Path(found[1]).name
            if named.is_file() or named.with_name(named.name + INDEX_SUFFIX).is_file():
                return named
    files = [path for path in folder.iterdir() if path.is_file()]
    prefixes = {
        path.name.removesuffix(INDEX_SUFFIX) for path in files if path.suffix == INDEX_SUFFIX
    }
    prefixes |= {
        path.name for path in files if ".ckpt" in path.name and ".meta" not in path.name
        and ".data-" not in path.name and path.suffix != INDEX_SUFFIX and is_table(path)
    }  # fmt: skip
    if len(prefixes) == 1:
        return folder / prefixes.pop()
    if prefixes:
        raise ModelError(
            f"{folder}: found several checkpoints ({', '.join(sorted(prefixes)[:5])}); "
            f"name one of them, such as {folder / min(prefixes)}"
        )
    raise ModelError(
        f"{folder}: found no TensorFlow checkpoint; expected files such as bert_model.ckpt.index "
        "and bert_model.ckpt.data-00000-of-00001"
    )


def read_config(path: Path, *, nsp: bool, positions: str) -> ModelConfig:
    """Read bert_config.json. ``nsp``, ``positions``: what it does not say. Raises ModelError."""
    if not path.is_file():
        raise ModelError(
            f"{path}: no such file; a release has it beside its checkpoint, "
            "else --files-from names the folder that holds it and vocab.txt"
        )
    raw = read_json(path)
    missing = [name for name in ("vocab_size", "hidden_size") if name not in raw]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} is missing")
    values: dict[str, Any] = {"segments": _SEGMENTS, "norm_eps": NORM_EPS, "positions": positions}
    values |= {ours: raw[theirs] for ours, theirs in CONFIG_NAMES.items() if theirs in raw}
    activation = raw.get("hidden_act", "gelu")
    known = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if activation not in known:
        raise ModelError(f"{path}: hidden_act is {activation!r}; known here: {', '.join(known)}")
    try:
        return ModelConfig.parse(values | {"activation": known[activation], "nsp": nsp}, str(path))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def to_original_config(config: ModelConfig) -> dict[str, Any]:
    """Return bert_config.json's content; ModelError for a model that the original cannot be."""
    plain = {"norm": "post", "attention": "bidirectional", "norm_eps": NORM_EPS}
    for name, own in plain.items():
        if getattr(config, name) != own:
            raise ModelError(
                f"the original BERT has {name} = {own!r} only, and this model {name} = "
                f"{getattr(config, name)!r}; export it in another form"
            )
    if config.activation not in ACTIVATIONS:
        advice = (
            " (its gelu is the tanh form); to export this model all the same, with slightly other "
            "outputs, set hidden_act to gelu_new in its config.json"
        )
        raise ModelError(
            f"the original BERT knows no activation {config.activation!r}"
            + (advice if config.activation == "gelu" else "; export it in another form")
        )
    values = config.model_dump()
    result = {theirs: values[ours] for ours, theirs in CONFIG_NAMES.items()}
    return result | {"hidden_act": ACTIVATIONS[config.activation]}


def read_tokenizer(folder: Path, lowercase: bool | None) -> tuple[Tokenizer, str]:
    """Read the tokenizer of a release, and say how its case was found out.

    Bertsmith's or Hugging Face's files beside vocab.txt say it. Otherwise the text is cleaned as
    the original does it, accents off with the case, and the case is what ``lowercase`` says, else
    the folder's name, else whether any word has a capital letter.
    """
    beside = [name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG) if (folder / name).is_file()]
    if lowercase is None and beside:
        return Tokenizer.load(folder), f"the case is what {beside[0]} says"
    how = "the case is the one that was asked for"
    if lowercase is None:
        name = folder.resolve().name
        part, lowercase = next((case for case in _CASES if case[0] in name), ("", None))
        how = f"the case is taken from the folder's name, which says {part!r}"
    recipe = Tokenizer.load(folder / VOCAB_FILE, lowercase=lowercase).spec
    if lowercase is None:
        seen = "no word" if recipe.lowercase else "some words"
        how = f"assumed from the vocabulary, of which {seen} have a capital letter"
    case = "lower-cased, accents taken off" if recipe.lowercase else "left as it is (cased)"
    recipe = replace(recipe, strip_accents=recipe.lowercase, whole_hangul=not recipe.lowercase)
    return Tokenizer(recipe), f"text is {case}: {how}; --cased or --uncased says otherwise"
