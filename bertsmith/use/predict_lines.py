"""Ask a fine-tuned model of any family by lines of text, as the command line does.

It never knows how an answer is found, only how it is told: as a value for JSON, and as a line.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.settings import is_column_number
from bertsmith.use.answer import iter_answers, to_question_example
from bertsmith.use.choose import iter_choices, to_prompt_example
from bertsmith.use.predict import Prediction, iter_predictions, to_text_example
from bertsmith.use.tag import iter_tagged_texts, require_text

LinePredictions = Iterator[tuple[dict[str, Any], str]]
#: Lines, and what each of them asks.
_Asked = Iterable[tuple[str, Any]]


@dataclass
class SkippedLines:
    """How many lines were left out, since they ask nothing, and what is wrong with the first."""

    count: int = 0
    first_problem: str = ""

    def add(self, fault: str) -> None:
        """Count a line."""
        self.count += 1
        self.first_problem = self.first_problem or fault


def predict_lines(
    bundle: FineTunedBundle,
    lines: Iterable[str],
    *,
    location: str = "line",
    skipped: SkippedLines | None = None,
    unbuffered: bool = False,
) -> LinePredictions:
    """Yield for each line what the model says of it: as a value for JSON, and as a line of text.

    What a line holds, parted by tabs: a text, or the two of a pair, a question and its context, or
    a prompt and each of its endings. where: what stands before a line's number in a message.
    skipped: where it is given, lines that ask nothing are counted there instead of an error.
    unbuffered: each line is answered before the next one is read, else many together, which is faster.
    Raises BertsmithError, after the answers to all lines before the bad one.
    """
    asked, tell = _asked(bundle, lines, location, skipped), _TELLERS[bundle.head.kind]
    if not unbuffered:
        return tell(bundle, asked)
    return (answer for one in asked for answer in tell(bundle, [one]))


def predict_items(bundle: FineTunedBundle, items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield what the model says of each item, as a value for JSON.

    items: texts or pairs, (question, context), or (prompt, endings), by the kind of the model.
    """
    for value, _ in _TELLERS[bundle.head.kind](bundle, [("", item) for item in items]):
        yield value


def _asked(
    bundle: FineTunedBundle, lines: Iterable[str], where: str, skipped: SkippedLines | None
) -> Iterator[tuple[str, Any]]:
    read = _READERS[bundle.head.kind]
    for number, line in enumerate(lines, 1):
        try:
            item = read(bundle, line, f"{where} {number:,}")
        except InputError as fault:
            if skipped is None:
                raise InputError(
                    f"{fault}; mend it, or leave such lines out with --skip-bad"
                ) from None
            skipped.add(str(fault))
        else:
            yield line, item


def _text_or_pair(bundle: FineTunedBundle, line: str, where: str) -> str | tuple[str, str]:
    """Return what the model was fine-tuned on; of one that does not say, the tab decides."""
    task = bundle.info.get("provenance", {}).get("task")
    first, tab, second = line.partition("\t")
    if task is not None and task.get("pair") and not tab:
        raise InputError(
            f"{where}: there is no tab; the model is for pairs: expected two texts, parted by a tab"
        )
    paired = tab if task is None else task.get("pair")
    given = (first, second) if paired else line
    to_text_example(given, where)
    return given


def _text(bundle: FineTunedBundle, line: str, where: str) -> str:  # noqa: ARG001 - see _READERS
    return require_text(line, where)


def _question(bundle: FineTunedBundle, line: str, where: str) -> tuple[str, str]:  # noqa: ARG001
    question, tab, context = line.partition("\t")
    if not tab:
        raise InputError(f"{where}: there is no tab; expected a question, a tab and its context")
    to_question_example((question, context), where)
    return question, context


def _prompt(bundle: FineTunedBundle, line: str, where: str) -> tuple[str, list[str]]:  # noqa: ARG001
    prompt, *endings = line.split("\t")
    to_prompt_example((prompt, endings), where)
    return prompt, endings


def _classified(bundle: FineTunedBundle, asked: _Asked) -> LinePredictions:
    first, second = tee(asked)
    answers = iter_predictions(bundle, (item for _, item in first))
    for (line, item), answer in zip(second, answers, strict=True):
        parts = (item,) if isinstance(item, str) else item
        names = dict(zip(("text", "pair"), parts, strict=False))
        value = names | _value(answer, bundle) | {"cut_off": answer.cut_off}
        yield value, f"{_words(answer, bundle)}\t{line}"


def _words(answer: Prediction, bundle: FineTunedBundle) -> str:
    if answer.score is not None:
        return f"{answer.score:.4f}"
    if bundle.head.kind == "multi":
        likely = [(name, share) for name, share in answer.labels if share > 0.5]
        shares = "|".join(f"{share:.4f}" for _, share in likely)
        return f"{'|'.join(name for name, _ in likely)}\t{shares}"
    name, share = answer.labels[0]
    return f"{name}\t{share:.4f}"


def _value(answer: Prediction, bundle: FineTunedBundle) -> dict[str, Any]:
    if answer.score is not None:
        return {"score": answer.score}
    label = _likely(answer) if bundle.head.kind == "multi" else answer.labels[0][0]
    return {"labels": dict(answer.labels), "label": label}


def _likely(answer: Prediction) -> list[str]:
    return [name for name, share in answer.labels if share > 0.5]


def _tagged(bundle: FineTunedBundle, asked: _Asked) -> LinePredictions:
    for found in iter_tagged_texts(bundle, (item for _, item in asked)):
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


def _answered(bundle: FineTunedBundle, asked: _Asked) -> LinePredictions:
    first, second = tee(item for _, item in asked)
    for (question, context), answer in zip(first, iter_answers(bundle, second), strict=True):
        value = {"question": question, "context": context, **asdict(answer.best)}
        value |= {"candidates": [asdict(one) for one in answer.candidates],
                  "null_score": answer.null_score, "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{answer.text}\t{answer.probability:.4f}\t{question}"


def _chosen(bundle: FineTunedBundle, asked: _Asked) -> LinePredictions:
    first, second = tee(asked)
    answers = iter_choices(bundle, (item for _, item in first))
    for (line, (prompt, endings)), answer in zip(second, answers, strict=True):
        best, columns = answer.best, get_task_settings(bundle).endings
        # Numbers of columns are no names.
        named = len(columns) == len(endings) and not any(map(is_column_number, columns))
        value = {"prompt": prompt, "endings": endings, "probabilities": answer.probabilities,
                 "best": best, "ending": endings[best],
                 "column": columns[best] if named else None,
                 "cut_off": answer.cut_off}  # fmt: skip
        yield value, f"{best}\t{answer.probabilities[best]:.4f}\t{endings[best]}\t{line}"


#: By the kind of the model: what a line asks, and what is told of the answers.
_READERS: dict[str, Callable[[FineTunedBundle, str, str], Any]] = {
    "single": _text_or_pair, "multi": _text_or_pair, "regression": _text_or_pair,
    "entities": _text, "tags": _text,
    "span": _question,
    "choice": _prompt,
}  # fmt: skip
_TELLERS: dict[str, Callable[[FineTunedBundle, _Asked], LinePredictions]] = {
    "single": _classified, "multi": _classified, "regression": _classified,
    "entities": _tagged, "tags": _tagged,
    "span": _answered,
    "choice": _chosen,
}  # fmt: skip
