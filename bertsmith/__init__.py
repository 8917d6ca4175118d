"""Bertsmith: make your own BERT, from text to vocabulary, store, pre-training and use.

This file never loads a library: its public names arrive when they are first asked for.

The axis letters, the same in every docstring of the package:

    T  tokens in a batch          F  feed-forward width
    B  sequences in a batch       V  vocabulary
    S  longest length             L  layers
    D  width                      P  predictions
    N  attention heads            C  classes
    H  head width, D / N
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.data.store import Store
    from bertsmith.model.config import ModelConfig

__version__ = "0.1.0"

#: Public name -> the module that holds it. The imports above tell type checkers the same.
_PUBLIC = {
    "ModelConfig": "bertsmith.model.config",
    "Store": "bertsmith.data.store",
}

__all__ = ["ModelConfig", "Store", "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: ``import torch`` costs seconds."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
