"""Import gradio, or raise MissingExtraError."""

from bertsmith.errors import MissingExtraError

try:
    import gradio as gr
except ModuleNotFoundError:
    raise MissingExtraError("gradio", "serve", "the web page") from None

__all__ = ["gr"]
