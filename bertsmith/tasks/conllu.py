"""Lines and columns of CoNLL-U, the format of Universal Dependencies.

Format: universaldependencies.org/format.html.
"""

import re
from pathlib import Path

from bertsmith.errors import SettingsError
from bertsmith.tasks.settings import is_column_number
from bertsmith.text.archives import get_format_suffix

COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
#: ``TaskSettings`` field -> the default column of CoNLL-U.
DEFAULT_COLUMNS = {"text_column": "form", "label_column": "upos"}
_NEW_DOCUMENT = re.compile(r"#\s*newdoc\b")
#: Ids of multiword tokens (3-4) and of empty nodes (3.1).
_NON_WORD_ID = re.compile(r"[0-9]+[-.][0-9]+\t")


def has_conllu_suffix(path: Path) -> bool:
    """Return whether a file has the suffix .conllu, ignoring suffixes of compressed files."""
    return get_format_suffix(path) == ".conllu"


def is_document_start(line: str) -> bool:
    """Return whether a line marks the start of a document."""
    return _NEW_DOCUMENT.match(line) is not None


def is_non_word_line(line: str) -> bool:
    """Return whether a line is a comment, a multiword token or an empty node."""
    return line.startswith("#") or _NON_WORD_ID.match(line) is not None


def get_column_index(name: str, field_name: str, path: Path) -> int:
    """Return the index of a column.

    Args:
        name: Name of the column. A number, which is meant for plain CoNLL files, selects the
            default column.
        field_name: The ``TaskSettings`` field, "text_column" or "label_column".
        path: The file, for error messages.

    Raises:
        SettingsError: CoNLL-U has no column of this name.
    """
    column = DEFAULT_COLUMNS[field_name] if is_column_number(name) else name.lower()
    if column not in COLUMNS:
        raise SettingsError(
            f"{path}: task.{field_name}: there is no column {name!r} in CoNLL-U; expected one of "
            f"{', '.join(COLUMNS)}",
        )
    return COLUMNS.index(column)
