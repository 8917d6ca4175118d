"""Turns a documentation string into English: sentences, without code, tables and markup.

It never knows which module the string documents, nor whether it was seen before.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Final

from bertsmith.text.sentences import split_sentences


def _set(words: str) -> frozenset[str]:
    """Return the words between the bars."""
    return frozenset(words.split("|"))


#: Sections whose lines are names and references, not sentences.
_SILENT: Final = _set(
    "see also|references|attributes|methods|shape|examples|example|usage|index|"
    "bibliography|links|keywords|author|authors|license|copyright"
)
#: Directives whose indented text is prose.
_SPEAKING: Final = _set(
    "note|warning|tip|important|caution|hint|danger|attention|seealso|admonition|"
    "versionadded|versionchanged|deprecated|rubric"
)
_UNDERLINE: Final = re.compile(r"^\s*([-=~^\"'`#*+.])\1{2,}\s*$")
_DIRECTIVE: Final = re.compile(r"^\s*\.\.\s*(?:([\w:-]+)::|\S|$)")
_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_DOCTEST: Final = re.compile(r"^\s*(>>>|\.\.\. |In \[\d|Out\[\d|\$ )")
_TABLE: Final = re.compile(r"^\s*[+|].*[+|]\s*$|^\s*(={2,}|-{2,})(\s+(={2,}|-{2,}))+\s*$")
_HEADING: Final = re.compile(r"^\s*(\w[\w /]{2,30}):{1,2}\s*$")
_FIELD: Final = re.compile(r"^:(\w+)(?:\s+[^:\n]*)?:\s*(.*)$")
#: Fields of the Sphinx form that hold a type or a name, no sentence.
_TYPES: Final = frozenset({"type", "rtype", "vartype", "meta", "members"})
_NUMPY: Final = re.compile(r"^[*`\w][\w`*, .]*\s:(\s.*)?$")
_GOOGLE: Final = re.compile(
    r"^[*`]{0,2}[\w.]+[`]{0,2}\s*(?:\([^)]*(?:\([^)]*\)[^)]*)*\))?\s*:\s+(.*)$"
)
_BULLET: Final = re.compile(r"^\s*(?:[-*+•]|\(?\w{1,2}[.)])\s+")
_LEADING: Final = re.compile(r"^[\w`*.]+\s+--?-?\s+")

#: Stands for mathematics; a sentence that holds it is left out.
_MATH: Final = "\x00"
#: What is looked for first, what then is replaced, and by what.
_ROLES: Final = (
    (":math:", re.compile(r":math:`[^`]*`"), _MATH),
    ("$", re.compile(r"\$[^$\n]+\$"), _MATH),
    (":", re.compile(r":[\w:.+-]+:`!?([^`<]*?)\s*<[^`>]*>`"), r"\1"),
    (":`~", re.compile(r":[\w:.+-]+:`~[^`]*?([^`.]+)`"), r"\1"),
    (":`", re.compile(r":[\w:.+-]+:`!?([^`]*)`"), r"\1"),
    ("<", re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    ("[`", re.compile(r"\[`~?([\w.]+)`\]"), r"\1"),
    ("``", re.compile(r"``([^`]*)``"), r"\1"),
    ("`", re.compile(r"`~?([^`]*)`_{0,2}"), r"\1"),
    # "is described in [1]_" is no sentence without the reference; "is known [1]_" is one.
    ("]_", re.compile(r"\b(?:in|from|by|see|of|and|to)\s+\[(?:#?\w+|\*)\]_", re.IGNORECASE), _MATH),
    ("]_", re.compile(r"\s*\[(?:#?\w+|\*)\]_"), ""),
    ("](", re.compile(r"!?\[([^\]\n]+)\]\([^)\n]*\)"), r"\1"),
    ("**", re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),
    ("*", re.compile(r"(?<!\w)\*([^*\s][^*\n]*?)\*(?!\w)"), r"\1"),
    ("_", re.compile(r"(?<!\w)_([^_\s][^_\n]*?)_(?!\w)"), r"\1"),
    ("<", re.compile(r"</?[a-zA-Z][^<>\n]*>"), ""),
    ("\\", re.compile(r"\\(?=[*_ `|\\])"), ""),
)

#: The dot in a dotted name (not in "e.g."), which ends no sentence, and its stand-in meanwhile.
_INNER_DOT: Final = re.compile(r"(?<=\w\w)\.(?=[A-Za-z_]{2})")
_DOT: Final = "\x01"

#: Words that hardly any English sentence of some length is without.
_COMMON: Final = _set(
    "the|a|an|of|to|is|are|in|and|for|this|that|be|with|if|it|or|on|by|as|from|not|can|will|"
    "should|must|may|when|which|at|has|have|was|but|you|we|its|all|no|any|use|used|returns|"
    "return|only|each|these|than|does|do|into|other|same"
)
_WORD: Final = re.compile(r"^[(\"'“‘]*[A-Za-z]+(?:[-'’/][A-Za-z]+)*[)\"'”’.,;:!?]*$")  # noqa: RUF001
_NOISE: Final = re.compile(r"[=<>{}|\\^~@#$%&*_\x00]|\(\)|://|->|\+\+|\[|\]|\d\.\d+\.")
#: What a sentence may begin and must end with.
_BEGINS: Final = re.compile(r"^[\"'“(]?[A-Z]")
_ENDS: Final = re.compile(r"[.!?][\"'”)]?$")


def extract_prose(docstring: str) -> list[list[str]]:
    """Return the paragraphs of a documentation string, each as its sentences."""
    paragraphs = []
    for block in _blocks(inspect.cleandoc(docstring).expandtabs().split("\n")):
        text = _INNER_DOT.sub(_DOT, _unmarked(" ".join(block)))
        found = [sentence.replace(_DOT, ".") for sentence in split_sentences(text)]
        if sentences := [sentence for sentence in found if is_english(sentence)]:
            paragraphs.append(sentences)
    return paragraphs


def is_english(sentence: str) -> bool:
    """Tell whether a sentence reads as English: words mostly, some of them very common.

    It begins with a capital, ends with a full stop or the like, and holds few names of code.
    """
    if not (_BEGINS.match(sentence) and _ENDS.search(sentence)):
        return False
    words = sentence.split()
    if not 4 <= len(words) <= 80 or sentence.count("(") != sentence.count(")"):
        return False
    plain = sum(_WORD.match(word) is not None for word in words)
    noise = len(_NOISE.findall(sentence))
    common = sum(word.strip("(\"'.,;:").lower() in _COMMON for word in words)
    return (
        _MATH not in sentence
        and plain >= 0.8 * len(words)
        and noise <= len(words) / 15
        and common >= max(1, len(words) / 8)
    )


def _unmarked(text: str) -> str:
    for mark, pattern, replacement in _ROLES:
        # Most text is without most marks, and looking for a character is quick.
        if mark in text:
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield blocks of lines that are prose, the marks of lists and fields taken off."""
    block: list[str] = []
    for line in _prose_lines(lines):
        own, begins = _item(line)
        if begins or not own:
            if block:
                yield block
            block = []
        if own:
            block.append(own)
    if block:
        yield block


