"""Distances between the occurrences of a word: values, contexts, plots and fonts."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import InputError
from bertsmith.use.embed import Embedder
from bertsmith.use.similar import (
    _read_font_characters,
    choose_fonts,
    cosine_distances,
    plot_distances,
    similar,
)

#: Texts with "hammer" and with special characters: a dollar sign starts a formula in matplotlib, a
#: tab would break a table, and no font contains the last character of Unicode.
TEXTS = [
    "a hammer and another hammer",
    "$5 for the hammer, and $6",
    "대장간 hammer\t망치",
    "\U0010ffff\x07 hammer " + "of the smith " * 9,
]


def test_distances_are_one_minus_cosine(model_dir: Path) -> None:
    """Distances equal 1 - cosine similarity of each pair of vectors, and 0 on the diagonal."""
    embedder = Embedder.load(model_dir)
    result = similar(embedder, TEXTS, "hammer", layer=1)
    vectors = [word.vector for word in embedder.encode_word(TEXTS, "hammer", layer=1)]
    assert [word.text_index for word in result.occurrences] == [0, 0, 1, 2, 3]
    for row, a in enumerate(vectors):
        for column, b in enumerate(vectors):
            cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            assert result.distances[row, column] == pytest.approx(1 - cosine, abs=1e-5)
    assert np.diag(result.distances).tolist() == [0.0] * 5
    assert cosine_distances(np.zeros((2, 3), np.float32)).tolist() == [[0, 1], [1, 0]]
    from_path = similar(model_dir, TEXTS, "hammer", layer=1)
    assert np.array_equal(from_path.distances, result.distances)


def test_context_shows_the_word_in_brackets(model_dir: Path) -> None:
    """A context is one line with the word in brackets and the text around it."""
    result = similar(model_dir, TEXTS, "hammer")
    assert result.contexts[:4] == [
        "a [hammer] and another hammer",
        "a hammer and another [hammer]",
        "$5 for the [hammer], and $6",
        "대장간 [hammer] 망치",
    ]
    assert result.contexts[4].endswith("[hammer] of the smith of the smi…")
    value = result.to_json()
    assert (value["word"], len(value["occurrences"]), len(value["distances"])) == ("hammer", 5, 5)


def test_texts_without_the_word_can_be_skipped(model_dir: Path) -> None:
    """A text without the word is an error or skipped; no occurrence is an error."""
    with pytest.raises(InputError, match="text 1: the word 'hammer' is not in 'a smith'"):
        similar(model_dir, ["a smith", *TEXTS], "hammer")
    result = similar(model_dir, ["a smith", *TEXTS], "hammer", skip=True)
    assert [word.text_index for word in result.occurrences] == [1, 1, 2, 3, 4]
    with pytest.raises(InputError, match="the word 'anvil' is in none of the 4 texts"):
        similar(model_dir, TEXTS, "anvil", skip=True)
    long_text = "of the smith " * 60 + "hammer"
    with pytest.raises(InputError, match="'hammer' occurs only beyond the model's limit of"):
        similar(model_dir, [long_text, "a smith"], "hammer", skip=True)


def test_too_many_occurrences_are_not_embedded(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of occurrences is checked before the model runs."""
    monkeypatch.delattr(Embedder, "encode_tokens")
    with pytest.raises(InputError, match=r"occurs 1,002 times; at most 1,000 occurrences can"):
        similar(embedder, ["hammer hammer"] * 501, "hammer")


@pytest.mark.parametrize("num_texts", [1, 4, 36])
def test_plot_is_written_without_warnings(model_dir: Path, tmp_path: Path, num_texts: int) -> None:
    """Dollar signs, Hangul and characters that no font contains do not cause warnings."""
    result = similar(model_dir, (TEXTS * 9)[:num_texts], "hammer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_distances(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_fonts_cover_every_character() -> None:
    """The chosen fonts contain all characters; a character that no font contains becomes "?"."""
    from matplotlib import font_manager

    names, [word] = choose_fonts(["대장간 hammer \U0010ffff\x07"])
    assert word.endswith(" hammer ??")
    files = [font_manager.findfont(name, fallback_to_default=False) for name in names]
    characters = set().union(*(_read_font_characters(file) for file in files))
    assert set(map(ord, word)) <= characters
    assert word.startswith(("대장간", "???"))


def test_invalid_plots_are_errors(model_dir: Path, tmp_path: Path) -> None:
    """Too many occurrences and invalid paths are errors, and no file is written."""
    result = similar(model_dir, TEXTS, "hammer")
    for name, message in (("p.doc", "unknown image format"), ("none/p.png", "no such directory")):
        with pytest.raises(InputError, match=message):
            plot_distances(result, tmp_path / name)
    existing = tmp_path / "existing.png"
    existing.write_text("original")
    with pytest.raises(InputError, match=r"existing\.png: already exists"):
        plot_distances(result, existing)
    assert existing.read_text() == "original"
    existing.unlink()
    many = similar(model_dir, ["hammer"] * 61, "hammer")
    with pytest.raises(InputError, match="a plot of 61 occurrences would be unreadable"):
        plot_distances(many, tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []
