"""Web page (Gradio) to try the loaded models and to inspect their vectors and attention.

Importing it raises MissingExtraError if gradio is not installed.
"""

from bertsmith.serve.page.blocks import mount, page

__all__ = ["mount", "page"]