def _item(line: str) -> tuple[str, bool]:
    """Return the prose of a line, and whether it begins a block of its own."""
    text = line.strip()
    if field := _FIELD.match(text):
        return ("" if field[1] in _TYPES else field[2]), True
    if bullet := _BULLET.match(text):
        rest = text[bullet.end() :]
        named = _GOOGLE.match(rest)
        return (named[1] if named else _LEADING.sub("", rest)), True
    if _NUMPY.match(text):
        return "", True
    if (named := _GOOGLE.match(text)) and line[:1] == " ":
        return named[1], True
    return text, False


def _prose_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines outside of code, tables, doctests, directives and silent sections."""
    skip = _Skipper()
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if skip.passes(line, below) and not _is_label(line, below):
            yield line
        else:
            # What is left out parts the text around it.
            yield ""


def _is_label(line: str, below: str) -> bool:
    """Tell whether a short line only names what the deeper lines below it explain."""
    text = line.strip()
    deeper = bool(below.strip()) and _indent(below) > _indent(line)
    return deeper and len(text) <= 40 and not _ENDS.search(text) and ":" not in text[:-1]


class _Skipper:
    """Walks down a documentation string and knows what part of it the next line stands in."""

    def __init__(self) -> None:
        self._fenced = False
        self._doctest = False
        # Lines deeper than this are left out; None: no such block is open.
        self._deeper_than: int | None = None
        # The indentation of a silent section's heading.
        self._silent: int | None = None

    def passes(self, line: str, below: str) -> bool:
        """Tell whether ``line`` is prose; ``below`` is the next one."""
        if _FENCE.match(line):
            self._fenced = not self._fenced
            return False
        if self._fenced:
            return False
        if not line.strip():
            self._doctest = False
            return True
        if _DOCTEST.match(line):
            self._doctest = True
        if self._doctest or self._in_block(line) or self._is_heading(line, below):
            return False
        if _UNDERLINE.match(line) or _TABLE.match(line):
            return False
        return not self._opens_block(line) and self._silent is None

    def _in_block(self, line: str) -> bool:
        if self._deeper_than is None:
            return False
        if _indent(line) > self._deeper_than:
            return True
        self._deeper_than = None
        return False

    def _is_heading(self, line: str, below: str) -> bool:
        """Notice a section's heading, underlined or ended by a colon."""
        underlined = bool(_UNDERLINE.match(below)) and not _UNDERLINE.match(line)
        named = _HEADING.match(line)
        if self._silent is not None and not underlined and _indent(line) <= self._silent:
            self._silent = None if named or self._silent > 0 else self._silent
        if not underlined and not (named and _indent(below) > _indent(line)):
            return False
        title = named[1] if named else line
        silent = title.strip().rstrip(":").lower() in _SILENT
        self._silent = _indent(line) if silent else None
        return True

    def _opens_block(self, line: str) -> bool:
        """Notice what opens an indented block of no prose; the line itself may be prose still."""
        if directive := _DIRECTIVE.match(line):
            if (directive[1] or "").lower() not in _SPEAKING:
                self._deeper_than = _indent(line)
            return True
        if line.rstrip().endswith("::"):
            self._deeper_than = _indent(line)
        return False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
