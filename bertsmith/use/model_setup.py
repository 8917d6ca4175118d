"""Load models and set them up for inference: attention kernel, TF32 on CUDA, and the fast mode."""

from pathlib import Path

import torch

from bertsmith.bundle import (
    EncoderBundle,
    FineTunedBundle,
    PretrainedBundle,
    TaskKind,
    load,
    load_fine_tuned,
)
from bertsmith.errors import ModelError, SettingsError
from bertsmith.interop.openvino import EmbeddingBundle, OpenVINOBundle, OpenVINOEncoder
from bertsmith.model.bert import BertModel
from bertsmith.model.ops.cuda import find_varlen_obstacle
from bertsmith.plurals import count_noun
from bertsmith.runtime.device import configure_determinism
from bertsmith.use.quantization import Bundle, quantize, quantize_model

#: A loaded model, or the path of a model directory or run directory.
ModelOrPath = PretrainedBundle | Path | str


def set_up_model(bundle: Bundle, *, fast: bool = False) -> Bundle:
    """Set up a loaded model for inference on its device.

    Args:
        bundle: The loaded model.
        fast: Whether to use 8-bit or 16-bit arithmetic; see ``quantize_model``.

    Returns:
        The model itself, or a copy in the fast mode.
    """
    if fast:
        bundle = quantize_model(bundle)
    set_up_encoder(bundle.model.bert)
    return bundle


def resolve_model(model: ModelOrPath, *, fast: bool = False) -> PretrainedBundle:
    """Set up a loaded model for inference, or load a path on the CPU; see ``set_up_model``.

    Raises:
        ModelError: The model cannot be loaded, or is of another kind, such as a fine-tuned model.
    """
    if not isinstance(model, PretrainedBundle | Path | str):
        raise ModelError(
            f"expected a pre-trained model, found {type(model).__name__}; load it with "
            "bertsmith.load, or give the path of its directory"
        )
    bundle = model if isinstance(model, PretrainedBundle) else load(model)
    return set_up_model(bundle, fast=fast)


def resolve_task_model(
    model: FineTunedBundle | Path | str, *kinds: TaskKind, fast: bool = False
) -> FineTunedBundle:
    """Set up a loaded fine-tuned model for inference, or load a path on the CPU.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        kinds: The task kinds that the caller supports.
        fast: Whether to use 8-bit or 16-bit arithmetic; see ``quantize_model``.

    Raises:
        ModelError: The model is not fine-tuned, or its task is none of ``kinds``.
    """
    bundle = _load_task_model(model)
    if bundle.head.kind not in kinds:
        raise ModelError(
            f"{bundle.path}: this model is of the kind {bundle.head.kind!r}; expected "
            f"{' or '.join(map(repr, kinds))}; `bertsmith predict` accepts every kind"
        )
    return set_up_model(bundle, fast=fast)


def resolve_reranker(
    model: FineTunedBundle | Path | str,
    *,
    fast: bool = False,
    device: torch.device | str = "cpu",
) -> FineTunedBundle:
    """Return a model with one output, set up for inference; see ``resolve_task_model``.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        device: Device to which a path is loaded.

    Raises:
        ModelError: The model is not fine-tuned, or has several outputs.
    """
    bundle = _load_task_model(model, device)
    head = bundle.head
    if head.kind != "regression":
        is_classifier = head.kind in ("single", "multi")
        description = (
            f"a classifier with {count_noun(len(head.labels), 'label')}"
            if is_classifier
            else f"of the kind {head.kind!r}"
        )
        raise ModelError(
            f"{bundle.path}: this model is {description}, but reranking needs a model with one "
            "output; train one with `bertsmith finetune rerank`, or use `bertsmith predict`"
        )
    return set_up_model(bundle, fast=fast)


def _load_task_model(
    model: FineTunedBundle | Path | str, device: torch.device | str = "cpu"
) -> FineTunedBundle:
    """Return a loaded fine-tuned model, or load a path to a device."""
    if not isinstance(model, FineTunedBundle | Path | str):
        raise ModelError(
            f"{type(model).__name__}: not a fine-tuned model; give the path of a model directory "
            "or run directory"
        )
    if isinstance(model, FineTunedBundle):
        return model
    return load_fine_tuned(model, device=device)


def set_up_embedding_encoder(
    bundle: EmbeddingBundle, *, fast: bool
) -> tuple[BertModel | OpenVINOEncoder, torch.device]:
    """Set up the encoder of a loaded model for inference.

    Args:
        bundle: The loaded model.
        fast: Whether to use 8-bit or 16-bit arithmetic; see ``quantize``.

    Returns:
        The encoder, or a copy in the fast mode, and its device.

    Raises:
        SettingsError: ``fast`` is set for an OpenVINO graph.
    """
    if isinstance(bundle, OpenVINOBundle):
        if fast:
            raise SettingsError(
                f"fast: the precision of the OpenVINO graph in {bundle.path} is fixed; remove "
                "--fast (in Python, fast=True)"
            )
        return bundle.model, torch.device("cpu")
    encoder = bundle.model if isinstance(bundle, EncoderBundle) else bundle.model.bert
    device = next(encoder.parameters()).device
    if fast:
        encoder = quantize(encoder)
    set_up_encoder(encoder)
    return encoder, device


def get_dtype_name(encoder: BertModel | OpenVINOEncoder) -> str:
    """Return the number format of an encoder's weights, such as "float32"; "int8" for 8 bits."""
    if isinstance(encoder, OpenVINOEncoder):
        return encoder.dtype_name
    dtype = encoder.embeddings.words.weight.dtype
    # In the 8-bit mode, the embeddings remain in float32; see ``quantize``.
    if encoder.output_dtype is not None and dtype == torch.float32:
        return "int8"
    return str(dtype).removeprefix("torch.")


def set_up_encoder(encoder: BertModel) -> None:
    """Select the attention kernel of an encoder on CUDA, and allow TF32 there.

    In 16 bits the kernel is `varlen`, if the GPU and the head width allow it. On the CPU nothing
    changes.
    """
    weight = encoder.embeddings.words.weight
    if not weight.is_cuda:
        return
    configure_determinism(is_cuda=True)
    is_16_bit = weight.dtype in (torch.bfloat16, torch.float16)
    if is_16_bit and find_varlen_obstacle(weight.device, encoder.config.head_dim) is None:
        encoder.kernel = "varlen"
