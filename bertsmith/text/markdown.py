"""Converts Markdown to plain prose for training. This is not a full Markdown parser."""

import html
import re
from typing import Final

_FENCE: Final = re.compile(r"^ {0,3}(```+|~~~+)")
_RULE: Final = re.compile(r"^ {0,3}([-*_=]\s*){3,}$")
_HEADING: Final = re.compile(r"^ {0,3}#{1,6}\s+(.*)$")
_LIST_ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d{1,3}[.)])\s+(?:\[[ xX]\]\s+)?")
_QUOTE: Final = re.compile(r"^\s{0,3}(?:>\s?)+")
_TABLE: Final = re.compile(r"^\s*\|.*|^[^|\n]*\|[^|\n]*\|.*$|^\s*:?-{3,}:?\s*\|.*$")
_LINK_DEFINITION: Final = re.compile(r"^ {0,3}\[[^\]]+\]:\s+\S+")
_HTML_TAG: Final = re.compile(r"</?[A-Za-z][^<>\n]*>")
# Lengths are limited because the text after each unclosed bracket is searched to the end of the
# paragraph, so many unclosed brackets would take quadratic time. Link targets can be long (data
# URLs of images), so their length is not limited. Instead, ``_remove_inline_markup`` searches for
# them only before the last closing parenthesis.
_REFERENCE: Final = r"\[[^\]\n]{0,500}\]"
_IMAGE_REFERENCE: Final = re.compile(r"!\[[^\]\n]{0,500}\]" + _REFERENCE)
_IMAGE: Final = re.compile(r"!\[[^\]\n]{0,500}\](?:\([^)\n]*\)|" + _REFERENCE + ")")
_LINK_REFERENCE: Final = re.compile(r"\[([^\]\n]{1,500})\]" + _REFERENCE)
_LINK: Final = re.compile(r"\[([^\]\n]{1,500})\](?:\([^)\n]*\)|" + _REFERENCE + ")")
_AUTOLINK: Final = re.compile(r"<(https?://[^>\s]{1,2000})>")
_CODE: Final = re.compile(r"(`+)(.+?)\1")
_STRONG: Final = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1")
_STAR_EMPHASIS: Final = re.compile(r"\*(?=\S)([^*\n]+?)(?<=\S)\*")
# An underscore inside a word (snake_case) is not emphasis.
_UNDERSCORE_EMPHASIS: Final = re.compile(r"(?<!\w)_(?=\S)([^_\n]+?)(?<=\S)_(?!\w)")
# In some books, the closing underscore is after the space, as in "was _bound _to be".
_MISPLACED_EMPHASIS: Final = re.compile(r"(?<!\w)_(\w[^_\n]*?) _(?=\w)")
_ESCAPE: Final = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|>~<])")


def markdown_to_text(text: str) -> str:
    """Return the prose of Markdown text, with one paragraph, heading or list item per line.

    Code blocks, tables, rules, images, comments, link targets and front matter are left out.
    """
    blocks: list[list[str]] = [[]]
    for line in _remove_code_blocks(_remove_comments(text).split("\n")):
        _add_line(line, blocks)
    lines = [_remove_inline_markup(" ".join(block)) for block in blocks]
    return "\n".join(line for line in lines if line)


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


def _remove_code_blocks(lines: list[str]) -> list[str]:
    """Return the lines outside front matter and fenced or indented code blocks."""
    if lines and lines[0].strip() == "---":
        later_lines = [line.strip() for line in lines[1:]]
        if "---" in later_lines:
            lines = lines[later_lines.index("---") + 2 :]
    text_lines: list[str] = []
    fence = ""
    for line in lines:
        if match := _FENCE.match(line):
            marker = match[1]
            if not fence:
                fence = marker
            elif marker[0] == fence[0] and len(marker) >= len(fence):
                fence = ""
            continue
        if fence:
            continue
        # Indented lines are code unless they continue a paragraph or are a list item.
        starts_block = (
            not text_lines or not text_lines[-1].strip() or bool(_RULE.match(text_lines[-1]))
        )
        if line.startswith(("    ", "\t")) and starts_block and not _LIST_ITEM.match(line):
            continue
        text_lines.append(line)
    return text_lines


def _add_line(line: str, blocks: list[list[str]]) -> None:
    """Add a line to the last block, or start a new block with the line."""
    line = _QUOTE.sub("", line)
    is_blank = not line.strip()
    if heading := _HEADING.match(line):
        blocks += [[heading[1].rstrip("#").rstrip()], []]
    elif is_blank or _RULE.match(line) or _TABLE.match(line) or _LINK_DEFINITION.match(line):
        blocks.append([])
    elif item := _LIST_ITEM.match(line):
        blocks.append([line[item.end() :].strip()])
    else:
        blocks[-1].append(line.strip())


def _remove_inline_markup(line: str) -> str:
    """Remove the markup inside a paragraph."""
    end = line.rfind(")") + 1
    line = _IMAGE_REFERENCE.sub("", _IMAGE.sub("", line[:end]) + line[end:])
    end = line.rfind(")") + 1
    line = _LINK_REFERENCE.sub(r"\1", _LINK.sub(r"\1", line[:end]) + line[end:])
    line = _AUTOLINK.sub(r"\1", line)
    line = _CODE.sub(r"\2", line)
    line = _HTML_TAG.sub("", line)
    line = _STRONG.sub(r"\2", line)
    line = _STAR_EMPHASIS.sub(r"\1", line)
    line = _MISPLACED_EMPHASIS.sub(r"\1 ", _UNDERSCORE_EMPHASIS.sub(r"\1", line))
    return html.unescape(_ESCAPE.sub(r"\1", line)).strip()
