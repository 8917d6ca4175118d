"""``bertsmith predict`` and ``bertsmith evaluate``: ask a fine-tuned model, and score it.

It never knows how an answer is found.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.asking import Device, Json, Model, lines_of, resolved_device, tell_notes
from bertsmith.cli.console import put, put_json
from bertsmith.errors import QuestionError


@app.command()
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Texts; tabs part the two of a pair, a question and its context, or a prompt and "
            "its endings.",
            show_default=False,
        ),
    ] = None,
    read: Annotated[
        str | None, typer.Option("--input", help="A file of texts, one a line; - is stdin.")
    ] = None,
    glue: Annotated[
        Path | None,
        typer.Option(help="A GLUE task's test.tsv: put what its server takes on stdout."),
    ] = None,
    squad: Annotated[
        Path | None,
        typer.Option(help="A file of SQuAD's: put on stdout what its official program scores."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell the labels of texts, with their probabilities, or their score; or answer questions.

    The model is one that `bertsmith finetune` made. With --json each answer is a line of JSON.
    """
    from bertsmith.bundle import load_task
    from bertsmith.use.asked import told
    from bertsmith.use.submission import squad_predictions, submission

    if sum((read is not None, bool(texts), glue is not None, squad is not None)) != 1:
        raise QuestionError(
            "give texts, or --input FILE (- for standard input), or --glue FILE, or --squad FILE"
        )
    bundle = load_task(model, device=resolved_device(device))
    tell_notes(bundle)
    if squad is not None:
        put_json(squad_predictions(bundle, squad))
        return
    if glue is not None:
        for line in submission(bundle, glue):
            put(line)
        return
    lines: Iterator[str] = lines_of(read) if read is not None else iter(texts or [])
    for value, line in told(bundle, lines):
        if as_json:
            put_json(value)
        else:
            put(line)


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
    tell_notes(bundle)
    figures = scored(bundle, data, changes={"skip_bad": skip_bad})
    if as_json:
        put_json(figures)
        return
    counts = figures.pop("counts")
    put(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    put(f"{counts['read']:,} read, {counts['used']:,} used, "
        f"{sum(counts['skipped'].values()):,} skipped, {counts['cut_off']:,} cut off")  # fmt: skip
