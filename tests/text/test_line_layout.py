"""Detecting the layout of text, joining wrapped lines, and splitting sentences."""

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
PRESPLIT = ["One sentence stands here.", "Another one follows it!", "", "A third one?"]
PARAGRAPHS = ["One sentence. Another one. A third.", "", "Two more. They end here.", "", "A last."]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [(WRAPPED, True), (VERSE, False), (PRESPLIT, False), ([*WRAPPED, "x" * 200], False)],
)
def test_wrapped_text_is_detected(lines: list[str], expected: bool) -> None:
    """Wrapped text has lines of about equal length that end in the middle of a sentence."""
    assert line_layout.is_wrapped(lines) is expected


@pytest.mark.parametrize(
    ("lines", "expected"), [(PRESPLIT, True), (PARAGRAPHS, False), (WRAPPED, False)]
)
def test_presplit_text_is_detected(lines: list[str], expected: bool) -> None:
    """Presplit text, the input format of the original BERT, has one sentence per line."""
    assert line_layout.is_presplit(lines) is expected


def test_wrapped_paragraphs_are_joined() -> None:
    """Each paragraph of wrapped text becomes one line; other text is not changed."""
    text = "\n".join([*WRAPPED, "", *WRAPPED])
    paragraph = " ".join(WRAPPED)
    assert line_layout.unwrap_paragraphs(text) == f"{paragraph}\n{paragraph}"
    assert line_layout.unwrap_paragraphs("\n".join(VERSE)) == "\n".join(VERSE)


def test_sentences_end_at_punctuation_and_line_breaks() -> None:
    """A heading is separate from the text below; abbreviations and numbers do not end sentences."""
    text = "The Cat\nMr. Smith has 1.5 cats, e.g. Tom.  They sleep!\n\n  Do they? "
    assert split_sentences(text) == [
        "The Cat",
        "Mr. Smith has 1.5 cats, e.g. Tom.",
        "They sleep!",
        "Do they?",
    ]
    assert split_sentences(" \n\n") == []


def test_presplit_text_is_split_only_at_line_breaks() -> None:
    """Presplit text is not split at a full stop inside a line."""
    assert split_sentences("One. Two.\n\n Three. \n", presplit=True) == ["One. Two.", "Three."]


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        ("ko", "나는 학교에 갔다. 그는 집에 왔다.", 2),
        ("zh", "今天天气很好。我们去吧!", 2),
        ("xx", "Alle kamen hin. Niemand ging weg.", 2),
    ],
)
def test_other_languages_are_split(language: str, text: str, count: int) -> None:
    """Korean, Chinese and a language that sentencex does not know are split."""
    assert len(split_sentences(text, language)) == count
