"""Export of models as ONNX graphs."""

from bertsmith.interop.onnx.writing import write_onnx

__all__ = ["write_onnx"]
