"""Extracts English sentences from a docstring, without code, tables and markup."""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Final

from bertsmith.text.sentences import split_sentences


def _word_set(words: str) -> frozenset[str]:
    """Return the set of words in a string that separates them by "|"."""
    return frozenset(words.split("|"))


#: Sections that contain names and references instead of sentences.
_SKIPPED_SECTIONS: Final = _word_set(
    "see also|references|attributes|methods|shape|examples|example|usage|index|"
    "bibliography|links|keywords|author|authors|license|copyright"
)
#: Directives whose indented content is prose.
_PROSE_DIRECTIVES: Final = _word_set(
    "note|warning|tip|important|caution|hint|danger|attention|seealso|admonition|"
    "versionadded|versionchanged|deprecated|rubric"
)
_UNDERLINE: Final = re.compile(r"^\s*([-=~^\"'`#*+.])\1{2,}\s*$")
_DIRECTIVE: Final = re.compile(r"^\s*\.\.\s*(?:([\w:-]+)::|\S|$)")
_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_DOCTEST: Final = re.compile(r"^\s*(>>>|\.\.\. |In \[\d|Out\[\d|\$ )")
_TABLE: Final = re.compile(r"^\s*[+|].*[+|]\s*$|^\s*(={2,}|-{2,})(\s+(={2,}|-{2,}))+\s*$")
_HEADING: Final = re.compile(r"^\s*(\w[\w /]{2,30}):{1,2}\s*$")
_SPHINX_FIELD: Final = re.compile(r"^:(\w+)(?:\s+[^:\n]*)?:\s*(.*)$")
#: Sphinx fields that contain a type or a name instead of a sentence.
_TYPE_FIELDS: Final = frozenset({"type", "rtype", "vartype", "meta", "members"})
_NUMPY_PARAMETER: Final = re.compile(r"^[*`\w][\w`*, .]*\s:(\s.*)?$")
_GOOGLE_PARAMETER: Final = re.compile(
    r"^[*`]{0,2}[\w.]+[`]{0,2}\s*(?:\([^)]*(?:\([^)]*\)[^)]*)*\))?\s*:\s+(.*)$"
)
_BULLET: Final = re.compile(r"^\s*(?:[-*+•]|\(?\w{1,2}[.)])\s+")
_NAME_AND_DASH: Final = re.compile(r"^[\w`*.]+\s+--?-?\s+")

