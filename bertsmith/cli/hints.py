"""Suggested next commands, quoted so that they can be pasted into a shell."""

import shlex
from pathlib import Path


def quote_path(path: Path | str) -> str:
    """Return a path quoted for a shell; a leading ``-`` is not mistaken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def quote_tab_separated_texts(*texts: str) -> str:
    """Return tab-separated texts as one quoted argument for bash, zsh or ksh."""
    return "$'" + r"\t".join(texts) + "'"


def format_fill_command(model: Path | str) -> str:
    """Return a ``fill`` command for a pre-trained model."""
    return f'bertsmith fill {quote_path(model)} "... [MASK] ..."'


def format_predict_command(
    model: Path | str, kind: str, *, pair: bool = False, endings: int = 2
) -> str:
    """Return a ``predict`` command for a fine-tuned model.

    kind: the model's ``bundle.TaskKind``. pair: whether it takes two texts. endings: number of
    endings of a multiple-choice model.
    """
    argument = '"..."'
    if kind == "span":
        argument = quote_tab_separated_texts("QUESTION", "CONTEXT")
    elif kind == "choice":
        numbered_endings = (f"ENDING {number}" for number in range(1, endings + 1))
        argument = quote_tab_separated_texts("PROMPT", *numbered_endings)
    elif pair:
        argument = quote_tab_separated_texts("TEXT", "SECOND TEXT")
    return f"bertsmith predict {quote_path(model)} {argument}"
