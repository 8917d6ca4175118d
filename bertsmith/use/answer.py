"""Question answering with a fine-tuned model: find the answer to a question in a context."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError, ModelError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.tasks.question_answering import QuestionExample, encode_examples
from bertsmith.tasks.spans import SpanPredictions, find_best_spans
from bertsmith.use.inputs import chunked
from bertsmith.use.model_setup import resolve_task_model

#: Maximum number of questions encoded together. They are batched by length, and a context that
#: several of them share is tokenized only once.
_CHUNK_SIZE = 1024
#: Number of candidate spans per question (`n_best_size` in the original BERT code). Probabilities
#: are normalized over the candidates.
NUM_CANDIDATES = 20


@dataclass(frozen=True)
class Candidate:
    """A candidate answer: a span of the context, or no answer.

    Attributes:
        text: Text of the span; "" for no answer.
        start: Index of the first character in the context; None for no answer.
        end: Index after the last character in the context; None for no answer.
        score: Sum of the start logit and the end logit.
        probability: Softmax of the scores of all candidates.
    """

    text: str
    start: int | None
    end: int | None
    score: float
    probability: float


@dataclass(frozen=True)
class Answer:
    """The model's answer to one question.

    Attributes:
        best: The chosen candidate.
        candidates: All candidates, in order of decreasing score.
        null_score_diff: Score of "no answer" minus the score of the best span; None if the model
            always answers.
        is_truncated: Whether the question was truncated.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    null_score_diff: float | None
    is_truncated: bool

    @property
    def text(self) -> str:
        """Text of the answer; "" for no answer."""
        return self.best.text

    @property
    def start(self) -> int | None:
        """Index of the answer's first character in the context; None for no answer."""
        return self.best.start

    @property
    def end(self) -> int | None:
        """Index after the answer's last character in the context; None for no answer."""
        return self.best.end

    @property
    def probability(self) -> float:
        """Probability of the answer among the candidates."""
        return self.best.probability


def answer(
    model: FineTunedBundle | Path | str,
    questions: Sequence[tuple[str, str]],
    *,
    null_threshold: float | None = None,
    fast: bool = False,
) -> list[Answer]:
    """Answer questions with a fine-tuned model.

    A model fine-tuned on data with unanswerable questions returns "no answer" if the score of "no
    answer" exceeds the score of the best span by more than a threshold. The default threshold is
    the one that was best on the held-out data (``task.null_threshold``).

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        questions: Pairs (question, context).
        null_threshold: Threshold for "no answer"; see ``with_null_threshold``.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        One answer per question, in input order.

    Raises:
        ModelError: The model does not predict spans.
        InputError: A question or context is empty.
    """
    bundle = resolve_task_model(model, "span", fast=fast)
    if null_threshold is not None:
        bundle = with_null_threshold(bundle, null_threshold)
    return list(iter_answers(bundle, questions))


def require_span_model(bundle: FineTunedBundle, option: str) -> None:
    """Raise ModelError if the user gives an option of question answering to another model."""
    if bundle.head.kind != "span":
        raise ModelError(
            f"{option}: only for question answering, but {bundle.path} is a model of the kind "
            f"{bundle.head.kind!r}; remove it, or use a model that answers questions"
        )


def with_null_threshold(bundle: FineTunedBundle, threshold: float) -> FineTunedBundle:
    """Return a copy of the model that uses a threshold as its ``task.null_threshold``.

    Args:
        bundle: A model that predicts spans.
        threshold: The model returns "no answer" if the score of "no answer" exceeds the score of
            the best span by more than this threshold; with ``inf`` it always returns a span.

    Raises:
        ModelError: The model does not predict spans.
    """
    require_span_model(bundle, "null_threshold (--null-threshold)")
    return replace(bundle, task_overrides={**bundle.task_overrides, "null_threshold": threshold})


def iter_answers(
    model: FineTunedBundle | Path | str,
    questions: Iterable[tuple[str, str]],
    compute: ComputeOutputs = compute_outputs,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[Answer]:
    """Yield the answers of ``answer`` for any number of questions, reading them in chunks.

    Args:
        model: As for ``answer``.
        questions: Pairs (question, context). Error messages contain the number of the pair, from 1.
        compute: Computes the outputs of the model.
        chunk_size: Maximum number of questions per chunk.
    """
    bundle = resolve_task_model(model, "span")
    examples = (
        to_question_example(question, f"question {number:,}")
        for number, question in enumerate(questions, 1)
    )
    for chunk in chunked(examples, chunk_size, _count_characters):
        yield from _answer_examples(bundle, chunk, compute)


def _count_characters(example: QuestionExample) -> int:
    """Return the number of characters of a question and its context."""
    return len(example.question) + len(example.context)


def to_question_example(question_and_context: tuple[str, str], location: str) -> QuestionExample:
    """Convert (question, context) to an example.

    Args:
        question_and_context: The question and its context.
        location: Prefix of error messages, such as "question 3".

    Raises:
        InputError: The question or the context is empty.
    """
    question, context = question_and_context
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise InputError(f"{location}: the {name} is empty; expected at least one word")
    return QuestionExample(question, context, None, "", location)


def _answer_examples(
    bundle: FineTunedBundle, examples: list[QuestionExample], compute: ComputeOutputs
) -> Iterator[Answer]:
    """Yield the answers to the questions of a chunk."""
    task = get_task_settings(bundle)
    inputs = encode_examples(examples, bundle.tokenizer, bundle.head, task, ExampleCounts())
    predictions = find_best_spans(
        compute(bundle.model, inputs),
        inputs.decoding_data,
        [example.context for example in examples],
        max_answer_tokens=task.max_answer_length,
        num_spans=NUM_CANDIDATES,
    )
    # A question with several windows is truncated in all of them or in none.
    is_question_truncated = {
        window.example_index: is_truncated
        for window, is_truncated in zip(inputs.decoding_data, inputs.is_truncated, strict=True)
    }
    for index, spans in enumerate(predictions):
        yield _choose_answer(spans, task.null_threshold, is_truncated=is_question_truncated[index])


def _choose_answer(
    predictions: SpanPredictions, threshold: float | None, *, is_truncated: bool
) -> Answer:
    """Choose the best span, or "no answer" if its score is higher by more than the threshold."""
    # The probabilities are computed below, from the scores of all candidates.
    candidates = [
        Candidate(span.text, span.start, span.end, span.score, probability=0.0)
        for span in predictions.spans
    ]
    best_span = candidates[0]
    no_answer = Candidate("", None, None, predictions.null_score, probability=0.0)
    if threshold is not None:
        candidates.append(no_answer)
        candidates.sort(key=lambda candidate: candidate.score, reverse=True)
    scores = torch.tensor([candidate.score for candidate in candidates], dtype=torch.float64)
    normalized_candidates = tuple(
        replace(candidate, probability=probability)
        for candidate, probability in zip(candidates, scores.softmax(0).tolist(), strict=True)
    )
    null_score_diff = no_answer.score - best_span.score
    best = best_span
    if threshold is not None and null_score_diff > threshold:
        best = no_answer
    return Answer(
        best=normalized_candidates[candidates.index(best)],
        candidates=normalized_candidates,
        null_score_diff=None if threshold is None else null_score_diff,
        is_truncated=is_truncated,
    )
