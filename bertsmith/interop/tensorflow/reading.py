"""From a TensorFlow checkpoint to a model: every name and shape checked, then tensor by tensor.

It never knows how a checkpoint lies on disk, and never needs TensorFlow.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.bundle import INFO_FILE, FineTunedBundle, HeadConfig, PretrainedBundle
from bertsmith.bundle.config import read_json
from bertsmith.bundle.weight_names import hf_names
from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow import names as there
from bertsmith.interop.tensorflow.release import (
    CONFIG_FILE,
    Checkpoint,
    open_checkpoint,
    read_config,
    read_tokenizer,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig

Model = TypeVar("Model", bound=nn.Module)

#: Our heads that a checkpoint may lack as a whole: they are drawn anew, and named.
_HEADS = ("mlm.", "nsp.")
#: The seed of what is drawn anew, so that the same checkpoint always gives the same model.
_SEED = 0


def read_tensorflow(
    path: Path | str, *, lowercase: bool | None = None, files_from: Path | str | None = None
) -> PretrainedBundle | FineTunedBundle:
    """Read an original BERT release, or a model that its code fine-tuned, in eval mode.

    path: its folder, the checkpoint's prefix or one of its files; V1, V2 or object-based.
    lowercase: whether text is lowered; see ``read_tokenizer``. files: the folder of
    bert_config.json and vocab.txt, if they do not stand beside the checkpoint.
    ``info["imported"]`` says what was left and assumed, and which weights are new.
    Raises ModelError.
    """
    checkpoint = open_checkpoint(Path(path))
    folder = checkpoint.path.parent if files_from is None else Path(files_from)
    known = _by_original_name(checkpoint)
    own = read_json(folder / INFO_FILE) if (folder / INFO_FILE).is_file() else {}
    nsp = any(name.startswith("bert/pooler/") for name in known)
    config = read_config(folder / CONFIG_FILE, nsp=nsp, positions=own.get("positions", "learned"))
    _sizes_agree(checkpoint, known, config)
    tokenizer, case = read_tokenizer(folder, lowercase)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder}: vocab.txt has {tokenizer.vocab_size} words, but the model only "
            f"{config.vocab_size}; use the vocabulary that the model was trained with"
        )
    head = _head(checkpoint, known, own)
    told = {"from": f"a TensorFlow checkpoint of the {checkpoint.format_name} form", "case": case}
    if head is None:
        model, report = _filled(lambda: BertForPreTraining(config), checkpoint, known)
        return PretrainedBundle(model, tokenizer, config, folder, own | {"imported": told | report})
    tuned, report = _filled(lambda: head.build_model(config), checkpoint, known)
    return FineTunedBundle(
        tuned, tokenizer, config, head, folder, own | {"imported": told | report}
    )


def _by_original_name(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored names by the original's; ModelError if this is no BERT."""
    stored = list(checkpoint.shapes)
    other = there.identify_other_model(stored)
    if not other and there.WORD_EMBEDDINGS in checkpoint.shapes:
        return {name: name for name in stored}
    if not other and there.to_official_name(there.WORD_EMBEDDINGS) in checkpoint.shapes:
        layers = range(sum(name.endswith("/intermediate/kernel") for name in stored))
        ours = ModelConfig(vocab_size=1, layers=max(len(layers), 1), width=1, heads=1)
        with torch.device("meta"):
            wanted = hf_names(list(BertForPreTraining(ours).state_dict()))
        originals = [there.to_original_name(name) for group in wanted.values() for name in group]
        return {one: there.to_official_name(one) for one in originals
                if there.to_official_name(one) in checkpoint.shapes}  # fmt: skip
    weights = [name for name in stored if not there.is_training_state(name)]
    what = f"this is {other}" if other else "this is no BERT"
    raise ModelError(
        f"{checkpoint.path}: {what}: its tensors are {', '.join(weights[:3]) or 'none'}, …; "
        f"expected {there.WORD_EMBEDDINGS} and so on, as in the original BERT release"
    )


def _sizes_agree(checkpoint: Checkpoint, known: Mapping[str, str], config: ModelConfig) -> None:
    """Compare the config's sizes with the checkpoint before any memory is taken for a model."""
    layers = there.count_layers(known)
    if layers != config.layers:
        raise ModelError(
            f"{checkpoint.path}: the checkpoint holds {layers} layers, "
            f"and {CONFIG_FILE} says {config.layers}"
        )
    sizes = {
        there.WORD_EMBEDDINGS: (config.vocab_size, config.width),
        there.POSITION_EMBEDDINGS: (config.max_positions, config.width),
        there.SEGMENT_EMBEDDINGS: (config.segments, config.width),
        there.FIRST_FEED_FORWARD_KERNEL: (config.width, config.feed_forward),
    }
    for name, expected in sizes.items():
        _expect(checkpoint, known, name, expected)
    checkpoint.check_data([known[name] for name in sizes])


