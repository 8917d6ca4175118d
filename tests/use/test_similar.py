"""One word in several sentences: distances, what stands around it, and the picture.

These tests never judge whether a meaning is told apart.
"""

import warnings
from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import InputError
from bertsmith.use import fonts
from bertsmith.use.embed import Embedder
from bertsmith.use.similar import cosine_distances, plot_distances, similar

TEXTS = [
    "a hammer and another hammer",
    "$5 for the hammer, and $6",
    "대장간 hammer\t망치",
    "\U0010ffff\x07 hammer " + "of the smith " * 9,
]


def test_distances_are_one_minus_cosine(directory: Path) -> None:
    """Symmetric, 0 with itself, as computed pair by pair from the vectors of the word."""
    embedder = Embedder.load(directory)
    found = similar(embedder, TEXTS, "hammer", layer=1)
    own = [place.vector for place in embedder.encode_word(TEXTS, "hammer", layer=1)]
    assert [place.text for place in found.occurrences] == [0, 0, 1, 2, 3]
    for row, one in enumerate(own):
        for column, other in enumerate(own):
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert found.distances[row, column] == pytest.approx(1 - cosine, abs=1e-5)
    assert np.diag(found.distances).tolist() == [0.0] * 5
    assert cosine_distances(np.zeros((2, 3), np.float32)).tolist() == [[0, 1], [1, 0]]
    assert np.array_equal(similar(directory, TEXTS, "hammer", layer=1).distances, found.distances)


def test_the_word_is_shown_where_it_stands(directory: Path) -> None:
    """With some characters on both sides, in one line, the word in brackets."""
    found = similar(directory, TEXTS, "hammer")
    assert found.contexts[:4] == [
        "a [hammer] and another hammer", "a hammer and another [hammer]",
        "$5 for the [hammer], and $6", "대장간 [hammer] 망치",
    ]  # fmt: skip
    assert found.contexts[4].endswith("[hammer] of the smith of the smi…")
    told = found.to_json()
    assert (told["word"], len(told["places"]), len(told["distances"])) == ("hammer", 5, 5)


def test_texts_without_the_word_are_left_out_only_if_asked(directory: Path) -> None:
    """Else they are an error; a word that stands nowhere, or too often, is one always."""
    with pytest.raises(InputError, match="text 1: the word 'hammer' is not in 'a smith'"):
        similar(directory, ["a smith", *TEXTS], "hammer")
    found = similar(directory, ["a smith", *TEXTS], "hammer", skip=True)
    assert [place.text for place in found.occurrences] == [1, 1, 2, 3, 4]
    with pytest.raises(InputError, match="the word 'anvil' is in none of the 4 texts"):
        similar(directory, TEXTS, "anvil", skip=True)
    with pytest.raises(InputError, match=r"stands in 1,002 places; .* 1,000 places can"):
        similar(directory, ["hammer hammer"] * 501, "hammer")


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_picture_is_drawn_without_a_warning(directory: Path, tmp_path: Path, count: int) -> None:
    """Dollars are no formula, Hangul and what no font has are no trouble; few places or many."""
    found = similar(directory, (TEXTS * 9)[: max(count - 4, 1)], "hammer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_distances(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_fonts_have_every_character() -> None:
    """Of the characters that are left each is in one of the fonts; others are question marks."""
    from matplotlib import font_manager

    names, [word] = fonts.choose_fonts(["대장간 hammer \U0010ffff\x07"])
    assert word.endswith(" hammer ??")
    files = [font_manager.findfont(name, fallback_to_default=False) for name in names]
    has = set().union(*(fonts._font_characters(file) for file in files))
    assert set(map(ord, word)) <= has
    assert word.startswith(("대장간", "???"))


def test_a_picture_that_cannot_be_is_told(directory: Path, tmp_path: Path) -> None:
    """Too many places, an unknown form, a folder that is not there, a file that is."""
    found = similar(directory, TEXTS, "hammer")
    for name, why in (("p.doc", "unknown kind of picture"), ("none/p.png", "no such folder")):
        with pytest.raises(InputError, match=why):
            plot_distances(found, tmp_path / name)
    kept = tmp_path / "kept.png"
    kept.write_text("mine")
    with pytest.raises(InputError, match=r"kept\.png: it is there already"):
        plot_distances(found, kept)
    assert kept.read_text() == "mine"
    kept.unlink()
    many = similar(directory, ["hammer"] * 61, "hammer")
    with pytest.raises(InputError, match="a picture of 61 places cannot be read"):
        plot_distances(many, tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []
