"""Converting Markdown to prose."""

import time

import pytest

from bertsmith.text.markdown import markdown_to_text


@pytest.mark.parametrize("mark", ["[", "![", "[x](", "<http://", "\n<!--", "# a" + " " * 30])
def test_unclosed_markup_takes_linear_time(mark: str) -> None:
    """Many unclosed brackets are parsed in seconds; a quadratic algorithm would take minutes."""
    start = time.process_time()
    assert markdown_to_text(mark * 100_000)
    assert markdown_to_text("#" + " " * 100_000 + "x") == "x"
    assert time.process_time() - start < 30


def test_images_heading_marks_and_comments_are_removed() -> None:
    """Images of any size, closing marks of headings, and closed comments are removed."""
    image = f"![a plot](data:image/png;base64,{'iVBOR' * 2000})"
    text = markdown_to_text(f"Before {image} and [after]({'u' * 5000}).")
    assert text == "Before  and after."
    assert markdown_to_text("## Title ##\n# C #\n# a#b") == "Title\nC\na#b"
    text = markdown_to_text("a <!-- one --> b <!-- two\n--> c <!-- open")
    assert text == "a  b  c <!-- open"


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        # A code span of three backticks on one line does not open a code block.
        ("A:\n```pip install x```\nB.\n\n```sh\nx\n```\nC.", "A: pip install x B.\nC."),
        ("1. One.\n\n    More.\n\n2. Two.\n\n       code", "One.\nMore.\nTwo."),
        ("- One.\n\n      code\n\n  More.", "One.\nMore."),
        ("`List<str>`, `<b>` and `__init__`", "List<str>, <b> and __init__"),
        ("[![Build](x.svg)](x) Text", "Text"),
        ("Here |x| is a norm, and |y| too.", "Here |x| is a norm, and |y| too."),
        ("<p>\n  <b>Some</b> text &amp; more\n</p>\n", "Some text & more"),
        ("<script>\nlet x = 1\n</script>\nText", "Text"),
        ("[ref][1] and [2]\n\n[1]: http://x.y\n", "ref and [2]"),
        ("Title\n=====\ntext\n\n| a | b |\n|---|---|\n| 1 | 2 |", "Title\ntext"),
        ("<https://x.y/z>", "https://x.y/z"),
    ],
)
def test_prose_of_markdown_is_kept_and_code_is_left_out(markdown: str, expected: str) -> None:
    """Blocks and spans have the bounds of CommonMark."""
    assert markdown_to_text(markdown) == expected


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("---\ntitle: x\n# comment\ntags:\n- a\n  - b\n\nkey two: >\n  text\n---\nText.", "Text."),
        # Model cards may have thousands of lines of results.
        ("---\nresults:\n" + "- value: 1\n" * 5000 + "---\nText.", "Text."),
        # Rules around text.
        ("---\n\nFirst: part.\n\n---\n\nSecond.", "First: part.\nSecond."),
        ("---\nFirst part.\n\n---\n\nSecond.", "First part.\nSecond."),
        (
            "---\nThere is one thing to say: yes.\n\n---\nEnd.",
            "There is one thing to say: yes.\nEnd.",
        ),
        ("---\n# Title\n\n---\nEnd.", "Title\nEnd."),
        ("---\nkey: value\n", "key: value"),
    ],
)
def test_only_yaml_is_front_matter(markdown: str, expected: str) -> None:
    """Text between two horizontal rules at the start of a file is kept."""
    assert markdown_to_text(markdown) == expected


def test_wrapped_japanese_markdown_has_no_spaces() -> None:
    """Lines of a paragraph are joined without a space between Japanese characters."""
    assert (
        markdown_to_text("吾輩は*猫*で\nある。\nIt is\na cat.") == "吾輩は猫である。 It is a cat."
    )
