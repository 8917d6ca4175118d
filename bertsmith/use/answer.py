"""Ask a fine-tuned model questions about a context: the spans that answer them.

It never knows where questions and contexts come from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.tasks.question_answering import QuestionExample, encode_examples
from bertsmith.tasks.spans import SpanPredictions, find_best_spans
from bertsmith.use.masked_lm import chunked, resolve_task_model

#: Questions worked on at once: enough that like lengths meet, and that a context with many
#: questions is tokenized once.
_AT_ONCE = 1024
#: Candidates of a question, among which their probability is shared; the original's n_best_size.
NUM_CANDIDATES = 20


@dataclass(frozen=True)
class Candidate:
    """A span of the context: its text and characters [start, end); "" and None for no answer.

    score: the sum of the model's scores of start and end. probability: the softmax of the scores
    of all candidates.
    """

    text: str
    start: int | None
    end: int | None
    score: float
    probability: float


@dataclass(frozen=True)
class Answer:
    """What the model answers, and all candidates, the likeliest first.

    null_score: by how much no answer scores more than the best span, where the model may give none,
    else None. cut_off: whether the question was longer than the model takes.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    null_score: float | None
    cut_off: bool

    @property
    def text(self) -> str:
        """The answer as it stands in the context; "" for no answer."""
        return self.best.text

    @property
    def start(self) -> int | None:
        """The first character of the answer in the context; None for no answer."""
        return self.best.start

    @property
    def end(self) -> int | None:
        """The character after the answer in the context; None for no answer."""
        return self.best.end

    @property
    def probability(self) -> float:
        """The probability of the answer among the candidates."""
        return self.best.probability


def answer(
    model: FineTunedBundle | Path | str,
    questions: Sequence[tuple[str, str]],
    *,
    null_threshold: float | None = None,
) -> list[Answer]:
    """Return what a fine-tuned model answers to each (question, context), in their order.

    A model that was fine-tuned on questions without an answer gives none where that scores more,
    by the threshold that was best on its held-out file (``task.null_threshold``), or by
    ``null_threshold``: see ``with_null_threshold``.
    Raises ModelError for a model that gives no spans, QuestionError for an empty text.
    """
    if null_threshold is not None:
        model = with_null_threshold(resolve_task_model(model, "span"), null_threshold)
    return list(iter_answers(model, questions))


def with_null_threshold(bundle: FineTunedBundle, threshold: float) -> FineTunedBundle:
    """Return the model with another threshold of no answer, as ``task.null_threshold`` sets it.

    A question gets no answer where no answer scores more than the best span by more than
    ``threshold``; ``inf`` always gives a span. Raises ModelError for a model that gives no spans.
    """
    resolve_task_model(bundle, "span")
    heldout = {**bundle.info.get("heldout", {}), "null_threshold": threshold}
    return replace(bundle, info={**bundle.info, "heldout": heldout})


def iter_answers(
    model: FineTunedBundle | Path | str,
    questions: Iterable[tuple[str, str]],
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[Answer]:
    """Yield what ``answer`` does, for input without end. An error names a question's number."""
    bundle = resolve_task_model(model, "span")
    examples = (
        to_question_example(given, f"question {number:,}")
        for number, given in enumerate(questions, 1)
    )
    for window in chunked(examples, _AT_ONCE):
        yield from _answers(bundle, window, compute)


def to_question_example(given: tuple[str, str], where: str) -> QuestionExample:
    """Return a question and its context as an example; QuestionError, which names ``where``."""
    question, context = given
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise InputError(f"{where}: the {name} is empty; expected at least one word")
    return QuestionExample(question, context, None, "", where)


def _answers(
    bundle: FineTunedBundle, examples: list[QuestionExample], compute: ComputeOutputs
) -> Iterator[Answer]:
    task = get_task_settings(bundle)
    inputs = encode_examples(examples, bundle.tokenizer, bundle.head, task, ExampleCounts())
    found = find_best_spans(
        compute(bundle.model, inputs), inputs.family_data, [example.context for example in examples],
        max_answer_tokens=task.max_answer_length, num_spans=NUM_CANDIDATES,
    )  # fmt: skip
    cut = {
        window.example: lost
        for window, lost in zip(inputs.family_data, inputs.is_truncated, strict=True)
    }
    for number, one in enumerate(found):
        yield _decided(one, task.null_threshold, cut_off=cut[number])


def _decided(found: SpanPredictions, threshold: float | None, *, cut_off: bool) -> Answer:
    """Return the best span, or no answer if that scores more by more than the threshold."""
    given: list[tuple[str, int | None, int | None, float]] = [
        (span.text, span.start, span.end, span.score) for span in found.spans
    ]
    if threshold is not None:
        given.append(("", None, None, found.null_score))
    given.sort(key=lambda one: -one[3])
    scores = np.array([score for *_, score in given])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    candidates = tuple(
        Candidate(*one, float(share)) for one, share in zip(given, shares, strict=True)
    )
    null_score = found.null_score - found.spans[0].score
    silent = threshold is not None and null_score > threshold
    best = next(one for one in candidates if (one.start is None) == silent)
    return Answer(best, candidates, None if threshold is None else null_score, cut_off)
