"""Filling in masks, beside `transformers` reading the same directory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.use.fill import fill, iter_fillings

TEXTS = [
    "the [MASK] stood where the roads met",
    "Every [MASK] on the [MASK] had its own name, its own [MASK].",
    "[MASK]",
    "the smith[MASK] worked",
]


def expected(peer: tuple[Any, Any], text: str) -> torch.Tensor:
    """Return the peer's probabilities at the masks of a text, [masks, V]."""
    tokenizer, model = peer
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).prediction_logits[0]
    probabilities: torch.Tensor = logits.softmax(-1)[inputs["input_ids"][0] == 4]
    return probabilities


def test_probabilities_are_the_peers(loaded: PretrainedBundle, peer: tuple[Any, Any]) -> None:
    """Every word's probability at every mask is `transformers`' to 1e-5, best first."""
    every = loaded.config.vocab_size
    for text, fillings in zip(TEXTS, iter_fillings(loaded, TEXTS, top=every), strict=True):
        rows = expected(peer, text)
        assert len(rows) == len(fillings) == text.count("[MASK]")
        for row, filling in zip(rows, fillings, strict=True):
            words, shares = zip(*filling.words, strict=True)
            assert list(shares) == sorted(shares, reverse=True)
            ours = torch.tensor(shares)
            theirs = row[[loaded.tokenizer.token_to_id(word) for word in words]]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_batch_gives_what_each_text_gives(loaded: PretrainedBundle) -> None:
    """Texts of different lengths in one batch do not touch each other, and keep their order."""
    together = list(iter_fillings(loaded, TEXTS * 90, top=3))
    alone = [fill(loaded, text, top=3) for text in TEXTS]
    assert len(together) == 360
    for index, fillings in enumerate(together):
        for ours, own in zip(fillings, alone[index % 4], strict=True):
            assert [word for word, _ in ours.words] == [word for word, _ in own.words]
            for (_, share), (_, other) in zip(ours.words, own.words, strict=True):
                assert share == pytest.approx(other, abs=1e-6)


def test_places_are_those_of_the_text(loaded: PretrainedBundle) -> None:
    """A filling's place is the character at which its [MASK] begins."""
    for text, fillings in zip(TEXTS, iter_fillings(loaded, TEXTS), strict=True):
        for filling in fillings:
            assert text[filling.place :].startswith("[MASK]")
        assert len({filling.place for filling in fillings}) == text.count("[MASK]")


def test_a_path_will_do(loaded: PretrainedBundle, directory: Path) -> None:
    """The public name takes a directory, as text or path, or a loaded model."""
    wanted = fill(loaded, TEXTS[0])
    assert bertsmith.fill(directory, TEXTS[0]) == wanted
    assert bertsmith.fill(str(directory), TEXTS[0]) == wanted
    assert len(wanted[0].words) == 5


def test_a_second_segment_after_sep(loaded: PretrainedBundle, peer: tuple[Any, Any]) -> None:
    """What stands after a written [SEP] is segment B, as in pre-training."""
    tokenizer, model = peer
    inputs = tokenizer("the smith", "the [MASK] met", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).prediction_logits[0]
    best = logits[inputs["input_ids"][0] == 4].softmax(-1).max()
    (filling,) = fill(loaded, "the smith [SEP] the [MASK] met", top=1)
    assert filling.words[0][1] == pytest.approx(float(best), abs=1e-5)


def test_only_segment_a_without_pairs(directory_without_pairs: Path) -> None:
    """A model that never saw segment B is not asked about it: its embedding plays no part."""
    single = bertsmith.load(directory_without_pairs)
    text = "the smith [SEP] the [MASK] met"
    before = fill(single, text)
    with torch.no_grad():
        single.model.bert.embeddings.segments.weight[1] += 5.0
    assert fill(single, text) == before


def test_rows_beyond_the_vocabulary_are_no_words(loaded: PretrainedBundle, directory: Path) -> None:
    """A model with more rows than its tokenizer has words gives no probability to the others."""
    wide = bertsmith.load(directory)
    with torch.no_grad():
        wide.model.mlm.decoder.bias[-40:] += 100.0
    vocab = wide.tokenizer.vocab[:-40]
    narrow = PretrainedBundle(
        wide.model,
        type(wide.tokenizer)(type(wide.tokenizer.spec)(vocab=vocab)),
        wide.config,
        wide.path,
    )
    (filling,) = fill(narrow, "[MASK]", top=1000)
    assert len(filling.words) == len(vocab)
    assert sum(share for _, share in filling.words) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the smith", r"text 2: no \[MASK\] in 'the smith'; put"),
        ("the [mask]", r"text 2: .*but \[mask\]: write it in capitals"),
        ("", r"text 2: no \[MASK\]"),
        ("smith " * 60 + "[MASK]", r"text 2: \d+ tokens, but this model takes at most 59"),
    ],
)
def test_errors_name_the_text(loaded: PretrainedBundle, text: str, message: str) -> None:
    """A text without a mask, or longer than the model, is refused by its number."""
    with pytest.raises(InputError, match=message):
        list(iter_fillings(loaded, [TEXTS[0], text]))


def test_the_longest_text_fits(loaded: PretrainedBundle) -> None:
    """A text of exactly as many tokens as the model has positions is filled in."""
    room = loaded.config.max_positions - 2
    assert len(fill(loaded, "[MASK]" * room, top=1)) == room
    with pytest.raises(InputError, match="shorten it"):
        fill(loaded, "[MASK]" * (room + 1))


def test_top_is_at_least_one(loaded: PretrainedBundle) -> None:
    """Asking for no words is a mistake, not an empty answer."""
    with pytest.raises(InputError, match="at least one word"):
        fill(loaded, "[MASK]", top=0)
