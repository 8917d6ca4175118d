"""``bertsmith predict`` and ``bertsmith evaluate``: ask a fine-tuned model, and score it.

It never knows how an answer is found.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.asking import (
    STDIN,
    STDIN_NAME,
    Device,
    Json,
    Model,
    check_input,
    lines_of,
    load_fine_tuned,
)
from bertsmith.cli.classes import class_lines, confusion_lines
from bertsmith.cli.console import put, put_json, say, tell_counts
from bertsmith.cli.unknown import UnknownWarning
from bertsmith.errors import QuestionError, SettingsError
from bertsmith.settings import wished

if TYPE_CHECKING:
    from bertsmith.bundle import TaskBundle
    from bertsmith.tasks.inputs import Counts


NullThreshold = Annotated[
    float | None,
    typer.Option(
        help="Questions: give no answer where that scores more than the best span by more than "
        "this; inf always gives a span. Default: the threshold tuned in fine-tuning, if any."
    ),
]


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
        str | None,
        typer.Option(
            "--input",
            help="A file of texts, one a line; - is stdin. A terminal gets each answer at once; "
            "from a file or a pipe up to 1,024 lines are read and answered together.",
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines out, counted, instead of stopping.")
    ] = False,
    glue: Annotated[
        Path | None,
        typer.Option(help="A GLUE task's test.tsv: put what its server takes on stdout."),
    ] = None,
    squad: Annotated[
        Path | None,
        typer.Option(help="A file of SQuAD's: put on stdout what its official program scores."),
    ] = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell the labels of texts, with their probabilities, or their score; or answer questions.

    The model is one that `bertsmith finetune` made. With --json each answer is a line of JSON.
    """
    if sum((read is not None, bool(texts), glue is not None, squad is not None)) != 1:
        raise QuestionError(
            "give texts, or --input FILE (- for standard input), or --glue FILE, or --squad FILE"
        )
    if skip_bad and (glue or squad):
        raise QuestionError("--skip-bad: each row of a benchmark's file must have its answer")
    for file in (read, glue, squad):
        check_input(file)
    bundle = load_fine_tuned(model, device)
    from bertsmith.tasks.inputs import Counts
    from bertsmith.use.answer import with_null_threshold
    from bertsmith.use.submission import squad_predictions, submission

    if null_threshold is not None:
        bundle = with_null_threshold(bundle, null_threshold)
    unknown = UnknownWarning()
    bundle, counts = unknown.counting(bundle), Counts()
    if squad is not None:
        put_json(squad_predictions(bundle, squad, counts))
    elif glue is not None:
        for line in submission(bundle, glue, counts):
            put(line)
    else:
        _answer_lines(
            bundle, read, texts or [], counts, unknown, skip_bad=skip_bad, as_json=as_json
        )
    if counts.cut_off:
        say(f"cut off {counts.cut_off:,} that are longer than the model reads")
    unknown.warn()


def _answer_lines(
    bundle: "TaskBundle",
    read: str | None,
    texts: list[str],
    counts: "Counts",
    unknown: UnknownWarning,
    *,
    skip_bad: bool,
    as_json: bool,
) -> None:
    from bertsmith.use.asked import Skipped, told

    lines: Iterator[str] = lines_of(read) if read is not None else iter(texts)
    where = "text" if read is None else f"{STDIN_NAME if read == STDIN else read}, line"
    at_once = read == STDIN and sys.stdin.isatty()
    skipped = Skipped() if skip_bad else None
    for value, line in told(bundle, lines, where=where, skipped=skipped, at_once=at_once):
        counts.cut_off += value.get("cut_off", False)
        if as_json:
            put_json(value)
        else:
            put(line)
        if at_once:
            sys.stdout.flush()
        if read == STDIN:
            unknown.warn()
    if skipped is not None and skipped.count:
        say(f"left out {skipped.count:,} lines; the first: {skipped.first}")


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        Path, typer.Option(help="A labelled table; or the folder of a public task's files.")
    ],
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting of the task, such as task.header=false."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out, counted, instead of stopping.")
    ] = False,
    encoding: Annotated[
        str | None, typer.Option(help="The table's encoding if it is not UTF-8, such as cp949.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="What separates the columns of CSV; else it is detected.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric, such as roc_auc, mae or f1:LABEL; may be repeated. Default: the "
            "metrics of the task."
        ),
    ] = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score a fine-tuned model on a labelled table, by the metrics of its task and by label.

    Of many labels those with the lowest F1 and the most confused pairs are shown, with --json all.
    Columns are those of the table that it was fine-tuned on, unless they are named here.
    """
    named = {"text": text, "pair": pair, "label": label, "skip_bad": skip_bad,
             "encoding": encoding, "delimiter": delimiter,
             "null_threshold": null_threshold, "metrics": metric or None}  # fmt: skip
    said = {name: value for name, value in named.items() if value is not None}
    changes = wished(None, {"task": said}, assign or [])
    if len(changes) > 1 or not isinstance(changes["task"], dict):
        raise SettingsError("--set: evaluate takes settings of the task, such as task.header=false")
    if not data.exists():
        raise QuestionError(f"{data}: no such file")
    bundle = load_fine_tuned(model, device)
    from bertsmith.use.evaluate import evaluate as scored

    unknown = UnknownWarning()
    figures = scored(unknown.counting(bundle), data, changes=changes["task"])
    unknown.warn()
    if as_json:
        put_json(figures)
        return
    counts = figures.pop("counts")
    classes, confusion = figures.pop("classes", {}), figures.pop("confusion", {})
    put(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    for line in class_lines(classes) + confusion_lines(confusion):
        put(line)
    tell_counts(counts)
    for reason, where in counts.get("first_skipped", {}).items():
        say(f"{counts['skipped'][reason]:,} skipped: {reason} (the first: {where})")
    for note in counts.get("notes", []):
        say(note)
