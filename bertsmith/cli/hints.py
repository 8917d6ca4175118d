"""Commands that are shown to be pasted into a shell."""

import shlex
from pathlib import Path


def quote_path(path: Path | str) -> str:
    """Return a path as one word of a shell, never mistaken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def quote_tab_separated(*texts: str) -> str:
    """Return texts with tabs between them, as one word of bash, zsh or ksh."""
    return "$'" + r"\t".join(texts) + "'"


def fill_command(model: Path | str) -> str:
    """Return a command that asks a pre-trained model."""
    return f'bertsmith fill {quote_path(model)} "... [MASK] ..."'


def predict_command(model: Path | str, kind: str, *, pair: bool = False, endings: int = 2) -> str:
    """Return a command that asks a fine-tuned model.

    kind: what the model answers, see ``bundle.Kind``. pair: whether it reads two texts.
    """
    text = '"..."'
    if kind == "span":
        text = quote_tab_separated("QUESTION", "CONTEXT")
    elif kind == "choice":
        text = quote_tab_separated(
            "PROMPT", *(f"ENDING {number}" for number in range(1, endings + 1))
        )
    elif pair:
        text = quote_tab_separated("TEXT", "SECOND TEXT")
    return f"bertsmith predict {quote_path(model)} {text}"
