"""Formats suggested next commands, quoted so that they can be pasted into a shell."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def quote_path(path: Path | str) -> str:
    """Return a path quoted for a shell; a leading ``-`` gets the prefix ``./``."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def quote_tab_separated_texts(*texts: str) -> str:
    """Return tab-separated texts as one quoted argument for bash, zsh or ksh."""
    return "$'" + r"\t".join(texts) + "'"


def format_fill_command(model: Path | str) -> str:
    """Return a ``fill`` command for a pre-trained model."""
    return f'bertsmith fill {quote_path(model)} "... [MASK] ..."'


def format_predict_command(
    model: Path | str, task_kind: str, task: Mapping[str, Any] | None = None
) -> str:
    """Return a ``predict`` command for a fine-tuned model, with the texts that its task needs.

    Args:
        model: The model directory or run directory.
        task_kind: The model's ``bundle.TaskKind``.
        task: The settings of its task; None if they are not known.
    """
    task = task or {}
    argument = '"..."'
    if task_kind == "span":
        argument = quote_tab_separated_texts("QUESTION", "CONTEXT")
    elif task_kind == "choice":
        # A single column has lists of endings, whose number may vary.
        num_endings = max(len(task.get("ending_columns") or ()), 2)
        endings = (f"ENDING {number}" for number in range(1, num_endings + 1))
        argument = quote_tab_separated_texts("PROMPT", *endings)
    elif task.get("pair_column"):
        argument = quote_tab_separated_texts("TEXT", "SECOND TEXT")
    return f"bertsmith predict {quote_path(model)} {argument}"
