"""Check the inputs of inference functions, and split them into chunks."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from bertsmith.errors import BertsmithError, InputError

Item = TypeVar("Item")


def check_is_text_list(texts: object) -> None:
    """Raise InputError for a single string, which would be used as a list of characters."""
    if isinstance(texts, str):
        raise InputError(f"expected a list of texts, got one text: put {texts[:40]!r} into [ ]")


def chunked(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items (the last may be shorter), without reading ahead.

    If the iterable raises a BertsmithError, the items read before are yielded before it is raised.
    """
    iterator = iter(items)
    item_error: BertsmithError | None = None
    while item_error is None:
        chunk: list[Item] = []
        try:
            # list(islice(...)) would lose the items read before an error.
            for item in islice(iterator, size):
                chunk.append(item)  # noqa: PERF402
        except BertsmithError as error:
            item_error = error
        if chunk:
            yield chunk
        if len(chunk) < size and item_error is None:
            return
    raise item_error
