"""Writes and reads checkpoints of a very small BERT with TensorFlow.

As a script: ``make FOLDER`` writes a checkpoint in every format, as stored in this folder, and
``read PREFIX`` writes all tensors of a checkpoint to PREFIX.npz. Bertsmith is not imported.
"""

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

NUM_LAYERS = 2
WIDTH = 6
NUM_HEADS = 2
FEED_FORWARD = 7
VOCAB_SIZE = 11
MAX_POSITIONS = 5
NUM_SEGMENTS = 3
FORMATS = ("v2", "parts", "types", "v1", "object", "official")


def variable_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the original BERT's variables by name."""
    result: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (VOCAB_SIZE, WIDTH),
        "bert/embeddings/position_embeddings": (MAX_POSITIONS, WIDTH),
        "bert/embeddings/token_type_embeddings": (NUM_SEGMENTS, WIDTH),
        "cls/predictions/output_bias": (VOCAB_SIZE,),
        "cls/seq_relationship/output_weights": (2, WIDTH),
        "cls/seq_relationship/output_bias": (2,),
    }
    linears = {
        "bert/pooler/dense": (WIDTH, WIDTH),
        "cls/predictions/transform/dense": (WIDTH, WIDTH),
    }
    norms = ["bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"]
    for layer in (f"bert/encoder/layer_{index}" for index in range(NUM_LAYERS)):
        for part in ("self/query", "self/key", "self/value", "output/dense"):
            linears[f"{layer}/attention/{part}"] = (WIDTH, WIDTH)
        linears[f"{layer}/intermediate/dense"] = (WIDTH, FEED_FORWARD)
        linears[f"{layer}/output/dense"] = (FEED_FORWARD, WIDTH)
        norms += [f"{layer}/attention/output/LayerNorm", f"{layer}/output/LayerNorm"]
    for name, shape in linears.items():
        result |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    for name in norms:
        result |= {f"{name}/gamma": (WIDTH,), f"{name}/beta": (WIDTH,)}
    return result


def make_values(name: str, shape: tuple[int, ...]) -> Any:
    """Return random float32 values, seeded by the variable's name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(size=shape).astype(np.float32)


def make_variables() -> dict[str, Any]:
    """Return the values of the original BERT's variables by name."""
    return {name: make_values(name, shape) for name, shape in variable_shapes().items()}