#: Placeholder for mathematics. Sentences that contain it are left out.
_MATH_PLACEHOLDER: Final = "\x00"
#: Markup to replace: a string that must occur, a pattern, and its replacement.
_MARKUP: Final = (
    (":math:", re.compile(r":math:`[^`]*`"), _MATH_PLACEHOLDER),
    ("$", re.compile(r"\$[^$\n]+\$"), _MATH_PLACEHOLDER),
    (":", re.compile(r":[\w:.+-]+:`!?([^`<]*?)\s*<[^`>]*>`"), r"\1"),
    (":`~", re.compile(r":[\w:.+-]+:`~[^`]*?([^`.]+)`"), r"\1"),
    (":`", re.compile(r":[\w:.+-]+:`!?([^`]*)`"), r"\1"),
    ("<", re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    ("[`", re.compile(r"\[`~?([\w.]+)`\]"), r"\1"),
    ("``", re.compile(r"``([^`]*)``"), r"\1"),
    ("`", re.compile(r"`~?([^`]*)`_{0,2}"), r"\1"),
    # "is described in [1]_" is incomplete without the reference; "is known [1]_" is not.
    (
        "]_",
        re.compile(r"\b(?:in|from|by|see|of|and|to)\s+\[(?:#?\w+|\*)\]_", re.IGNORECASE),
        _MATH_PLACEHOLDER,
    ),
    ("]_", re.compile(r"\s*\[(?:#?\w+|\*)\]_"), ""),
    ("](", re.compile(r"!?\[([^\]\n]+)\]\([^)\n]*\)"), r"\1"),
    ("**", re.compile(r"\*\*([^*\n]+)\*\*"), r"\1"),
    ("*", re.compile(r"(?<!\w)\*([^*\s][^*\n]*?)\*(?!\w)"), r"\1"),
    ("_", re.compile(r"(?<!\w)_([^_\s][^_\n]*?)_(?!\w)"), r"\1"),
    ("<", re.compile(r"</?[a-zA-Z][^<>\n]*>"), ""),
    ("\\", re.compile(r"\\(?=[*_ `|\\])"), ""),
)

#: A dot inside a dotted name (but not in "e.g."), which does not end a sentence. A placeholder
#: replaces such dots during sentence splitting.
_INNER_DOT: Final = re.compile(r"(?<=\w\w)\.(?=[A-Za-z_]{2})")
_DOT_PLACEHOLDER: Final = "\x01"

#: Very common words. Nearly every English sentence has some of them.
_COMMON_WORDS: Final = _word_set(
    "the|a|an|of|to|is|are|in|and|for|this|that|be|with|if|it|or|on|by|as|from|not|can|will|"
    "should|must|may|when|which|at|has|have|was|but|you|we|its|all|no|any|use|used|returns|"
    "return|only|each|these|than|does|do|into|other|same"
)
_WORD: Final = re.compile(r"^[(\"'“‘]*[A-Za-z]+(?:[-'’/][A-Za-z]+)*[)\"'”’.,;:!?]*$")  # noqa: RUF001
_CODE_SYMBOLS: Final = re.compile(r"[=<>{}|\\^~@#$%&*_\x00]|\(\)|://|->|\+\+|\[|\]|\d\.\d+\.")
_SENTENCE_START: Final = re.compile(r"^[\"'“(]?[A-Z]")
_SENTENCE_END: Final = re.compile(r"[.!?][\"'”)]?$")


def extract_prose(docstring: str) -> list[list[str]]:
    """Return the paragraphs of a docstring, each as a list of its English sentences."""
    paragraphs = []
    for block in _iterate_blocks(inspect.cleandoc(docstring).expandtabs().split("\n")):
        text = _INNER_DOT.sub(_DOT_PLACEHOLDER, _remove_markup(" ".join(block)))
        sentences = [sentence.replace(_DOT_PLACEHOLDER, ".") for sentence in split_sentences(text)]
        english_sentences = [sentence for sentence in sentences if is_english(sentence)]
        if english_sentences:
            paragraphs.append(english_sentences)
    return paragraphs


def is_english(sentence: str) -> bool:
    """Return whether a sentence reads as English.

    An English sentence starts with a capital, ends with a full stop, question mark or exclamation
    mark, consists mostly of words, contains some very common words, and has few code symbols.
    """
    if not (_SENTENCE_START.match(sentence) and _SENTENCE_END.search(sentence)):
        return False
    words = sentence.split()
    if not 4 <= len(words) <= 80 or sentence.count("(") != sentence.count(")"):
        return False
    num_plain = sum(_WORD.match(word) is not None for word in words)
    num_symbols = len(_CODE_SYMBOLS.findall(sentence))
    num_common = sum(word.strip("(\"'.,;:").lower() in _COMMON_WORDS for word in words)
    return (
        _MATH_PLACEHOLDER not in sentence
        and num_plain >= 0.8 * len(words)
        and num_symbols <= len(words) / 15
        and num_common >= max(1, len(words) / 8)
    )


def _remove_markup(text: str) -> str:
    for required, pattern, replacement in _MARKUP:
        # Most texts lack most kinds of markup, and a substring search is fast.
        if required in text:
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _iterate_blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield blocks of prose lines, without the markers of lists and fields."""
    block: list[str] = []
    for line in _iterate_prose_lines(lines):
        text, starts_block = _parse_item(line)
        if starts_block or not text:
            if block:
                yield block
            block = []
        if text:
            block.append(text)
    if block:
        yield block


def _parse_item(line: str) -> tuple[str, bool]:
    """Return the prose of a line, and whether the line starts a new block."""
    text = line.strip()
    if field := _SPHINX_FIELD.match(text):
        return ("" if field[1] in _TYPE_FIELDS else field[2]), True
    if bullet := _BULLET.match(text):
        item = text[bullet.end() :]
        parameter = _GOOGLE_PARAMETER.match(item)
        return (parameter[1] if parameter else _NAME_AND_DASH.sub("", item)), True
    if _NUMPY_PARAMETER.match(text):
        return "", True
    if (parameter := _GOOGLE_PARAMETER.match(text)) and line[:1] == " ":
        return parameter[1], True
    return text, False


def _iterate_prose_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of prose, without code, tables, doctests, directives and skipped sections.

    An empty line replaces each line that is left out, to separate the text before and after it.
    """
    line_filter = _LineFilter()
    for number, line in enumerate(lines):
        next_line = lines[number + 1] if number + 1 < len(lines) else ""
        if line_filter.accept(line, next_line) and not _is_label(line, next_line):
            yield line
        else:
            yield ""


def _is_label(line: str, next_line: str) -> bool:
    """Return whether a line is a short label that the indented lines below it explain."""
    text = line.strip()
    is_followed_by_indent = bool(next_line.strip()) and _measure_indent(
        next_line
    ) > _measure_indent(line)
    is_phrase = not _SENTENCE_END.search(text) and ":" not in text[:-1]
    return is_followed_by_indent and len(text) <= 40 and is_phrase


class _LineFilter:
    """Distinguishes prose from other lines by the structure of the docstring so far."""

    def __init__(self) -> None:
        self._in_fence = False
        self._in_doctest = False
        # Indentation of the line that opened a skipped block; None outside of blocks.
        self._block_indent: int | None = None
        # Indentation of the heading of a skipped section; None outside of such sections.
        self._section_indent: int | None = None

    def accept(self, line: str, next_line: str) -> bool:
        """Return whether ``line`` is prose, and update the state. Call this for every line."""
        if _FENCE.match(line):
            self._in_fence = not self._in_fence
            return False
        if self._in_fence:
            return False
        if not line.strip():
            self._in_doctest = False
            return True
        if _DOCTEST.match(line):
            self._in_doctest = True
        if self._in_doctest or self._continue_block(line) or self._parse_heading(line, next_line):
            return False
        if _UNDERLINE.match(line) or _TABLE.match(line):
            return False
        return not self._parse_block_start(line) and self._section_indent is None

    def _continue_block(self, line: str) -> bool:
        """Return whether the skipped block continues with this line; end the block if not."""
        if self._block_indent is None:
            return False
        if _measure_indent(line) > self._block_indent:
            return True
        self._block_indent = None
        return False

    def _parse_heading(self, line: str, next_line: str) -> bool:
        """Return whether the line is a heading, underlined or with a colon; update the section."""
        indent = _measure_indent(line)
        is_underlined = bool(_UNDERLINE.match(next_line)) and not _UNDERLINE.match(line)
        match = _HEADING.match(line)
        section_indent = self._section_indent
        if section_indent is not None and not is_underlined and indent <= section_indent:
            # The text below a NumPy heading at the left margin is not indented either, so it does
            # not end the section.
            may_be_section_text = section_indent == 0 and not match
            if not may_be_section_text:
                self._section_indent = None
        if not is_underlined and not (match and _measure_indent(next_line) > indent):
            return False
        title = match[1] if match else line
        is_skipped = title.strip().rstrip(":").lower() in _SKIPPED_SECTIONS
        self._section_indent = indent if is_skipped else None
        return True

    def _parse_block_start(self, line: str) -> bool:
        """Detect a line that opens an indented block, and update the state.

        Returns:
            Whether the line is a directive. The result is False for a line that ends with "::" and
            opens a code block, because such a line may be prose.
        """
        if directive := _DIRECTIVE.match(line):
            if (directive[1] or "").lower() not in _PROSE_DIRECTIVES:
                self._block_indent = _measure_indent(line)
            return True
        if line.rstrip().endswith("::"):
            self._block_indent = _measure_indent(line)
        return False


def _measure_indent(line: str) -> int:
    return len(line) - len(line.lstrip())
