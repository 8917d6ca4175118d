"""Gradio, or the error that says how to install it. It never builds anything."""

from bertsmith.errors import MissingExtraError

try:
    import gradio as gr
except ModuleNotFoundError:
    raise MissingExtraError("gradio", "serve", "the page for people") from None

__all__ = ["gr"]
