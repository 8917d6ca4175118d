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
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (ruff cannot follow the star)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: ``import torch`` costs seconds."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
