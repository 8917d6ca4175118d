"""Ask a fine-tuned model of any family by lines of text, as the command line does.

It never knows how an answer is found, only how it is told: as a value for JSON, and as a line.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from typing import Any

from bertsmith.bundle import TaskBundle
from bertsmith.errors import QuestionError
from bertsmith.tasks.families import task_of
from bertsmith.tasks.settings import is_number
from bertsmith.use.answer import answer_each, question_example
from bertsmith.use.choose import choose_each, prompt_example
from bertsmith.use.predict import Prediction, predict_each, text_example
from bertsmith.use.tag import tag_each, with_words

Told = Iterator[tuple[dict[str, Any], str]]
#: Lines, and what each of them asks.
_Asked = Iterable[tuple[str, Any]]


@dataclass
class Skipped:
    """How many lines were left out, since they ask nothing, and what is wrong with the first."""

    count: int = 0
    first: str = ""

    def add(self, fault: str) -> None:
        """Count a line."""
        self.count += 1
        self.first = self.first or fault


def told(
    bundle: TaskBundle,
    lines: Iterable[str],
    *,
    where: str = "line",
    skipped: Skipped | None = None,
    at_once: bool = False,
) -> Told:
    """Yield for each line what the model says of it: as a value for JSON, and as a line of text.

    What a line holds, parted by tabs: a text, or the two of a pair, a question and its context, or
    a prompt and each of its endings. where: what stands before a line's number in a message.
    skipped: where it is given, lines that ask nothing are counted there instead of an error.
    at_once: each line is answered before the next one is read, else many together, which is faster.
    Raises BertsmithError, after the answers to all lines before the bad one.
    """
    asked, tell = _asked(bundle, lines, where, skipped), _TELLERS[bundle.head.kind]
    if not at_once:
        return tell(bundle, asked)
    return (answer for one in asked for answer in tell(bundle, [one]))


def values_of(bundle: TaskBundle, items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield what the model says of each item, as a value for JSON.

    items: texts or pairs, (question, context), or (prompt, endings), by the kind of the model.
    """
    for value, _ in _TELLERS[bundle.head.kind](bundle, [("", item) for item in items]):
        yield value


def _asked(
    bundle: TaskBundle, lines: Iterable[str], where: str, skipped: Skipped | None
) -> Iterator[tuple[str, Any]]:
    read = _READERS[bundle.head.kind]
    for number, line in enumerate(lines, 1):
        try:
            item = read(bundle, line, f"{where} {number:,}")
        except QuestionError as fault:
            if skipped is None:
                raise QuestionError(
                    f"{fault}; mend it, or leave such lines out with --skip-bad"
                ) from None
            skipped.add(str(fault))
        else:
            yield line, item


def _text_or_pair(bundle: TaskBundle, line: str, where: str) -> str | tuple[str, str]:
    """Return what the model was fine-tuned on; of one that does not say, the tab decides."""
    task = bundle.info.get("provenance", {}).get("task")
    first, tab, second = line.partition("\t")
    if task is not None and task.get("pair") and not tab:
        raise QuestionError(
            f"{where}: there is no tab; the model is for pairs: expected two texts, parted by a tab"
        )
    paired = tab if task is None else task.get("pair")
    given = (first, second) if paired else line
    text_example(given, where)
    return given


def _text(bundle: TaskBundle, line: str, where: str) -> str:  # noqa: ARG001 - see _READERS
    return with_words(line, where)


def _question(bundle: TaskBundle, line: str, where: str) -> tuple[str, str]:  # noqa: ARG001
    question, tab, context = line.partition("\t")
    if not tab:
        raise QuestionError(f"{where}: there is no tab; expected a question, a tab and its context")
    question_example((question, context), where)
    return question, context


def _prompt(bundle: TaskBundle, line: str, where: str) -> tuple[str, list[str]]:  # noqa: ARG001
    prompt, *endings = line.split("\t")
    prompt_example((prompt, endings), where)
    return prompt, endings


def _classified(bundle: TaskBundle, asked: _Asked) -> Told:
    first, second = tee(asked)
    answers = predict_each(bundle, (item for _, item in first))
    for (line, item), answer in zip(second, answers, strict=True):
        parts = (item,) if isinstance(item, str) else item
        names = dict(zip(("text", "pair"), parts, strict=False))
        value = names | _value(answer, bundle) | {"cut_off": answer.cut_off}
        yield value, f"{_words(answer, bundle)}\t{line}"


def _words(answer: Prediction, bundle: TaskBundle) -> str:
    if answer.score is not None:
        return f"{answer.score:.4f}"
    if bundle.head.kind == "multi":
        likely = [(name, share) for name, share in answer.labels if share > 0.5]
        shares = "|".join(f"{share:.4f}" for _, share in likely)
        return f"{'|'.join(name for name, _ in likely)}\t{shares}"
    name, share = answer.labels[0]
    return f"{name}\t{share:.4f}"


def _value(answer: Prediction, bundle: TaskBundle) -> dict[str, Any]:
    if answer.score is not None:
        return {"score": answer.score}
    label = _likely(answer) if bundle.head.kind == "multi" else answer.labels[0][0]
    return {"labels": dict(answer.labels), "label": label}


def _likely(answer: Prediction) -> list[str]:
    return [name for name, share in answer.labels if share > 0.5]


def _tagged(bundle: TaskBundle, asked: _Asked) -> Told:
    for found in tag_each(bundle, (item for _, item in asked)):
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


def _answered(bundle: TaskBundle, asked: _Asked) -> Told:
    first, second = tee(item for _, item in asked)
    for (question, context), answer in zip(first, answer_each(bundle, second), strict=True):
        value = {"question": question, "context": context, **asdict(answer.best)}
        value |= {"candidates": [asdict(one) for one in answer.candidates],
                  "null_score": answer.null_score, "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{answer.text}\t{answer.probability:.4f}\t{question}"


def _chosen(bundle: TaskBundle, asked: _Asked) -> Told:
    first, second = tee(asked)
    answers = choose_each(bundle, (item for _, item in first))
    for (line, (prompt, endings)), answer in zip(second, answers, strict=True):
        best, columns = answer.best, task_of(bundle).endings
        # Numbers of columns are no names.
        named = len(columns) == len(endings) and not any(map(is_number, columns))
        value = {"prompt": prompt, "endings": endings, "probabilities": answer.probabilities,
                 "best": best, "ending": endings[best],
                 "column": columns[best] if named else None,
                 "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{best}\t{answer.probabilities[best]:.4f}\t{endings[best]}\t{line}"


#: By the kind of the model: what a line asks, and what is told of the answers.
_READERS: dict[str, Callable[[TaskBundle, str, str], Any]] = {
    "single": _text_or_pair, "multi": _text_or_pair, "regression": _text_or_pair,
    "entities": _text, "tags": _text,
    "span": _question,
    "choice": _prompt,
}  # fmt: skip
_TELLERS: dict[str, Callable[[TaskBundle, _Asked], Told]] = {
    "single": _classified, "multi": _classified, "regression": _classified,
    "entities": _tagged, "tags": _tagged,
    "span": _answered,
    "choice": _chosen,
}  # fmt: skip
