"""How text is laid out is told from its lines, and sentences are cut within them.

These tests never open a file.
"""

import pytest

from bertsmith.text import line_layout
from bertsmith.text.sentences import split_sentences

WRAPPED = [
    "The rain had only ceased with the gray streaks of morning at Blazing",
    "Star, and the settlement awoke to a moral sense of cleanliness, and the",
    "finding of forgotten knives, tin cups, and smaller camp utensils, where",
    "the heavy showers had washed away the debris.",
]
VERSE = [
    "Tyger Tyger, burning bright,",
    "In the forests of the night;",
    "What immortal hand or eye,",
]
A_SENTENCE_A_LINE = ["One sentence stands here.", "Another one follows it!", "", "A third one?"]
PARAGRAPHS = ["One sentence. Another one. A third.", "", "Two more. They end here.", "", "A last."]


@pytest.mark.parametrize(
    ("lines", "wrapped"),
    [(WRAPPED, True), (VERSE, False), (A_SENTENCE_A_LINE, False), ([*WRAPPED, "x" * 200], False)],
)
def test_wrapped_text_is_told(lines: list[str], wrapped: bool) -> None:
    """Only lines of about equal width that end in the middle of sentences count as wrapped."""
    assert line_layout.is_wrapped(lines) is wrapped


@pytest.mark.parametrize(
    ("lines", "presplit"), [(A_SENTENCE_A_LINE, True), (PARAGRAPHS, False), (WRAPPED, False)]
)
def test_a_sentence_a_line_is_told(lines: list[str], presplit: bool) -> None:
    """Lines that hold one whole sentence each are the original's form; prose is not."""
    assert line_layout.is_presplit(lines) is presplit


def test_unwrapping_joins_lines_and_keeps_paragraphs() -> None:
    """Wrapped lines become one line a paragraph; other text is left as it is."""
    text = "\n".join([*WRAPPED, "", *WRAPPED])
    line = " ".join(WRAPPED)
    assert line_layout.unwrap_paragraphs(text) == f"{line}\n{line}"
    assert line_layout.unwrap_paragraphs("\n".join(VERSE)) == "\n".join(VERSE)


def test_sentences_end_at_their_marks_and_at_line_ends() -> None:
    """A heading does not run into the text below; abbreviations and numbers end nothing."""
    text = "The Cat\nMr. Smith has 1.5 cats, e.g. Tom.  They sleep!\n\n  Do they? "
    assert split_sentences(text) == [
        "The Cat",
        "Mr. Smith has 1.5 cats, e.g. Tom.",
        "They sleep!",
        "Do they?",
    ]
    assert split_sentences(" \n\n") == []


def test_presplit_text_is_cut_at_line_ends_alone() -> None:
    """A line with two sentences stays one where the text says that its lines are sentences."""
    assert split_sentences("One. Two.\n\n Three. \n", presplit=True) == ["One. Two.", "Three."]


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        ("ko", "나는 학교에 갔다. 그는 집에 왔다.", 2),
        ("zh", "今天天气很好。我们去吧!", 2),
        ("xx", "Alle kamen hin. Niemand ging weg.", 2),
    ],
)
def test_other_languages_have_sentences_too(language: str, text: str, count: int) -> None:
    """Korean, Chinese and a language that sentencex does not know are cut."""
    assert len(split_sentences(text, language)) == count
