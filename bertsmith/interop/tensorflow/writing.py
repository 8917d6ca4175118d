"""Export of a model in the format of the original BERT: checkpoint, config and vocabulary."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from bertsmith.bundle import (
    INFO_FILE,
    FineTunedBundle,
    PretrainedBundle,
    load_model,
    locate_model,
)
from bertsmith.bundle.weight_names import map_to_hf_names
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory, check_new_directory, write_json
from bertsmith.interop.tensorflow.arrays import DT_FLOAT, Array
from bertsmith.interop.tensorflow.checkpoint_v2 import INDEX_SUFFIX
from bertsmith.interop.tensorflow.crc32c import crc32c, mask_crc
from bertsmith.interop.tensorflow.names import is_transposed, to_original_name
from bertsmith.interop.tensorflow.protobuf import (
    encode_bytes_field,
    encode_fixed32_field,
    encode_varint_field,
)
from bertsmith.interop.tensorflow.release import CONFIG_FILE, to_original_config
from bertsmith.interop.tensorflow.sstable import encode_table
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.text.wordpiece import Tokenizer

#: Common prefix of the names of the checkpoint's files, as in all original releases.
CHECKPOINT_PREFIX = "bert_model.ckpt"


def write_tensorflow(model: Path | str, out: Path | str) -> list[str]:
    """Write a model in the format of the original BERT.

    Tokenizer files of Bertsmith and Hugging Face are written in addition to vocab.txt, which cannot
    express all settings of a tokenizer.

    Args:
        model: A model directory or run directory.
        out: A directory that is empty or does not exist.

    Returns:
        Notes for the user.

    Raises:
        ModelError: The original BERT cannot represent the model, or ``out`` is not empty.
    """
    directory = locate_model(model)
    out = Path(out)
    check_new_directory(out)
    bundle = load_model(directory)
    info = {**bundle.info, "positions": bundle.config.positions}
    if isinstance(bundle, FineTunedBundle):
        if isinstance(bundle.model, BertWithBiLSTM):
            raise ModelError(
                f"{directory}: the original BERT has no BiLSTM (features); fine-tune a model "
                "without features and export it"
            )
        is_score = bundle.head.kind == "regression" and bundle.head.num_outputs == 1
        if bundle.head.kind not in ("single", "span") and not is_score:
            raise ModelError(
                f"{directory}: the original release supports single-label classification, a single "
                f"score and question answering, not {bundle.head.kind!r}; export it in another "
                "format"
            )
        info["labels"] = list(bundle.head.labels)
    else:
        bundle.require_head("mlm.")
    notes = bundle.notes() + _compare_tokenizers(bundle.tokenizer)
    config = to_original_config(bundle.config)
    with atomic_directory(out) as folder:
        write_checkpoint(folder / CHECKPOINT_PREFIX, _iter_weights(bundle))
        write_json(folder / CONFIG_FILE, config)
        write_json(folder / INFO_FILE, info)
        bundle.tokenizer.save(folder, bundle.config.max_positions)
    return notes


def _compare_tokenizers(tokenizer: Tokenizer) -> list[str]:
    """Return notes about differences between a tokenizer and that of the original BERT.

    Raises:
        ModelError: The tokenizer of the original BERT cannot represent this tokenizer.
    """
    if not tokenizer.spec.is_plain_bert or not tokenizer.split_chinese:
        raise ModelError(
            "the original BERT does not support this model's tokenizer (it has a segmenter, strips "
            "accents but keeps Hangul composed, does not split Chinese characters, or has added "
            "tokens); export the model in another format"
        )
    if tokenizer.lowercase == tokenizer.strip_accents:
        return []
    note = (
        "the original BERT strips accents if and only if it lowercases; unlike this model, it will "
        "therefore split words with accents, and Hangul, into other tokens"
    )
    return [note]


def _iter_weights(bundle: PretrainedBundle | FineTunedBundle) -> Iterator[tuple[str, Array]]:
    """Yield the original BERT's name and the float32 values of each weight."""
    state = bundle.model.state_dict()
    for name, group in map_to_hf_names(state).items():
        # A fused weight, such as query_key_value, is stored as several tensors.
        for hf_name, chunk in zip(group, state[name].chunk(len(group)), strict=True):
            original_name = to_original_name(hf_name)
            tensor = chunk.t() if is_transposed(original_name) else chunk
            yield original_name, tensor.float().cpu().numpy()


def write_checkpoint(prefix: Path, tensors: Iterable[tuple[str, Array]]) -> None:
    """Write float32 tensors as a V2 checkpoint with one shard.

    Args:
        prefix: The path of the checkpoint without the suffixes of its two files.
        tensors: The name and the values of each tensor.
    """
    entries = {}
    offset = 0
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name, array in tensors:
            data = np.ascontiguousarray(array, dtype="<f4").data.cast("B")
            file.write(data)
            axes = (encode_bytes_field(2, encode_varint_field(1, size)) for size in array.shape)
            # A BundleEntryProto message: data type, shape, offset, size and checksum.
            entries[name.encode()] = (
                encode_varint_field(1, DT_FLOAT)
                + encode_bytes_field(2, b"".join(axes))
                + encode_varint_field(4, offset)
                + encode_varint_field(5, len(data))
                + encode_fixed32_field(6, mask_crc(crc32c(data)))
            )
            offset += len(data)
    # The header has one shard and format version 1. Little-endian is the default.
    header = encode_varint_field(1, 1) + encode_bytes_field(3, encode_varint_field(1, 1))
    index = encode_table([(b"", header), *sorted(entries.items())])
    prefix.with_name(prefix.name + INDEX_SUFFIX).write_bytes(index)
