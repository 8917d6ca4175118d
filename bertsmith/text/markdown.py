"""Converts Markdown to plain prose for training."""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from bertsmith.text.line_layout import join_lines

# In some books, the closing underscore is after the space, as in "was _bound _to be".
_MISPLACED_EMPHASIS: Final = re.compile(r"(?<!\w)_(\w[^_\n]*?) _(?=\w)")
_CHECKBOX: Final = re.compile(r"^\[[ xX]\]\s+")
_HTML_TAG: Final = re.compile(r"</?[A-Za-z][^<>]*>")
#: The start of a block of HTML that has no prose.
_SCRIPT: Final = re.compile(r"\s*<(script|style|pre)\b", re.IGNORECASE)
#: A key of YAML at the start of a line, such as "title:". Longer text before a colon is prose.
_YAML_KEY: Final = re.compile(r"""["']?[\w.-]+( [\w.-]+){0,2}["']?\s*:(\s|$)""")
#: Any other line of YAML: blank, a comment, an item of a list, or a continued value.
_YAML_CONTINUATION: Final = re.compile(r"$|\s|#|-\s|-$|[\]}]")


def markdown_to_text(text: str) -> str:
    """Return the prose of Markdown text, with one paragraph, heading or list item per line.

    Code blocks, tables, rules, images, comments, link targets and front matter are left out. The
    dialect is CommonMark with tables.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(_remove_front_matter(text))
    return "\n".join(line for line in _iter_lines(tokens) if line)


def _remove_front_matter(text: str) -> str:
    """Return the text without its front matter: YAML between two lines of three hyphens.

    Other text between such lines, which are rules in Markdown, is kept.
    """
    lines = text.split("\n")
    if lines[0].rstrip() != "---":
        return text
    has_key = False
    for number, line in enumerate(lines[1:], 1):
        if line.rstrip() == "---":
            return "\n".join(lines[number + 1 :]) if has_key else text
        is_key = _YAML_KEY.match(line) is not None
        # A block that starts with a blank line is not front matter, for any reader of it.
        is_continuation = _YAML_CONTINUATION.match(line) and (number > 1 or line.strip())
        if not is_key and not is_continuation:
            return text
        has_key = has_key or is_key
    return text


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
    lines = [""]
    for token in tokens:
        if token.type == "text":
            lines[-1] += _MISPLACED_EMPHASIS.sub(r"\1 ", token.content)
        elif token.type == "code_inline":
            lines[-1] += token.content
        elif token.type in ("softbreak", "hardbreak"):
            lines.append("")
    return join_lines(lines)
