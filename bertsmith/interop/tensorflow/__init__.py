"""Imports and exports checkpoints of the original BERT (google-research/bert).

TensorFlow is not needed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.interop.tensorflow.reading import read_tensorflow
    from bertsmith.interop.tensorflow.writing import write_tensorflow

__all__ = ["read_tensorflow", "write_tensorflow"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because both load torch, which takes seconds."""
    if name == "read_tensorflow":
        from bertsmith.interop.tensorflow.reading import read_tensorflow

        return read_tensorflow
    if name == "write_tensorflow":
        from bertsmith.interop.tensorflow.writing import write_tensorflow

        return write_tensorflow
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
