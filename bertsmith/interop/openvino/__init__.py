"""Export and inference of encoders as OpenVINO graphs."""

from bertsmith.interop.openvino.encoder import (
    OpenVINOBundle,
    OpenVINOEncoder,
    load_embedding_encoder,
)
from bertsmith.interop.openvino.writing import write_openvino

__all__ = ["OpenVINOBundle", "OpenVINOEncoder", "load_embedding_encoder", "write_openvino"]
