"""From a model directory to an original BERT release: checkpoint, config, vocabulary.

It never needs TensorFlow.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from bertsmith.bundle import INFO, Bundle, TaskBundle, load, load_task, locate
from bertsmith.bundle.config import CONFIG as DIRECTORY_CONFIG
from bertsmith.bundle.config import read_json
from bertsmith.bundle.weight_names import names
from bertsmith.errors import ModelError
from bertsmith.files import check_new, whole_directory, write_json
from bertsmith.interop.tensorflow import names as there
from bertsmith.interop.tensorflow.arrays import FLOAT, Array
from bertsmith.interop.tensorflow.bundle import INDEX
from bertsmith.interop.tensorflow.crc32c import crc32c, masked
from bertsmith.interop.tensorflow.release import CONFIG, write_config
from bertsmith.interop.tensorflow.table import table
from bertsmith.interop.tensorflow.wire import write_bytes, write_fixed32, write_number
from bertsmith.text.wordpiece import Tokenizer

#: The checkpoint's prefix in every release of the original.
PREFIX = "bert_model.ckpt"


def write_tensorflow(model: Path | str, out: Path | str) -> list[str]:
    """Write a model directory or RUN as an original release; return what a user should know.

    ``out`` must not be there, or be empty. Bertsmith's and Hugging Face's tokenizer files are
    written beside vocab.txt, for what the original cannot say. Raises ModelError for a model that
    it cannot be: pre-norm, causal, another activation, another task than labels or spans.
    """
    directory, out = locate(Path(model)), Path(out)
    check_new(out)
    classes = read_json(directory / DIRECTORY_CONFIG).get("architectures") or []
    plain = any(str(name).endswith(("ForPreTraining", "ForMaskedLM")) for name in classes)
    bundle = load(directory) if plain else load_task(directory)
    info = {**bundle.info, "positions": bundle.config.positions}
    if isinstance(bundle, TaskBundle):
        if bundle.head.kind not in ("single", "span"):
            raise ModelError(
                f"{directory}: the original release has models for one label of several and for "
                f"answers in a text, not for {bundle.head.kind!r}; export it in another form"
            )
        info["labels"] = list(bundle.head.labels)
    else:
        bundle.require("mlm.")
    notes = _doubts(bundle.tokenizer)
    raw = write_config(bundle.config)
    with whole_directory(out) as new:
        write_bundle(new / PREFIX, _weights(bundle))
        write_json(new / CONFIG, raw)
        write_json(new / INFO, info)
        bundle.tokenizer.save(new, bundle.config.max_positions)
    return notes


def _doubts(tokenizer: Tokenizer) -> list[str]:
    """Return what the original's tokenizer does otherwise; ModelError for what it cannot do."""
    if not tokenizer.recipe.said_by_bert or not tokenizer.split_chinese:
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


def _weights(bundle: Bundle | TaskBundle) -> Iterator[tuple[str, Array]]:
    """Yield name and values of each weight, float32, one at a time."""
    state = bundle.model.state_dict()
    for ours, theirs in names(list(state)).items():
        for name, piece in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            own = there.original(name)
            yield own, (piece.t() if there.is_turned(own) else piece).float().cpu().numpy()


def write_bundle(prefix: Path, tensors: Iterable[tuple[str, Array]]) -> None:
    """Write a V2 checkpoint of float32 tensors, in one shard: ``prefix`` and its two endings."""
    entries = {}
    place = 0
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name, array in tensors:
            data = np.ascontiguousarray(array, dtype="<f4").data.cast("B")
            file.write(data)
            entries[name.encode()] = (
                write_number(1, FLOAT)
                + write_bytes(2, b"".join(write_bytes(2, write_number(1, n)) for n in array.shape))
                + write_number(4, place)
                + write_number(5, len(data))
                + write_fixed32(6, masked(crc32c(data)))
            )
            place += len(data)
    # One shard; little-endian is what a header says that says nothing; written by form 1.
    header = write_number(1, 1) + write_bytes(3, write_number(1, 1))
    index = table([(b"", header), *sorted(entries.items())])
    prefix.with_name(prefix.name + INDEX).write_bytes(index)