def _expect(
    checkpoint: Checkpoint, known: Mapping[str, str], name: str, expected: tuple[int, ...]
) -> None:
    """Raise ModelError unless a tensor is there and has this shape.

    The official TF2 model keeps the axis of heads, [D, N, H]: the same numbers in the same order.
    """
    if name not in known:
        raise ModelError(f"{checkpoint.path}: the tensor {name!r} is missing")
    found = checkpoint.shapes[known[name]]
    heads = known[name] != name and math.prod(found) == math.prod(expected)
    if found != expected and not (heads and "/self_attention/" in known[name]):
        raise ModelError(
            f"{checkpoint.path}: {known[name]} has shape {found}; {CONFIG_FILE} asks for {expected}"
        )


def _head(
    checkpoint: Checkpoint, known: Mapping[str, str], own: Mapping[str, Any]
) -> HeadConfig | None:
    """Return what a fine-tuned checkpoint's outputs are; None for a pre-trained one."""
    if there.SQUAD_WEIGHTS in known:
        return HeadConfig("span")
    if there.CLASSIFIER_WEIGHTS not in known:
        return None
    shape = checkpoint.shapes[known[there.CLASSIFIER_WEIGHTS]]
    checkpoint.check_data([known[there.CLASSIFIER_WEIGHTS]])
    labels = tuple(f"LABEL_{index}" for index in range(shape[0] if shape else 0))
    said = tuple(str(label) for label in own.get("labels", ()))
    return HeadConfig("single", said if len(said) == len(labels) else labels)


def _filled(
    build: Callable[[], Model], checkpoint: Checkpoint, known: Mapping[str, str]
) -> tuple[Model, dict[str, Any]]:
    """Build a model and copy every weight into it; return what is new in it and what was left."""
    with torch.device("meta"):
        model = build()
    plan = _plan(model, checkpoint, known)
    wanted = {known[name] for group in plan.values() for name in group}
    checkpoint.check_data(sorted(wanted))
    new = [name for name in hf_names(list(model.state_dict())) if name not in plan]
    if new:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = build()
    else:
        # Drawing a base model's weights takes longer than reading them.
        model.to_empty(device="cpu")
        if isinstance(model, BertForPreTraining):
            model.mlm.decoder.weight = model.bert.embeddings.words.weight
    state = model.state_dict()
    for ours, theirs in plan.items():
        for name, piece in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            _copy(piece, checkpoint, known[name])
    left = [name for name in checkpoint.shapes if name not in wanted]
    training = [name for name in left if there.is_training_state(name)]
    said = {"new": new, "left": [name for name in left if name not in training]}
    return model.eval(), said | {"left_of_training": len(training)}


def _plan(
    model: nn.Module, checkpoint: Checkpoint, known: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the original's names of each weight that the checkpoint has; all shapes checked.

    A head that is missing as a whole is left out; else what is missing is a ModelError.
    """
    state = model.state_dict()
    plan = {ours: [there.to_original_name(name) for name in theirs]
            for ours, theirs in hf_names(list(state)).items()}  # fmt: skip
    for head in _HEADS:
        own = [name for name in plan if name.startswith(head)]
        if not any(one in known for name in own for one in plan[name]):
            plan = {ours: theirs for ours, theirs in plan.items() if ours not in own}
    for ours, theirs in plan.items():
        first, *rest = state[ours].shape
        expected = (first // len(theirs), *rest)
        for name in theirs:
            turned = there.is_transposed(known.get(name, name))
            _expect(checkpoint, known, name, expected[::-1] if turned else expected)
    return plan


@torch.no_grad()
def _copy(weight: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Copy one stored tensor into a weight, or into its part; only this one is in memory."""
    array = checkpoint.read(name)
    if array.dtype.kind != "f":
        raise ModelError(f"{checkpoint.path}: {name} is of {array.dtype}; weights are fractions")
    shape, turned = tuple(weight.shape), there.is_transposed(name)
    source = torch.from_numpy(array.reshape(shape[::-1] if turned else shape))
    weight.copy_(source.t() if turned else source)