def official_name(name: str) -> tuple[str, tuple[int, ...] | None]:
    """Return a variable's name in the official TF2 encoder, and its shape if it differs."""
    name = name.removeprefix("bert/")
    embedding_names = {
        "embeddings/word_embeddings": "word_embeddings/embeddings",
        "embeddings/position_embeddings": "position_embedding/embeddings",
        "embeddings/token_type_embeddings": "type_embeddings/embeddings",
        "embeddings/LayerNorm/gamma": "embeddings/layer_norm/gamma",
        "embeddings/LayerNorm/beta": "embeddings/layer_norm/beta",
        "pooler/dense/kernel": "pooler_transform/kernel",
        "pooler/dense/bias": "pooler_transform/bias",
    }
    if name in embedding_names:
        return embedding_names[name], None
    _, layer, layer_name = name.split("/", 2)
    part, _, parameter = layer_name.rpartition("/")
    official_part = {
        "attention/self/query": "self_attention/query",
        "attention/self/key": "self_attention/key",
        "attention/self/value": "self_attention/value",
        "attention/output/dense": "self_attention/attention_output",
        "attention/output/LayerNorm": "self_attention_layer_norm",
        "intermediate/dense": "intermediate",
        "output/dense": "output",
        "output/LayerNorm": "output_layer_norm",
    }[part]
    shape: tuple[int, ...] | None = None
    heads_shape = (NUM_HEADS, WIDTH // NUM_HEADS)
    if part.startswith("attention/self/"):
        shape = heads_shape if parameter == "bias" else (WIDTH, *heads_shape)
    if official_part.endswith("attention_output") and parameter == "kernel":
        shape = (*heads_shape, WIDTH)
    return f"transformer/{layer}/{official_part}/{parameter}", shape


def write_checkpoints(folder: Path) -> None:
    """Write a checkpoint in each format to ``folder/FORMAT/bert_model.ckpt``."""
    tf = _import_tensorflow()
    for checkpoint_format in FORMATS:
        (folder / checkpoint_format).mkdir(parents=True)
    prefixes = {
        checkpoint_format: str(folder / checkpoint_format / "bert_model.ckpt")
        for checkpoint_format in FORMATS
    }
    values = make_variables()
    training_state = {"global_step": np.array(1000, dtype=np.int64)}
    for name, array in values.items():
        training_state |= {f"{name}/adam_m": array / 10, f"{name}/adam_v": array**2 / 10}
    variables = values | training_state
    names, arrays = list(variables), list(variables.values())
    tf.raw_ops.SaveV2(
        prefix=prefixes["v2"],
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=arrays,
    )
    tf.raw_ops.SaveSlices(
        filename=prefixes["v1"],
        tensor_names=names,
        shapes_and_slices=[""] * len(names),
        data=arrays,
    )
    _write_sliced(tf, prefixes["parts"], values)
    dtypes = (tf.float16, tf.bfloat16, tf.float64, tf.float32)
    tf.raw_ops.SaveV2(
        prefix=prefixes["types"],
        tensor_names=list(values),
        shape_and_slices=[""] * len(values),
        tensors=[
            tf.cast(array, dtypes[index % len(dtypes)])
            for index, array in enumerate(values.values())
        ],
    )
    # The names of the attributes do not contain the names of the variables.
    named = {
        f"thing{index}": tf.Variable(array, name=name)
        for index, (name, array) in enumerate(values.items())
    }
    tf.train.Checkpoint(model=tf.train.Checkpoint(**named)).save(prefixes["object"])
    encoder = {}
    for index, (name, array) in enumerate(values.items()):
        if name.startswith("bert/"):
            new_name, shape = official_name(name)
            array = array.reshape(shape or array.shape)  # noqa: PLW2901
            encoder[f"thing{index}"] = tf.Variable(array, name=new_name)
    tf.train.Checkpoint(model=tf.train.Checkpoint(**encoder)).write(prefixes["official"])


def _write_sliced(tf: Any, prefix: str, values: dict[str, Any]) -> None:
    """Write two shards; the first has one of three slices of the word embeddings."""
    words = "bert/embeddings/word_embeddings"
    extents = [(0, 4), (4, 5), (9, 2)]
    entries = []
    for start, size in extents:
        slice_spec = f"{VOCAB_SIZE} {WIDTH} {start},{size}:-"
        entries.append((words, slice_spec, values[words][start : start + size]))
    entries += [(name, "", array) for name, array in values.items() if name != words]
    # The first three entries are the slices.
    shards = [entries[0:1] + entries[3:20], entries[1:3] + entries[20:]]
    shard_prefixes = [f"{prefix}_{number}" for number in range(len(shards))]
    for shard_prefix, shard in zip(shard_prefixes, shards, strict=True):
        names, slices, arrays = zip(*shard, strict=True)
        tf.raw_ops.SaveV2(
            prefix=shard_prefix, tensor_names=names, shape_and_slices=slices, tensors=list(arrays)
        )
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=shard_prefixes, destination_prefix=prefix)


def read_with_tensorflow(prefix: str) -> None:
    """Write all tensors of a checkpoint to ``PREFIX.npz``."""
    reader = _import_tensorflow().train.load_checkpoint(prefix)
    np.savez(
        prefix, **{name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    )


def _import_tensorflow() -> Any:
    """Import TensorFlow without its log messages."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    return tf


if __name__ == "__main__":
    if sys.argv[1] == "make":
        write_checkpoints(Path(sys.argv[2]))
    else:
        read_with_tensorflow(sys.argv[2])
