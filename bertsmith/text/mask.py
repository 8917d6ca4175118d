"""Checks that texts contain a [MASK] token."""

import re
from collections.abc import Sequence

from bertsmith.errors import InputError
from bertsmith.text.wordpiece import Tokenizer

MASK_TOKEN = "[MASK]"
#: Maximum number of characters of a text in an error message.
_MAX_QUOTED = 60


def check_mask(tokenizer: Tokenizer, text: str, ids: Sequence[int], number: int) -> None:
    """Raise InputError if a text has no [MASK].

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        ids: Its token ids, with special tokens recognized.
        number: The number of the text, for the message.
    """
    if tokenizer.mask_id in ids:
        return
    miscased_mask = re.search(re.escape(MASK_TOKEN), text, re.IGNORECASE)
    hint = f", but {miscased_mask[0]}: write it in capitals" if miscased_mask else ""
    raise InputError(
        f"text {number}: no {MASK_TOKEN} in {shorten_text(text)!r}{hint}; "
        f"put {MASK_TOKEN} where a word is to be predicted"
    )


def shorten_text(text: str) -> str:
    """Return the beginning of a text, for an error message."""
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."
