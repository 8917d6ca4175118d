"""Set up loaded models for inference: attention kernel, TF32 on CUDA, and the fast mode."""

from typing import TypeVar

import torch

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle
from bertsmith.errors import SettingsError
from bertsmith.interop.openvino import OpenVINOBundle, OpenVINOEncoder
from bertsmith.model.bert import BertModel
from bertsmith.model.ops.cuda import find_varlen_obstacle
from bertsmith.runtime.device import configure_determinism
from bertsmith.use.quantization import quantize, quantize_model

Bundle = TypeVar("Bundle", bound=PretrainedBundle | FineTunedBundle)


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


def set_up_embedding_encoder(
    bundle: PretrainedBundle | FineTunedBundle | EncoderBundle | OpenVINOBundle, *, fast: bool
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
