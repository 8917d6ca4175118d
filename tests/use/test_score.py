"""Scores equal pseudo-log-likelihoods computed with transformers; progress and errors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.use.score import Score, iter_scores, score
from tests.use.conftest import MAX_POSITIONS

LINES = [
    "The forge stood where the two roads met.",
    "iron",
    "",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "the smith " * 40,
    "Zebra! Xylophone, and an unknown 字.",
]


def compute_hf_log_probabilities(hf_tokenizer_and_model: tuple[Any, Any], line: str) -> list[float]:
    """Compute each token's log-probability while it is masked, with one forward pass per token."""
    tokenizer, model = hf_tokenizer_and_model
    ids = tokenizer(line)["input_ids"]
    log_probabilities = []
    for position in range(1, len(ids) - 1):
        masked_ids = list(ids)
        masked_ids[position] = tokenizer.mask_token_id
        with torch.no_grad():
            output = model(input_ids=torch.tensor([masked_ids]))
        logits = output.prediction_logits[0, position]
        log_probabilities.append(float(logits.log_softmax(-1)[ids[position]]))
    return log_probabilities


def test_scores_equal_a_loop_over_transformers(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """Log-probabilities, their sum and mean, and the perplexity agree."""
    for line, line_score in zip(LINES, iter_scores(pretrained, LINES), strict=True):
        assert line_score.text == line
        if line_score.problem:
            continue
        expected = compute_hf_log_probabilities(hf_tokenizer_and_model, line)
        mean = sum(expected) / len(expected)
        assert line_score.log_probabilities == pytest.approx(expected, abs=1e-5)
        assert line_score.total == pytest.approx(sum(expected), abs=1e-4)
        assert line_score.per_token == pytest.approx(mean, abs=1e-5)
        assert line_score.perplexity == pytest.approx(math.exp(-mean), rel=1e-4)


def test_perplexity_of_an_extremely_unlikely_line_is_infinite() -> None:
    """exp(800) exceeds the range of a float64."""
    assert Score("iron", ("iron",), (-800.0,)).perplexity == math.inf
    assert Score("iron", ("iron",), (-2.0,)).perplexity == math.exp(2)
    assert math.isnan(Score("", (), (), "empty").perplexity)


def test_every_line_has_a_score_or_a_problem(pretrained: PretrainedBundle) -> None:
    """In 180 lines, empty and too long lines have a problem, and all others have a score."""
    lines = LINES * 30
    scores = list(iter_scores(pretrained, lines))
    assert [line_score.text for line_score in scores] == lines
    problems = [line_score.problem or "" for line_score in scores[:6]]
    problem_names = [problem.partition(":")[0] for problem in problems]
    assert problem_names == ["", "", "empty", "", "too long", ""]
    assert f"80 tokens, this model takes at most {MAX_POSITIONS - 2}" in problems[4]
    assert math.isnan(scores[2].total)
    assert math.isnan(scores[4].perplexity)
    for first, last in zip(scores[:6], scores[-6:], strict=True):
        assert last.log_probabilities == pytest.approx(first.log_probabilities, abs=1e-6)


def test_within_word_changes_tokens_whose_word_has_later_tokens(
    pretrained: PretrainedBundle,
) -> None:
    """For other tokens, both variants have the same log-probability."""
    ids = pretrained.tokenizer.encode(LINES[3])
    has_later_tokens = [*pretrained.tokenizer.is_continuation[ids[1:]], False]
    original = score(pretrained, LINES[3]).log_probabilities
    within_word = score(pretrained, LINES[3], variant="within-word").log_probabilities
    differences = np.abs(np.subtract(within_word, original))
    assert (differences > 1e-4).tolist() == has_later_tokens


def test_list_of_texts_gives_a_list_of_scores(pretrained: PretrainedBundle) -> None:
    """The scores equal those of single texts; an error has the number of the text."""
    lines = [LINES[0], LINES[3]]
    scores = score(pretrained, lines)
    assert [line_score.total for line_score in scores] == pytest.approx(
        [score(pretrained, line).total for line in lines], abs=1e-5
    )
    with pytest.raises(InputError, match="text 2 cannot be scored: empty"):
        score(pretrained, [LINES[0], ""])
    assert score(pretrained, []) == []


def test_special_tokens_in_a_line_are_plain_text(pretrained: PretrainedBundle) -> None:
    """The characters "[MASK]" in a line are not read as the special token."""
    line_score = score(pretrained, "the [MASK] met")
    assert "[MASK]" not in line_score.tokens
    tokenizer = pretrained.tokenizer
    assert line_score.tokens == tuple(tokenizer.ids_to_tokens(tokenizer.encode("the [MASK] met")))
    assert len(line_score.tokens) > 3


def test_score_raises_for_invalid_lines(pretrained: PretrainedBundle, model_dir: Path) -> None:
    """``score`` raises an error for empty and too long lines. It accepts paths."""
    with pytest.raises(InputError, match="cannot be scored: empty"):
        score(pretrained, " ")
    with pytest.raises(InputError, match="too long"):
        bertsmith.score(model_dir, LINES[4])
    assert isinstance(bertsmith.score(str(model_dir), LINES[0]), Score)


def test_progress_counts_tokens(pretrained: PretrainedBundle) -> None:
    """The progress advances by the number of scored tokens and is finished at the end."""
    events: list[Any] = []

    class RecordingProgress:
        def start(
            self, description: str, total: float | None, unit: str, initial: float = 0
        ) -> None:
            events.append((description, unit))

        def advance(self, amount: float, **fields: str) -> None:
            events.append(amount)

        def log(self, text: str) -> None:
            raise AssertionError(f"unexpected message: {text}")

        def finish(self) -> None:
            events.append("finish")

    scores = list(iter_scores(pretrained, LINES, RecordingProgress()))
    num_tokens = sum(len(line_score.log_probabilities) for line_score in scores)
    assert events[0] == ("score", "tokens")
    assert sum(events[1:-1]) == num_tokens
    assert events[-1] == "finish"
