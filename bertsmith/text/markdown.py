"""Takes the marks of Markdown away and leaves the prose: paragraphs on lines.

It never knows where the text came from; it aims at good training text, not at a full parse.
"""

import html
import re
from typing import Final

_FENCE: Final = re.compile(r"^ {0,3}(```+|~~~+)")
_RULE: Final = re.compile(r"^ {0,3}([-*_=]\s*){3,}$")
_HEADING: Final = re.compile(r"^ {0,3}#{1,6}\s+(.*)$")
_ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d{1,3}[.)])\s+(?:\[[ xX]\]\s+)?")
_QUOTE: Final = re.compile(r"^\s{0,3}(?:>\s?)+")
_TABLE: Final = re.compile(r"^\s*\|.*|^[^|\n]*\|[^|\n]*\|.*$|^\s*:?-{3,}:?\s*\|.*$")
_DEFINITION: Final = re.compile(r"^ {0,3}\[[^\]]+\]:\s+\S+")
_TAG: Final = re.compile(r"</?[A-Za-z][^<>\n]*>")
# Lengths are bounded because a bracket that never closes would be searched for to the end of the
# paragraph: many of them took quadratic time. Targets may be long (images as data), so they are
# unbounded and looked for only where a closing parenthesis follows.
_REFERENCE: Final = r"\[[^\]\n]{0,500}\]"
_IMAGE_REFERENCE: Final = re.compile(r"!\[[^\]\n]{0,500}\]" + _REFERENCE)
_IMAGE: Final = re.compile(r"!\[[^\]\n]{0,500}\](?:\([^)\n]*\)|" + _REFERENCE + ")")
_LINK_REFERENCE: Final = re.compile(r"\[([^\]\n]{1,500})\]" + _REFERENCE)
_LINK: Final = re.compile(r"\[([^\]\n]{1,500})\](?:\([^)\n]*\)|" + _REFERENCE + ")")
_AUTOLINK: Final = re.compile(r"<(https?://[^>\s]{1,2000})>")
_CODE: Final = re.compile(r"(`+)(.+?)\1")
_STRONG: Final = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1")
_STAR: Final = re.compile(r"\*(?=\S)([^*\n]+?)(?<=\S)\*")
# An underscore inside a word (snake_case) is no emphasis.
_UNDER: Final = re.compile(r"(?<!\w)_(?=\S)([^_\n]+?)(?<=\S)_(?!\w)")
# Some books close emphasis after the blank, as in "was _bound _to be".
_LOOSE: Final = re.compile(r"(?<!\w)_(\w[^_\n]*?) _(?=\w)")
_ESCAPE: Final = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|>~<])")


def markdown_to_text(text: str) -> str:
    """Return the prose of Markdown ``text``, one paragraph, heading or list item a line.

    Code blocks, tables, rules, images, comments, link targets and front matter are left out.
    """
    blocks: list[list[str]] = [[]]
    for line in _outside_code(_without_comments(text).split("\n")):
        _place(line, blocks)
    lines = [_inline(" ".join(block)) for block in blocks]
    return "\n".join(line for line in lines if line)


def _without_comments(text: str) -> str:
    """Return the text without HTML comments; one that never ends is kept."""
    kept: list[str] = []
    place = 0
    while (start := text.find("<!--", place)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        kept.append(text[place:start])
        place = end + 3
    return "".join([*kept, text[place:]])


def _outside_code(lines: list[str]) -> list[str]:
    """Return the lines that stand neither in front matter nor in a fenced or indented block."""
    if lines and lines[0].strip() == "---" and "---" in (rest := [x.strip() for x in lines[1:]]):
        lines = lines[rest.index("---") + 2 :]
    kept: list[str] = []
    fence = ""
    for line in lines:
        if match := _FENCE.match(line):
            mark = match[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
            continue
        if fence:
            continue
        # Four spaces are code where no paragraph goes on, unless they begin a list item.
        begins = not kept or not kept[-1].strip() or bool(_RULE.match(kept[-1]))
        if line.startswith(("    ", "\t")) and begins and not _ITEM.match(line):
            continue
        kept.append(line)
    return kept


def _place(line: str, blocks: list[list[str]]) -> None:
    """Put a line into the block where it belongs."""
    line = _QUOTE.sub("", line)
    if heading := _HEADING.match(line):
        blocks += [[heading[1].rstrip("#").rstrip()], []]
    elif not line.strip() or _RULE.match(line) or _TABLE.match(line) or _DEFINITION.match(line):
        blocks.append([])
    elif item := _ITEM.match(line):
        blocks.append([line[item.end() :].strip()])
    else:
        blocks[-1].append(line.strip())


def _inline(line: str) -> str:
    """Take the marks inside a paragraph away."""
    end = line.rfind(")") + 1
    line = _IMAGE_REFERENCE.sub("", _IMAGE.sub("", line[:end]) + line[end:])
    end = line.rfind(")") + 1
    line = _LINK_REFERENCE.sub(r"\1", _LINK.sub(r"\1", line[:end]) + line[end:])
    line = _AUTOLINK.sub(r"\1", line)
    line = _CODE.sub(r"\2", line)
    line = _TAG.sub("", line)
    line = _STRONG.sub(r"\2", line)
    line = _STAR.sub(r"\1", line)
    line = _LOOSE.sub(r"\1 ", _UNDER.sub(r"\1", line))
    return html.unescape(_ESCAPE.sub(r"\1", line)).strip()
