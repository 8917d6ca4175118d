"""``bertsmith lab panel``: compare models on the same tasks, in one table."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.lab import group
from bertsmith.errors import SettingsError
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertsmith.lab.panel.panel import Panel, PlannedTask
    from bertsmith.lab.panel.tasks import PanelTask

#: Repeated here so that --help does not import torch (tested).
DEFAULT_LEARNING_RATE = 1e-4


@group.command(
    epilog=format_examples(
        "bertsmith lab panel my-run --data glue/ --tasks sst-2-1k,cola --plan",
        "bertsmith lab panel run-a run-b --text held-out.txt --minimal-pairs blimp/",
        "bertsmith lab panel my-korean-run --data korean/ --tasks korean",
    )
)
def panel(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="Model directories, run directories, names of reference models or Hub ids.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the data of the tasks under their public names: SST-2, CoLA, MRPC, "
            "RTE, STS-B, QNLI, QQP, MNLI, conll2003, nsmc, KorSTS, klue-ner; or glue/SST-2 and so "
            "on.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text that no model was trained on, for the held-out loss: a file or a folder.",
            show_default=False,
        ),
    ] = None,
    minimal_pairs: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of minimal pairs as in BLiMP, or a folder of such files; may be repeated.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated tasks or groups of tasks: held-out, minimal-pairs, english "
            "(sst-2-1k, sst-2-10k, cola, mrpc, rte, sts-b, conll2003, probe), glue (cola, mrpc, "
            "rte, sts-b, sst-2, qnli, qqp, mnli), korean (nsmc, korsts, klue-ner). Default: "
            "the English tasks that have a folder in --data (probe if scikit-learn is installed), "
            "held-out with --text and minimal-pairs with --minimal-pairs.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--lr",
            help="Peak learning rate of fine-tuning; lower it for models as large as base.",
        ),
    ] = DEFAULT_LEARNING_RATE,
    pairs: Annotated[
        int, typer.Option(help="Maximum minimal pairs of each file; 0 for all.", min=0)
    ] = 250,
    untrained: Annotated[
        bool,
        typer.Option(
            "--untrained/--no-untrained",
            help="Add an untrained model of each architecture as a baseline, with the "
            "initialization of the model's run if Bertsmith trained it from scratch.",
        ),
    ] = True,
    out: Annotated[
        Path, typer.Option(help="The folder for the table, the results and runs in progress.")
    ] = Path("panel"),
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Compute no results; measure the speed and print the minutes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare models on the same tasks, in one table.

    Shows the mean and standard deviation over seeds on validation sets; test sets are not read.
    First prints how long the tasks will take. An interrupted command continues where it stopped if
    it is run again, and finished results are not computed again.
    """
    if not 0 < learning_rate < math.inf:
        raise SettingsError(f"--lr is {learning_rate:g}; give a finite number above 0")
    from bertsmith.lab.panel.cells import PanelOptions
    from bertsmith.lab.panel.panel import Panel

    selected = _select_tasks(tasks, data, text, minimal_pairs)
    comparison = Panel(
        models, selected, data=data, text=text, minimal_pairs=minimal_pairs or (), out=out,
        options=PanelOptions(
            num_seeds=seeds, learning_rate=learning_rate, max_pairs=pairs or None
        ),
        with_untrained=untrained, progress=TerminalProgress(),
    )  # fmt: skip
    planned_tasks = _plan_tasks(comparison)
    if plan:
        _print_plan(planned_tasks, as_json=as_json)
        return
    for line in _format_plan(planned_tasks):
        log(line)
    _run(comparison, as_json=as_json)


def _select_tasks(
    tasks: str | None, data: Path | None, text: Path | None, minimal_pairs: list[Path] | None
) -> "list[PanelTask]":
    """Return the tasks of ``--tasks``, by default the English tasks for which there is data."""
    from bertsmith.lab.panel.tasks import select_tasks, split_by_data

    inputs = {"english": data, "held-out": text, "minimal-pairs": minimal_pairs}
    if tasks is not None:
        names = [name for name in map(str.strip, tasks.split(",")) if name]
    else:
        names = [name for name, path in inputs.items() if path]
        if not names:
            raise SettingsError(
                "nothing to compare the models on: add --data FOLDER, --text FILE or "
                "--minimal-pairs FILE"
            )
    selected = select_tasks(names, has_text=text is not None, has_minimal_pairs=bool(minimal_pairs))
    for option, name in (("--text", "held-out"), ("--minimal-pairs", "minimal-pairs")):
        if inputs[name] and name not in [task.name for task in selected]:
            raise SettingsError(
                f"{option}: no effect, because --tasks does not contain {name}; add it or remove "
                f"{option}"
            )
    if tasks is not None or data is None:
        return selected
    selected, missing = split_by_data(selected, data)
    if missing:
        names = [task.name for task in missing]
        log(f"left out, because {data} has no folder for them: {', '.join(names)}")
    probes = [task for task in selected if task.evaluation == "probe"]
    if probes and find_spec("sklearn") is None:
        log("left out, because scikit-learn is not installed (the extra lab): probe")
        selected = [task for task in selected if task not in probes]
    return selected


def _plan_tasks(comparison: "Panel") -> "list[PlannedTask]":
    """Return the tasks that are still to run; if any, log that their durations are measured."""
    if comparison.has_missing_results():
        log("measuring the speed of this machine …")
    return comparison.plan()


def _format_plan(planned_tasks: "Sequence[PlannedTask]") -> list[str]:
    """Return lines with the estimated minutes of each task and in total."""
    lines = [
        f"{planned.task.name}: {count_noun(planned.num_cells, 'result')}, about "
        f"{planned.seconds / 60:.1f} minutes"
        for planned in planned_tasks
    ]
    num_cells = sum(planned.num_cells for planned in planned_tasks)
    total_minutes = sum(planned.seconds for planned in planned_tasks) / 60
    total = (
        f"{count_noun(num_cells, 'result')} to compute: about {total_minutes:,.0f} minutes"
        if num_cells
        else "all results exist already"
    )
    return [*lines, total]


def _print_plan(planned_tasks: "Sequence[PlannedTask]", *, as_json: bool) -> None:
    """Print the missing results and the estimated minutes of each task."""
    if as_json:
        tasks = [
            {"name": planned.task.name, "results": planned.num_cells,
             "minutes": planned.seconds / 60}
            for planned in planned_tasks
        ]  # fmt: skip
        print_json({"tasks": tasks, "minutes": sum(p.seconds for p in planned_tasks) / 60})
        return
    for line in _format_plan(planned_tasks):
        print_line(line)


def _run(comparison: "Panel", *, as_json: bool) -> None:
    """Compute the missing results and print the table."""
    outcome = comparison.run()
    if as_json:
        print_json(outcome.data)
    else:
        print_line(outcome.markdown.rstrip())
    for cell, reason in outcome.failures.items():
        log(f"failed: {cell}: {reason}")
    log(f"wrote {', '.join(map(str, outcome.files))}")
    if outcome.failures:
        missing_results = count_noun(outcome.num_missing, "result is", "results are")
        log(f"{missing_results} missing; run the same command to try again")
        raise typer.Exit(1)
    log(f"next: open {outcome.files[0]}, or add models to the same command")
