"""Score text by its pseudo-log-likelihood: each token masked in turn (Salazar et al. 2020).

It never knows where the lines come from, nor what the scores decide.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.progress import NullProgress, Progress
from bertsmith.use.masked_lm import (
    MaskedSequence,
    ModelOrPath,
    chunked,
    max_text_tokens,
    predict_masked_tokens,
    resolve_model,
)

#: Lines worked on at once: their copies are batched together.
_WINDOW = 64


@dataclass(frozen=True)
class Score:
    """The pseudo-log-likelihood (PLL) of a line, or why it has none.

    tokens: the line's tokens, [CLS] and [SEP] not among them. log_probabilities: for each, the
    natural logarithm of its probability when it alone is masked. problem: None, or what keeps the
    line from being scored; then ``log_probabilities`` is empty.
    """

    text: str
    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    problem: str | None = None

    @property
    def total(self) -> float:
        """The sum over the tokens, in nats (equation 1 of Salazar et al.); nan with a problem."""
        return math.nan if self.problem else math.fsum(self.log_probabilities)

    @property
    def per_token(self) -> float:
        """The mean over the tokens, in nats; nan with a problem."""
        return math.nan if self.problem else self.total / len(self.tokens)

    @property
    def perplexity(self) -> float:
        """The pseudo-perplexity exp(-mean); nan with a problem."""
        return math.exp(-self.per_token)


def score(model: ModelOrPath, text: str) -> Score:
    """Return the pseudo-log-likelihood of one line of text.

    The text is read as plain text: "[MASK]" in it is no special token. Costs one sequence of
    compute a token. Raises QuestionError for a line that is empty or longer than the model.
    """
    result = next(iter_scores(model, [text]))
    if result.problem:
        raise InputError(f"this line cannot be scored: {result.problem}")
    return result


def iter_scores(
    model: ModelOrPath, lines: Iterable[str], progress: Progress | None = None
) -> Iterator[Score]:
    """Yield the score of each line, one for each, in their order.

    A line that is empty or too long is not passed over: its ``problem`` says why it has no score.
    """
    progress = progress or NullProgress()
    bundle = resolve_model(model)
    progress.start("score", None, "tokens")
    for window in chunked(lines, _WINDOW):
        yield from _scored(bundle, window, progress)
    progress.finish()


def _scored(bundle: PretrainedBundle, lines: Sequence[str], progress: Progress) -> Iterator[Score]:
    encoded = bundle.tokenizer.encode_batch(lines)
    problems = [_problem(bundle, ids) for ids in encoded]
    copies = [
        (line, place)
        for line, (ids, problem) in enumerate(zip(encoded, problems, strict=True))
        if problem is None
        for place in range(len(ids))
    ]
    found = [[0.0] * len(ids) for ids in encoded]

    def masked(number: int) -> MaskedSequence:
        line, place = copies[number]
        return _masked(bundle, encoded[line], place)

    lengths = [len(encoded[line]) + 2 for line, _ in copies]
    for answers in predict_masked_tokens(bundle, lengths, masked):
        asked = [copies[number] for number, _ in answers.rows]
        table = answers.log_probabilities
        labels = torch.tensor([encoded[line][place] for line, place in asked], device=table.device)
        values = table.gather(1, labels[:, None])[:, 0].tolist()
        for (line, place), value in zip(asked, values, strict=True):
            found[line][place] = value
        progress.advance(len(asked))
    for text, ids, own, problem in zip(lines, encoded, found, problems, strict=True):
        tokens = tuple(bundle.tokenizer.ids_to_tokens(ids))
        yield Score(text, tokens, () if problem else tuple(own), problem)


def _masked(bundle: PretrainedBundle, ids: Sequence[int], place: int) -> MaskedSequence:
    """Return the line with [CLS] and [SEP], the token at ``place`` masked and asked for."""
    tokenizer = bundle.tokenizer
    whole = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    whole[place + 1] = tokenizer.mask_id
    return MaskedSequence(whole, [0] * len(whole), [place + 1])


def _problem(bundle: PretrainedBundle, ids: Sequence[int]) -> str | None:
    if not ids:
        return "empty: there is no token to predict"
    if len(ids) > max_text_tokens(bundle):
        return (
            f"too long: {len(ids):,} tokens, this model takes at most {max_text_tokens(bundle):,}"
        )
    return None
