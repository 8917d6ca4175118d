"""Check the inputs of inference functions, and split them into chunks."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from bertsmith.errors import BertsmithError, InputError

Item = TypeVar("Item")

#: A chunk ends when its texts have this many characters, so that long texts fit into memory.
MAX_CHUNK_CHARACTERS = 2**20


def check_is_text_list(texts: object) -> None:
    """Raise InputError for a single string, which would be used as a list of characters."""
    if isinstance(texts, str):
        raise InputError(f"expected a list of texts, got one text: put {texts[:40]!r} into [ ]")


def chunked(
    items: Iterable[Item], size: int, count_characters: Callable[[Item], int] | None = None
) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items (the last may be shorter), without reading ahead.

    If the iterable raises a BertsmithError, the items read before are yielded before it is raised.

    Args:
        items: The items.
        size: Maximum number of items per list.
        count_characters: Returns the number of characters of an item. A list also ends when its
            items have ``MAX_CHUNK_CHARACTERS``. None: only the number of items counts.
    """
    iterator = iter(items)
    item_error: BertsmithError | None = None
    while item_error is None:
        chunk: list[Item] = []
        num_characters = 0
        try:
            for item in islice(iterator, size):
                chunk.append(item)
                if count_characters is not None:
                    num_characters += count_characters(item)
                    if num_characters >= MAX_CHUNK_CHARACTERS:
                        break
        except BertsmithError as error:
            item_error = error
        if chunk:
            yield chunk
        is_full = len(chunk) == size or num_characters >= MAX_CHUNK_CHARACTERS
        if not is_full and item_error is None:
            return
    raise item_error
