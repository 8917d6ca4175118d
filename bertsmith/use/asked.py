"""Ask a fine-tuned model of any family by lines of text, as the command line does.

It never knows how an answer is found, only how it is told: as a value for JSON, and as a line.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import tee
from typing import Any

from bertsmith.bundle import TaskBundle
from bertsmith.errors import QuestionError
from bertsmith.use.answer import answer_each
from bertsmith.use.choose import choose_each
from bertsmith.use.predict import Prediction, predict_each
from bertsmith.use.tag import tag_each

Told = Iterator[tuple[dict[str, Any], str]]


def told(bundle: TaskBundle, lines: Iterable[str]) -> Told:
    """Yield for each line what the model says of it: as a value for JSON, and as a line of text.

    What a line holds, parted by tabs: a text, or the two of a pair, a question and its context, or
    a prompt and each of its endings. Raises BertsmithError.
    """
    return _TELLERS[bundle.head.kind](bundle, lines)


def _classified(bundle: TaskBundle, lines: Iterable[str]) -> Told:
    first, second = tee(lines)
    texts = (_text_or_pair(line) for line in first)
    for line, answer in zip(second, predict_each(bundle, texts), strict=True):
        names = dict(zip(("text", "pair"), line.split("\t", 1), strict=False))
        value = names | _value(answer, bundle) | {"cut_off": answer.cut_off}
        yield value, f"{_words(answer, bundle)}\t{line}"


def _text_or_pair(line: str) -> str | tuple[str, str]:
    first, tab, second = line.partition("\t")
    return (first, second) if tab else first


def _words(answer: Prediction, bundle: TaskBundle) -> str:
    if answer.score is not None:
        return f"{answer.score:.4f}"
    if bundle.head.kind == "multi":
        return "|".join(_likely(answer))
    name, share = answer.labels[0]
    return f"{name}\t{share:.4f}"


def _value(answer: Prediction, bundle: TaskBundle) -> dict[str, Any]:
    if answer.score is not None:
        return {"score": answer.score}
    label = _likely(answer) if bundle.head.kind == "multi" else answer.labels[0][0]
    return {"labels": dict(answer.labels), "label": label}


def _likely(answer: Prediction) -> list[str]:
    return [name for name, share in answer.labels if share > 0.5]


def _tagged(bundle: TaskBundle, lines: Iterable[str]) -> Told:
    for found in tag_each(bundle, lines):
        if bundle.head.kind == "tags":
            line = " ".join(f"{one.text}/{one.label}" for one in found.spans)
            yield {"text": found.text, "tags": [asdict(one) for one in found.spans]}, line
            continue
        shown, done = "", 0
        for one in found.spans:
            shown += f"{found.text[done : one.start]}[{one.label} {one.text}]"
            done = one.end
        value = {"text": found.text, "entities": [asdict(one) for one in found.spans]}
        yield value, shown + found.text[done:]


def _answered(bundle: TaskBundle, lines: Iterable[str]) -> Told:
    first, second = tee(_question(line, number) for number, line in enumerate(lines, 1))
    for (question, context), answer in zip(first, answer_each(bundle, second), strict=True):
        value = {"question": question, "context": context, **asdict(answer.best)}
        value |= {"candidates": [asdict(one) for one in answer.candidates],
                  "null_score": answer.null_score, "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{answer.text}\t{answer.probability:.4f}\t{question}"


def _question(line: str, number: int) -> tuple[str, str]:
    question, tab, context = line.partition("\t")
    if not tab:
        raise QuestionError(
            f"question {number:,}: there is no tab; expected a question, a tab and its context"
        )
    return question, context


def _chosen(bundle: TaskBundle, lines: Iterable[str]) -> Told:
    first, second = tee(lines)
    questions = ((prompt, endings) for prompt, *endings in (line.split("\t") for line in first))
    for line, answer in zip(second, choose_each(bundle, questions), strict=True):
        prompt, *endings = line.split("\t")
        value = {"prompt": prompt, "endings": endings, "probabilities": answer.probabilities,
                 "best": answer.best, "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{answer.best}\t{answer.probabilities[answer.best]:.4f}\t{line}"


#: By the kind of the model.
_TELLERS: dict[str, Callable[[TaskBundle, Iterable[str]], Told]] = {
    "single": _classified, "multi": _classified, "regression": _classified,
    "entities": _tagged, "tags": _tagged,
    "span": _answered,
    "choice": _chosen,
}  # fmt: skip
