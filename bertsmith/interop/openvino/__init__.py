"""Inference with encoders that are OpenVINO graphs; the module ``writing`` exports them."""

from bertsmith.interop.openvino.encoder import (
    EmbeddingBundle,
    OpenVINOBundle,
    OpenVINOEncoder,
    load_embedding_encoder,
)

__all__ = ["EmbeddingBundle", "OpenVINOBundle", "OpenVINOEncoder", "load_embedding_encoder"]
