"""``bertsmith finetune``: from a model and a labelled table to a model for that task.

It never knows how training works, only how to ask for it and what to say afterwards.
"""

import json
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import TerminalProgress, log, print_counts, print_json, print_line
from bertsmith.cli.hints import predict_command

if TYPE_CHECKING:
    from bertsmith.train.finetuning.finetune import FinetuneResult


class KindName(StrEnum):
    """What a label is."""

    single = "single"
    multi = "multi"
    regression = "regression"
    entities = "entities"
    tags = "tags"


class Layers(StrEnum):
    """What a BiLSTM reads of a frozen encoder (table 7 of the paper)."""

    embeddings = "embeddings"
    second_to_last = "second-to-last"
    last = "last"
    sum_last_four = "weighted-sum-last-four"
    concat_last_four = "concat-last-four"
    sum_all = "weighted-sum-all"


@app.command()
def finetune(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="cola, sst-2, mrpc, sts-b, qqp, mnli, qnli, rte, wnli, nsmc, korsts, squad, "
            "squad2, swag, codah, comve-b, conll2003, conll2003-pos, klue-ner; or classify, "
            "answer, choose or tag, for files of your own.",
            show_default=False,
        ),
    ],
    model: Annotated[Path, typer.Option(help="The model directory, RUN or hub id to start from.")],
    data: Annotated[
        Path,
        typer.Option(help="A public task's folder or its training file; or the training table."),
    ],
    out: Annotated[Path, typer.Option(help="The run's directory.")],
    dev: Annotated[
        Path | None, typer.Option(help="The held-out table; else a tenth is held out.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    endings: Annotated[
        str | None, typer.Option(help="choose: the columns of the endings, such as a,b,c,d.")
    ] = None,
    kind: Annotated[
        KindName | None,
        typer.Option(help="One label, several (a|b), or a number; of tags, entities or plain."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric of the held-out part, such as roc_auc, mae or f1:LABEL; may be "
            "repeated. The first one decides which run or epoch is best."
        ),
    ] = None,
    features: Annotated[
        Layers | None,
        typer.Option(help="Leave the encoder as it is; learn a BiLSTM on these of its layers."),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Walks through the data.", min=0)] = None,
    batch: Annotated[int | None, typer.Option(help="Examples of a step.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="The peak learning rate.", min=0)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of an input.", min=8)] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and dropout.", min=0)] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs with seeds one after another; the best is kept.", min=1)
    ] = 1,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="The paper's grid: batch 16, 32; lr 5e-5, 3e-5, 2e-5; epochs 2, 3, 4."
        ),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out, counted, instead of stopping.")
    ] = False,
    encoding: Annotated[
        str | None, typer.Option(help="The files' encoding if it is not UTF-8, such as cp949.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="What separates the columns of CSV; else it is detected.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as optim.lr=2e-5.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Fine-tune a model on a task: labels of texts, answers, choices, entities or tags.

    The same command again goes on where a stopped run left off. Ctrl-C and SIGTERM save first.
    """
    values: dict[str, Any] = {
        "task": {
            "text": text, "pair": pair, "label": label, "kind": kind.value if kind else None,
            "endings": endings.split(",") if endings else None, "metrics": metric or None,
            "batch": batch, "length": length, "skip_bad": skip_bad or None,
            "encoding": encoding, "delimiter": delimiter,
            "heldout": {"dev": str(dev.resolve())} if dev else None,
        },
        "optim": {"lr": lr},
        "schedule": {"epochs": epochs},
        "run": {"seed": seed},
        "features": {"layers": features.value if features else None},
    }  # fmt: skip
    said = {name: {key: value for key, value in table.items() if value is not None}
            for name, table in values.items()}  # fmt: skip
    if features is None:
        del said["features"]
    given: dict[str, Any] = {
        "data": data, "config": config, "assignments": assign or [], "values": said,
        "progress": TerminalProgress(),
    }  # fmt: skip
    several = seeds > 1 or grid
    from bertsmith.train.finetuning.checks import check_finetuning

    check_finetuning(task, model, data, None if several else out, config, assign or [], said)
    if several:
        _several(task, model, out, seeds=seeds, grid=grid, as_json=as_json, given=given)
    else:
        _once(task, model, out, as_json=as_json, given=given)


def _once(task: str, model: Path, out: Path, *, as_json: bool, given: dict[str, Any]) -> None:
    from bertsmith.train.finetuning.finetune import finetune as tune

    result = tune(task, model, out, **given)
    if as_json:
        _put_result(result)
    if result.model is None:
        _leave(result)
    if not as_json:
        _tell(result)
    log(f"wrote {result.model}")
    _say_next(result.run, result.model)


def _several(
    task: str,
    model: Path,
    out: Path,
    *,
    seeds: int,
    grid: bool,
    as_json: bool,
    given: dict[str, Any],
) -> None:
    from bertsmith.train.finetuning.sweep import run_sweep

    result = run_sweep(task, model, out, seeds=seeds, grid=grid, **given)
    if result.stopped_run is not None:
        if as_json:
            _put_result(result.stopped_run)
        _leave(result.stopped_run)
    assert result.best is not None
    if as_json:
        print_json(json.loads((result.out / "results.json").read_text(encoding="utf-8")))
    else:
        metric = result.best.metrics[0]
        for one in result.points:
            middle, least, most = one.metric_over_seeds(metric)
            place = " ".join(
                f"{key.rpartition('.')[2]}={value}" for key, value in one.hyperparameters.items()
            )
            print_line(f"{place or metric}: median {middle:.4f}, {least:.4f} to {most:.4f} "
                f"over {len(one.runs)} seeds")  # fmt: skip
        _tell(result.best)
    log(f"wrote {result.model}, the best by {result.best.metrics[0]}: {result.best.run.name}")
    assert result.model is not None
    _say_next(result.best.run, result.model)


def _say_next(run: Path, model: Path) -> None:
    """Say how to ask the model of a run, with texts of the form that its task has."""
    from bertsmith.settings import read_toml
    from bertsmith.train.engine.run_directory import SETTINGS_FILE

    task = read_toml(run / SETTINGS_FILE)["task"]
    endings = len(task.get("endings", ())) or 2
    command = predict_command(model, task["kind"], pair="pair" in task, endings=endings)
    log(f"next: {command}")


def _leave(result: "FinetuneResult") -> NoReturn:
    """Leave as a signal asks to, that came in a run or at the end of one of several."""
    log(f"stopped after step {result.step} of {result.steps}, all saved; "
        "the same command goes on from there")  # fmt: skip
    raise typer.Exit(128 + (result.signal or result.late or signal.SIGINT))


def _put_result(result: "FinetuneResult") -> None:
    print_json(
        {
            "run": str(result.run),
            "model": str(result.model) if result.model else None,
            "step": result.step,
            "steps": result.steps,
            "heldout": result.figures,
            "counts": result.counts,
        }
    )


def _tell(result: "FinetuneResult") -> None:
    figures = result.figures
    told = ", ".join(f"{name} {figures[name]:.4f}" for name in result.metrics)
    print_line(
        f"held out ({figures['examples']:,.0f} examples): {told}, loss {figures['loss']:.4f}"
    )
    for name, counts in result.counts.items():
        print_counts(counts, f"{name}: ")
