"""What CoNLL-U, the form of Universal Dependencies, has beside CoNLL's: comments, names, no words.

It never reads a file: it tells what its lines are.

Source: universaldependencies.org/format.html.
"""

import re
from pathlib import Path

from bertsmith.errors import SettingsError
from bertsmith.tasks.settings import is_column_number

#: The columns, in their order.
FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
#: Which of them are the words and their tags where nobody says.
USUAL = {"text": "form", "label": "upos"}
_DOCUMENT = re.compile(r"#\s*newdoc\b")
#: The first column of what is no word: 3-4 where two are written as one, 3.1 where one is left out.
_ASIDE = re.compile(r"[0-9]+[-.][0-9]+\t")


def is_conllu(path: Path) -> bool:
    """Tell by a file's name whether it is in this form."""
    return path.suffix.lower() == ".conllu"


def is_document_start(line: str) -> bool:
    """Tell whether a line says that a document begins."""
    return _DOCUMENT.match(line) is not None


def is_not_word(line: str) -> bool:
    """Tell whether a line is no word: a comment, several words as one, or a word left out."""
    return line.startswith("#") or _ASIDE.match(line) is not None


def get_column_index(name: str, field: str, path: Path) -> int:
    """Return the number of the column that ``field`` ("text" or "label") of a task names.

    Numbers are the columns of CoNLL's form, where words come first; here they mean ``USUAL``.
    Raises SettingsError.
    """
    asked = USUAL[field] if is_column_number(name) else name.lower()
    if asked not in FIELDS:
        raise SettingsError(
            f"{path}: task.{field}: there is no column {name!r} in CoNLL-U; expected one of "
            f"{', '.join(FIELDS)}"
        )
    return FIELDS.index(asked)
