"""Pseudo-log-likelihood, beside a plain loop with `transformers`."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.model.packed import batch_by_length
from bertsmith.use import masked_lm
from bertsmith.use.score import Score, iter_scores, score

LINES = [
    "The forge stood where the two roads met.",
    "iron",
    "",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "the smith " * 40,
    "Zebra! Xylophone, and an unknown 字.",
]


def plain_loop(peer: tuple[Any, Any], line: str) -> list[float]:
    """Mask one token after another, one forward pass each, every position through the head."""
    tokenizer, model = peer
    ids = tokenizer(line)["input_ids"]
    found = []
    for place in range(1, len(ids) - 1):
        masked = list(ids)
        masked[place] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([masked])).prediction_logits[0, place]
        found.append(float(logits.log_softmax(-1)[ids[place]]))
    return found


def test_scores_are_those_of_a_plain_loop(loaded: PretrainedBundle, peer: tuple[Any, Any]) -> None:
    """Each token's log-probability, their sum and the rest equal the plain loop's to 1e-5."""
    for line, found in zip(LINES, iter_scores(loaded, LINES), strict=True):
        assert found.text == line
        if found.problem:
            continue
        wanted = plain_loop(peer, line)
        assert found.log_probabilities == pytest.approx(wanted, abs=1e-5)
        assert found.total == pytest.approx(sum(wanted), abs=1e-4)
        assert found.per_token == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
        assert found.perplexity == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=1e-4)


def test_every_line_is_answered_in_order(loaded: PretrainedBundle) -> None:
    """Empty and too long lines are reported in their place; none is dropped, over windows too."""
    lines = LINES * 30
    found = list(iter_scores(loaded, lines))
    assert [one.text for one in found] == lines
    problems = [one.problem or "" for one in found[:6]]
    assert [problem.partition(":")[0] for problem in problems] == [
        "",
        "",
        "empty",
        "",
        "too long",
        "",
    ]
    assert "80 tokens, this model takes at most 59" in problems[4]
    assert math.isnan(found[2].total)
    assert math.isnan(found[4].perplexity)
    for first, later in zip(found[:6], found[-6:], strict=True):
        assert later.log_probabilities == pytest.approx(first.log_probabilities, abs=1e-6)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [(batch_by_length, "__defaults__", (17,)), (masked_lm, "CHUNK_FLOATS", 1)],
    ids=["batches", "chunks"],
)
def test_a_small_budget_changes_nothing(
    loaded: PretrainedBundle, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any
) -> None:
    """The scores do not depend on how many copies stand in a batch, nor on rows in a chunk."""
    wanted = list(iter_scores(loaded, LINES))
    monkeypatch.setattr(place, name, value)
    for one, other in zip(iter_scores(loaded, LINES), wanted, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-5)


def test_special_tokens_in_a_line_are_plain(loaded: PretrainedBundle) -> None:
    """A line that spells "[MASK]" is scored over the characters that stand there."""
    found = score(loaded, "the [MASK] met")
    assert "[MASK]" not in found.tokens
    assert found.tokens == tuple(
        loaded.tokenizer.ids_to_tokens(loaded.tokenizer.encode("the [MASK] met"))
    )
    assert len(found.tokens) > 3


def test_one_line_that_cannot_be_scored_is_an_error(
    loaded: PretrainedBundle, directory: Path
) -> None:
    """The form for one line raises where the form for many reports; a path will do."""
    with pytest.raises(InputError, match="cannot be scored: empty"):
        score(loaded, " ")
    with pytest.raises(InputError, match="too long"):
        bertsmith.score(directory, LINES[4])
    assert isinstance(bertsmith.score(str(directory), LINES[0]), Score)


def test_progress_counts_the_tokens(loaded: PretrainedBundle) -> None:
    """What is told to the progress adds up to the tokens scored, and the bar is ended."""
    told: list[Any] = []

    class Watch:
        def start(self, what: str, total: float | None, unit: str) -> None:
            told.append((what, unit))

        def advance(self, amount: float, **fields: str) -> None:
            told.append(amount)

        def log(self, text: str) -> None:
            raise AssertionError(text)

        def finish(self) -> None:
            told.append("end")

    found = list(iter_scores(loaded, LINES, Watch()))
    tokens = sum(len(one.log_probabilities) for one in found)
    assert told[0] == ("score", "tokens")
    assert sum(told[1:-1]) == tokens
    assert told[-1] == "end"
