"""The version of the package; a separate module that every layer can import."""

__version__ = "0.2.0"
