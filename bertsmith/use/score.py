"""Score text by pseudo-log-likelihood: mask each token in turn (Salazar et al. 2020)."""

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
    get_max_text_tokens,
    predict_masked_tokens,
    resolve_model,
)

#: Lines scored together: their masked copies share batches.
_CHUNK_SIZE = 64


@dataclass(frozen=True)
class Score:
    """The pseudo-log-likelihood (PLL) of a line.

    Attributes:
        text: The line.
        tokens: Its tokens, without [CLS] and [SEP].
        log_probabilities: Natural logarithm of the probability of each token when it alone is
            masked; empty if the line cannot be scored.
        problem: Why the line cannot be scored; None if it can.
    """

    text: str
    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    problem: str | None = None

    @property
    def total(self) -> float:
        """Sum over the tokens, in nats (equation 1 of Salazar et al.); nan without a score."""
        return math.nan if self.problem else math.fsum(self.log_probabilities)

    @property
    def per_token(self) -> float:
        """Mean over the tokens, in nats; nan without a score."""
        return math.nan if self.problem else self.total / len(self.tokens)

    @property
    def perplexity(self) -> float:
        """Pseudo-perplexity exp(-mean); nan without a score."""
        return math.exp(-self.per_token)


def score(model: ModelOrPath, text: str) -> Score:
    """Return the pseudo-log-likelihood of one line of text.

    Special tokens in the text, such as "[MASK]", are read as plain text. The cost is one forward
    pass per token.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        text: The line.

    Raises:
        InputError: The line is empty or longer than the model's maximum.
    """
    result = next(iter_scores(model, [text]))
    if result.problem:
        raise InputError(f"this line cannot be scored: {result.problem}")
    return result


def iter_scores(
    model: ModelOrPath, lines: Iterable[str], progress: Progress | None = None
) -> Iterator[Score]:
    """Yield a ``Score`` for each line, in input order.

    Lines that are empty or too long are included; their ``problem`` says why they have no score.
    """
    progress = progress or NullProgress()
    bundle = resolve_model(model)
    progress.start("score", None, "tokens")
    for chunk in chunked(lines, _CHUNK_SIZE):
        yield from _score_lines(bundle, chunk, progress)
    progress.finish()


def _score_lines(
    bundle: PretrainedBundle, lines: Sequence[str], progress: Progress
) -> Iterator[Score]:
    encoded = bundle.tokenizer.encode_batch(lines)
    problems = [_find_problem(bundle, ids) for ids in encoded]
    # One copy of a line per token: (index of the line, index of the masked token).
    copies = [
        (line_index, token_index)
        for line_index, (ids, problem) in enumerate(zip(encoded, problems, strict=True))
        if problem is None
        for token_index in range(len(ids))
    ]
    scores = [[0.0] * len(ids) for ids in encoded]

    def masked_copy(index: int) -> MaskedSequence:
        line_index, token_index = copies[index]
        return _mask_token(bundle, encoded[line_index], token_index)

    lengths = [len(encoded[line_index]) + 2 for line_index, _ in copies]
    for predictions in predict_masked_tokens(bundle, lengths, masked_copy):
        batch_copies = [copies[index] for index, _ in predictions.rows]
        log_probabilities = predictions.log_probabilities
        labels = torch.tensor(
            [encoded[line_index][token_index] for line_index, token_index in batch_copies],
            device=log_probabilities.device,
        )
        values = log_probabilities.gather(1, labels[:, None])[:, 0].tolist()
        for (line_index, token_index), value in zip(batch_copies, values, strict=True):
            scores[line_index][token_index] = value
        progress.advance(len(batch_copies))
    for text, ids, line_scores, problem in zip(lines, encoded, scores, problems, strict=True):
        tokens = tuple(bundle.tokenizer.ids_to_tokens(ids))
        yield Score(text, tokens, () if problem else tuple(line_scores), problem)


def _mask_token(bundle: PretrainedBundle, ids: Sequence[int], token_index: int) -> MaskedSequence:
    """Return [CLS] line [SEP] with one token masked."""
    tokenizer = bundle.tokenizer
    sequence = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    sequence[token_index + 1] = tokenizer.mask_id
    return MaskedSequence(sequence, [0] * len(sequence), [token_index + 1])


def _find_problem(bundle: PretrainedBundle, ids: Sequence[int]) -> str | None:
    if not ids:
        return "empty: there is no token to predict"
    if len(ids) > get_max_text_tokens(bundle):
        max_tokens = get_max_text_tokens(bundle)
        return f"too long: {len(ids):,} tokens, this model takes at most {max_tokens:,}"
    return None
