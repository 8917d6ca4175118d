"""Models as ONNX graphs, for other runtimes. It never runs one."""

from bertsmith.interop.onnx.writing import write_onnx

__all__ = ["write_onnx"]
