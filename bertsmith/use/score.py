"""Score text by pseudo-log-likelihood: predict each token while it is masked."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.progress import NullProgress, Progress
from bertsmith.use.inputs import chunked
from bertsmith.use.masked_lm import get_max_text_tokens
from bertsmith.use.model_setup import ModelOrPath, resolve_model
from bertsmith.use.pseudo_log_likelihood import PllVariant, compute_log_probabilities

#: Number of lines scored together, whose masked copies share batches.
_CHUNK_SIZE = 64


@dataclass(frozen=True)
class Score:
    """The pseudo-log-likelihood (PLL) of a line.

    Attributes:
        text: The line.
        tokens: The tokens of the line, without [CLS] and [SEP].
        log_probabilities: Natural logarithm of the probability of each token while it is masked;
            empty if the line cannot be scored.
        problem: Why the line cannot be scored; None if it can.
    """

    text: str
    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    problem: str | None = None

    @property
    def total(self) -> float:
        """Sum of the log-probabilities (equation 1 of Salazar et al. 2020).

        The sum is NaN if the line cannot be scored.
        """
        return math.nan if self.problem else math.fsum(self.log_probabilities)

    @property
    def per_token(self) -> float:
        """Mean of the log-probabilities; NaN if the line cannot be scored."""
        return math.nan if self.problem else self.total / len(self.tokens)

    @property
    def perplexity(self) -> float:
        """Pseudo-perplexity, see ``compute_perplexity``; NaN if the line cannot be scored."""
        return compute_perplexity(self.per_token)


def compute_perplexity(mean_log_probability: float) -> float:
    """Return exp(-``mean_log_probability``); infinity if it exceeds the range of a float64."""
    try:
        return math.exp(-mean_log_probability)
    except OverflowError:
        return math.inf


@overload
def score(
    model: ModelOrPath, text: str, *, variant: PllVariant = "original", fast: bool = False
) -> Score: ...


@overload
def score(
    model: ModelOrPath, text: list[str], *, variant: PllVariant = "original", fast: bool = False
) -> list[Score]: ...


def score(
    model: ModelOrPath,
    text: str | list[str],
    *,
    variant: PllVariant = "original",
    fast: bool = False,
) -> Score | list[Score]:
    """Return the pseudo-log-likelihood of a text, or of each text of a list.

    One call with a list is much faster than one call for each text. Special tokens in a text, such
    as "[MASK]", are read as plain text.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        text: A text, or a list of texts.
        variant: Which tokens are masked while a token is predicted: only the token itself
            (``original``, Salazar et al. 2020), or also the tokens after it in its word
            (``within-word``, Kauf and Ivanova 2023).
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        The score of the text, or a list of scores in input order.

    Raises:
        InputError: A text is empty or longer than the model's maximum.
        ModelError: The model has no masked-LM head.
    """
    texts = [text] if isinstance(text, str) else text
    bundle = resolve_model(model, fast=fast)
    scores = []
    for number, line_score in enumerate(iter_scores(bundle, texts, variant=variant), 1):
        if line_score.problem:
            name = "this text" if isinstance(text, str) else f"text {number}"
            raise InputError(f"{name} cannot be scored: {line_score.problem}")
        scores.append(line_score)
    return scores[0] if isinstance(text, str) else scores


def iter_scores(
    model: ModelOrPath,
    lines: Iterable[str],
    progress: Progress | None = None,
    *,
    variant: PllVariant = "original",
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[Score]:
    """Yield a ``Score`` for each line, in input order.

    The ``Score`` of an empty or too long line has a ``problem`` and no log-probabilities.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        lines: The lines.
        progress: Receives the number of tokens.
        variant: Which tokens are masked together.
        chunk_size: Number of lines that are read before their scores are computed.
    """
    progress = progress or NullProgress()
    bundle = resolve_model(model)
    bundle.require_mlm_head()
    progress.start("score", None, "tokens")
    try:
        for chunk in chunked(lines, chunk_size):
            yield from _score_lines(bundle, chunk, variant, progress)
    finally:
        # A progress bar hides the cursor.
        progress.finish()


def _score_lines(
    bundle: PretrainedBundle, lines: Sequence[str], variant: PllVariant, progress: Progress
) -> Iterator[Score]:
    """Yield the scores of the lines of a chunk."""
    encoded = bundle.tokenizer.encode_batch(lines)
    problems = [find_problem(bundle, ids) for ids in encoded]
    scorable = [ids for ids, problem in zip(encoded, problems, strict=True) if problem is None]
    log_probabilities = compute_log_probabilities(bundle, scorable, [variant], progress)[variant]
    remaining_values = iter(log_probabilities)
    for text, ids, problem in zip(lines, encoded, problems, strict=True):
        tokens = tuple(bundle.tokenizer.ids_to_tokens(ids))
        values = () if problem else tuple(next(remaining_values))
        yield Score(text, tokens, values, problem)


def find_problem(bundle: PretrainedBundle, ids: Sequence[int]) -> str | None:
    """Return why a text with these token ids cannot be scored; None if it can."""
    if not ids:
        return "empty: there is no token to predict"
    max_tokens = get_max_text_tokens(bundle)
    if len(ids) > max_tokens:
        return f"too long: {len(ids):,} tokens, this model takes at most {max_tokens:,}"
    return None
