"""Imports and exports checkpoints of the original BERT (google-research/bert).

TensorFlow is not needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.interop.tensorflow.reading import read_tensorflow
    from bertsmith.interop.tensorflow.writing import write_tensorflow

__all__ = ["read_tensorflow", "write_tensorflow"]

#: The module of each public name. Keep in sync with the imports for type checkers above.
_MODULE_OF_NAME = {"read_tensorflow": "reading", "write_tensorflow": "writing"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because both modules load torch, which takes seconds."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'bertsmith.interop.tensorflow' has no attribute {name!r}")
    return getattr(import_module(f"bertsmith.interop.tensorflow.{_MODULE_OF_NAME[name]}"), name)
