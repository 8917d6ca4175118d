"""``bertsmith predict`` and ``bertsmith evaluate``: ask a fine-tuned model, and score it.

It never knows how an answer is found.
"""

from collections.abc import Iterator
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.asking import Device, Json, Model, lines_of, resolved_device
from bertsmith.cli.console import put, put_json
from bertsmith.errors import QuestionError

if TYPE_CHECKING:
    from bertsmith.bundle import TaskBundle
    from bertsmith.use.predict import Prediction


@app.command()
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT", help="Texts; a tab parts the two of a pair.", show_default=False
        ),
    ] = None,
    read: Annotated[
        str | None, typer.Option("--input", help="A file of texts, one a line; - is stdin.")
    ] = None,
    glue: Annotated[
        Path | None,
        typer.Option(help="A GLUE task's test.tsv: put what its server takes on stdout."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell the labels of texts, with their probabilities, or their score.

    The model is one that `bertsmith finetune` made. With --json each answer is a line of JSON.
    """
    from bertsmith.bundle import load_task
    from bertsmith.use.predict import predict_each
    from bertsmith.use.submission import submission

    if sum((read is not None, bool(texts), glue is not None)) != 1:
        raise QuestionError("give texts, or --input FILE (- for standard input), or --glue FILE")
    bundle = load_task(model, device=resolved_device(device))
    if glue is not None:
        for line in submission(bundle, glue):
            put(line)
        return
    lines: Iterator[str] = lines_of(read) if read is not None else iter(texts or [])
    asked, shown = tee(_parts(line) for line in lines)
    for given, answer in zip(shown, predict_each(bundle, asked), strict=True):
        if as_json:
            put_json(_as_json(given, answer, bundle))
        else:
            put(f"{_answer(answer, bundle)}\t{_flat(given)}")


@app.command()
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Option(help="A labelled table.")],
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out, counted, instead of stopping.")
    ] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score a fine-tuned model on a labelled table, by the metrics of its task."""
    from bertsmith.bundle import load_task
    from bertsmith.use.evaluate import evaluate as scored

    bundle = load_task(model, device=resolved_device(device))
    figures = scored(bundle, data, skip_bad=skip_bad)
    if as_json:
        put_json(figures)
        return
    counts = figures.pop("counts")
    put(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    put(f"{counts['read']:,} rows read, {counts['used']:,} used, "
        f"{sum(counts['skipped'].values()):,} skipped, {counts['cut_off']:,} cut off")  # fmt: skip


def _parts(line: str) -> str | tuple[str, str]:
    first, tab, second = line.partition("\t")
    return (first, second) if tab else first


def _flat(given: str | tuple[str, str]) -> str:
    return given if isinstance(given, str) else "\t".join(given)


def _answer(answer: "Prediction", bundle: "TaskBundle") -> str:
    if answer.score is not None:
        return f"{answer.score:.4f}"
    if bundle.head.kind == "multi":
        likely = [name for name, share in answer.labels if share > 0.5]
        return "|".join(likely)
    name, share = answer.labels[0]
    return f"{name}\t{share:.4f}"


def _as_json(
    given: str | tuple[str, str], answer: "Prediction", bundle: "TaskBundle"
) -> dict[str, object]:
    texts = [given] if isinstance(given, str) else list(given)
    result: dict[str, object] = dict(zip(("text", "pair"), texts, strict=False))
    if answer.score is not None:
        result["score"] = answer.score
    else:
        result["labels"] = dict(answer.labels)
        likely = [name for name, share in answer.labels if share > 0.5]
        result["label"] = likely if bundle.head.kind == "multi" else answer.labels[0][0]
    return result | {"cut_off": answer.cut_off}
