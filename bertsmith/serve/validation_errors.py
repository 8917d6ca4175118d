"""Messages about fields of request bodies that Pydantic rejects."""

import difflib
import json
from collections.abc import Collection
from typing import Any, Final

from pydantic import ValidationError

from bertsmith.serve.body_fields import BRANCH_TAGS

#: Maximum length of a field name in a message, because clients choose the names.
_MAX_FIELD_CHARACTERS: Final = 100
#: Maximum length of a value in a message.
_MAX_VALUE_CHARACTERS: Final = 50
#: JSON's name of the expected type, by the type of Pydantic's error.
_EXPECTED_TYPES: Final = {
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "dict_type": "expected an object",
    "tuple_type": "expected a list",
}


def describe_errors(error: ValidationError, fields: Collection[str], name: str = "") -> list[str]:
    """Return a message for each of the first five errors.

    Args:
        error: the errors of a body, or of a field.
        fields: names of the valid fields of the body.
        name: name of the field; empty for a body.
    """
    details = error.errors(include_url=False, include_context=True, include_input=True)
    return [_describe_error(detail, fields, name) for detail in details[:5]]


def _describe_error(detail: Any, fields: Collection[str], name: str) -> str:
    parts = [str(part) for part in (name, *detail["loc"]) if part not in BRANCH_TAGS]
    location = ".".join(parts).strip(".")[:_MAX_FIELD_CHARACTERS] or "the body"
    return f"{location}: {_describe_problem(detail, fields)}"


def _describe_problem(detail: Any, fields: Collection[str]) -> str:
    """Return what is wrong with a field, and what was found."""
    kind = detail["type"]
    if kind == "extra_forbidden":
        is_nested = len(detail["loc"]) > 1
        return "unknown field" if is_nested else _describe_unknown(str(detail["loc"][-1]), fields)
    if kind == "missing":
        return str(detail["msg"])
    if kind in ("too_short", "too_long"):
        context = detail["ctx"]
        limit, bound = context.get("min_length"), "at least"
        if kind == "too_long":
            limit, bound = context["max_length"], "at most"
        noun = "item" if limit == 1 else "items"
        return f"expected {bound} {limit:,} {noun}, found {len(detail['input']):,}"
    # Pydantic's messages about these types name those of Python.
    message = _EXPECTED_TYPES.get(kind, str(detail["msg"]))
    return f"{message}, found {_describe_value(detail['input'])}"


def _describe_unknown(key: str, fields: Collection[str]) -> str:
    """Return a message about an unknown field, with the most similar valid field."""
    matches = difflib.get_close_matches(key[:_MAX_FIELD_CHARACTERS], fields, n=1)
    hint = f"; did you mean {matches[0]!r}?" if matches else ""
    return f"unknown field{hint} (valid fields: {', '.join(fields)})"


def _describe_value(value: Any) -> str:
    """Return a value of a JSON body in short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        # A text can be very long.
        value = value[: _MAX_VALUE_CHARACTERS + 1]
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"
