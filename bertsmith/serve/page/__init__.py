"""The page for people: ask the loaded models, and see what they see. It never knows HTTP's routes.

Without the package gradio, importing it raises MissingExtraError.
"""

from bertsmith.serve.page.blocks import mount, page

__all__ = ["mount", "page"]
