"""From a model directory to an original BERT release: checkpoint, config, vocabulary.

It never needs TensorFlow.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from bertsmith.bundle import (
    INFO_FILE,
    FineTunedBundle,
    PretrainedBundle,
    load,
    load_fine_tuned,
    locate_model,
)
from bertsmith.bundle.config import CONFIG_FILE as DIRECTORY_CONFIG
from bertsmith.bundle.config import read_json
from bertsmith.bundle.weight_names import hf_names
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, check_new_directory, write_json
from bertsmith.interop.tensorflow import names as there
from bertsmith.interop.tensorflow.arrays import DT_FLOAT, Array
from bertsmith.interop.tensorflow.checkpoint_v2 import INDEX_SUFFIX
from bertsmith.interop.tensorflow.crc32c import crc32c, mask_crc
from bertsmith.interop.tensorflow.protobuf import (
    encode_bytes_field,
    encode_fixed32_field,
    encode_varint_field,
)
from bertsmith.interop.tensorflow.release import CONFIG_FILE, to_original_config
from bertsmith.interop.tensorflow.sstable import encode_table
from bertsmith.text.wordpiece import Tokenizer

#: The checkpoint's prefix in every release of the original.
CHECKPOINT_PREFIX = "bert_model.ckpt"


def write_tensorflow(model: Path | str, out: Path | str) -> list[str]:
    """Write a model directory or RUN as an original release; return what a user should know.

    ``out`` must not be there, or be empty. Bertsmith's and Hugging Face's tokenizer files are
    written beside vocab.txt, for what the original cannot say. Raises ModelError for a model that
    it cannot be: pre-norm, causal, another activation, another task than labels or spans.
    """
    directory, out = locate_model(Path(model)), Path(out)
    check_new_directory(out)
    classes = read_json(directory / DIRECTORY_CONFIG).get("architectures") or []
    plain = any(str(name).endswith(("ForPreTraining", "ForMaskedLM")) for name in classes)
    bundle = load(directory) if plain else load_fine_tuned(directory)
    info = {**bundle.info, "positions": bundle.config.positions}
    if isinstance(bundle, FineTunedBundle):
        if bundle.head.kind not in ("single", "span"):
            raise ModelError(
                f"{directory}: the original release has models for one label of several and for "
                f"answers in a text, not for {bundle.head.kind!r}; export it in another form"
            )
        info["labels"] = list(bundle.head.labels)
    else:
        bundle.require_head("mlm.")
    notes = _doubts(bundle.tokenizer)
    raw = to_original_config(bundle.config)
    with atomic_directory(out) as new:
        write_checkpoint(new / CHECKPOINT_PREFIX, _weights(bundle))
        write_json(new / CONFIG_FILE, raw)
        write_json(new / INFO_FILE, info)
        bundle.tokenizer.save(new, bundle.config.max_positions)
    return notes


def _doubts(tokenizer: Tokenizer) -> list[str]:
    """Return what the original's tokenizer does otherwise; ModelError for what it cannot do."""
    if not tokenizer.spec.is_plain_bert or not tokenizer.split_chinese:
        raise ModelError(
            "the original's tokenizer cannot do what this model's does before WordPiece (a "
            "segmenter, Hangul kept whole without accents, or Chinese left together), or has no "
            "place for tokens beside the vocabulary"
        )
    if tokenizer.lowercase == tokenizer.strip_accents:
        return []
    return [
        (
            "the original's code takes accents off when, and only when, it lower-cases; this "
            "model does otherwise, so words with accents (and Hangul) are cut differently there"
        )
    ]


def _weights(bundle: PretrainedBundle | FineTunedBundle) -> Iterator[tuple[str, Array]]:
    """Yield name and values of each weight, float32, one at a time."""
    state = bundle.model.state_dict()
    for ours, theirs in hf_names(list(state)).items():
        for name, piece in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            own = there.to_original_name(name)
            yield own, (piece.t() if there.is_transposed(own) else piece).float().cpu().numpy()


def write_checkpoint(prefix: Path, tensors: Iterable[tuple[str, Array]]) -> None:
    """Write a V2 checkpoint of float32 tensors, in one shard: ``prefix`` and its two endings."""
    entries = {}
    place = 0
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name, array in tensors:
            data = np.ascontiguousarray(array, dtype="<f4").data.cast("B")
            file.write(data)
            entries[name.encode()] = (
                encode_varint_field(1, DT_FLOAT)
                + encode_bytes_field(
                    2,
                    b"".join(encode_bytes_field(2, encode_varint_field(1, n)) for n in array.shape),
                )
                + encode_varint_field(4, place)
                + encode_varint_field(5, len(data))
                + encode_fixed32_field(6, mask_crc(crc32c(data)))
            )
            place += len(data)
    # One shard; little-endian is what a header says that says nothing; written by form 1.
    header = encode_varint_field(1, 1) + encode_bytes_field(3, encode_varint_field(1, 1))
    index = encode_table([(b"", header), *sorted(entries.items())])
    prefix.with_name(prefix.name + INDEX_SUFFIX).write_bytes(index)
