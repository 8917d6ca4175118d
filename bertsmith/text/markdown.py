"""Converts Markdown to plain prose for training."""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

# In some books, the closing underscore is after the space, as in "was _bound _to be".
_MISPLACED_EMPHASIS: Final = re.compile(r"(?<!\w)_(\w[^_\n]*?) _(?=\w)")
_CHECKBOX: Final = re.compile(r"^\[[ xX]\]\s+")
_HTML_TAG: Final = re.compile(r"</?[A-Za-z][^<>]*>")
#: The start of a block of HTML that has no prose.
_SCRIPT: Final = re.compile(r"\s*<(script|style|pre)\b", re.IGNORECASE)


def markdown_to_text(text: str) -> str:
    """Return the prose of Markdown text, with one paragraph, heading or list item per line.

    Code blocks, tables, rules, images, comments, link targets and front matter are left out. The
    dialect is CommonMark with tables.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(_remove_front_matter(text))
    return "\n".join(line for line in _iter_lines(tokens) if line)


def _remove_front_matter(text: str) -> str:
    """Return the text without a block between two lines of three hyphens at its start."""
    lines = text.split("\n")
    if lines[0].strip() == "---":
        later_lines = [line.strip() for line in lines[1:]]
        if "---" in later_lines:
            lines = lines[later_lines.index("---") + 2 :]
    return "\n".join(lines)


def _iter_lines(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield the text of each paragraph, heading and list item, and of blocks of HTML."""
    is_table = False
    for token in tokens:
        if token.type in ("table_open", "table_close"):
            is_table = token.type == "table_open"
        elif token.type == "html_block" and not _SCRIPT.match(token.content):
            text = html.unescape(_HTML_TAG.sub("", _remove_comments(token.content)))
            yield " ".join(text.split())
        elif token.type == "inline" and not is_table:
            yield _CHECKBOX.sub("", _join_text(token.children or ()).strip())


def _remove_comments(text: str) -> str:
    """Return the text without HTML comments. A comment that is not closed is not removed."""
    parts: list[str] = []
    position = 0
    while True:
        start = text.find("<!--", position)
        end = text.find("-->", start + 4) if start >= 0 else -1
        if end < 0:
            break
        parts.append(text[position:start])
        position = end + 3
    return "".join([*parts, text[position:]])


def _join_text(tokens: Sequence[Token]) -> str:
    """Return the text of a paragraph on one line, without images and HTML tags."""
    parts = []
    for token in tokens:
        if token.type == "text":
            parts.append(_MISPLACED_EMPHASIS.sub(r"\1 ", token.content))
        elif token.type == "code_inline":
            parts.append(token.content)
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
    return "".join(parts)
