"""``bertsmith lab``: run the paper's experiments, one command each."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line, print_table
from bertsmith.errors import SettingsError
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.lab.experiment_run import ExperimentRun, PlannedStage

#: Names of the experiments; repeated here so that --help does not import them (tested).
EXPERIMENTS = (
    "pretraining-tasks", "model-size", "training-steps", "features", "masking", "pooling",
    "context", "activations", "normalization", "positions", "vocabulary", "learning",
)  # fmt: skip


class ScaleName(StrEnum):
    """Names of the scales."""

    smoke = "smoke"
    small = "small"
    full = "full"


@app.command(
    epilog=format_examples(
        "bertsmith lab activations --scale smoke",
        "bertsmith lab masking --text my-text/ --plan",
        "bertsmith lab features --text my-text/ --tasks my-tasks/ --seeds 3",
    )
)
def lab(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"The experiment: {', '.join(EXPERIMENTS)}.")
    ],
    scale: Annotated[
        ScaleName,
        typer.Option(
            help="smoke: a toy language, seconds; small: about an hour; full: the paper's size."
        ),
    ] = ScaleName.small,
    text: Annotated[
        Path | None, typer.Option(help="English text for pre-training: a file or a folder.")
    ] = None,
    korean_text: Annotated[
        Path | None,
        typer.Option(help="Korean text, for the experiments context and vocabulary."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="A folder with the data of the tasks: MRPC, SST-2, squad, and so on."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Use this model instead of training one, for the experiments features, pooling, "
            "context and positions."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs with different seeds. Default: set by the scale.", min=1),
    ] = None,
    out: Annotated[Path, typer.Option(help="Tables and plots are written to OUT/SCALE.")] = Path(
        "lab"
    ),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of SCALE/results.jsonl, which caches results. Default: OUT."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of stores, runs and models. Default: OUT/SCALE/work."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only measure the speed and print the runs and minutes."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run one of the paper's experiments.

    Prints a table of the results next to the paper's figures. An interrupted command continues
    where it stopped if it is run again. Runs that several experiments need are shared. If a run
    fails, the others continue.
    """
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; expected: {', '.join(EXPERIMENTS)}")
    from bertsmith.lab.experiment_run import ExperimentRun
    from bertsmith.lab.sources import Sources
    from bertsmith.lab.stage_runners import StoppedError

    run = ExperimentRun(
        name, scale=scale.value,
        sources=Sources(text, korean_text, tasks, None if model is None else str(model)),
        out=out, results_dir=results, work_dir=work, num_seeds=seeds, progress=TerminalProgress(),
    )  # fmt: skip
    if plan:
        _print_plan(run, as_json=as_json)
        return
    log(f"{name}: {run.experiment.question} ({run.experiment.source})")
    try:
        outcome = run.run()
    except StoppedError as stopped:
        log(str(stopped))
        raise typer.Exit(128 + stopped.signal) from None
    files = list(map(str, outcome.files))
    if as_json:
        print_json(
            {
                "experiment": name,
                "data": outcome.report.data,
                "failures": outcome.failures,
                "files": files,
            }
        )
    else:
        print_line(outcome.report.to_markdown().rstrip())
    descriptions = run.describe_stages() if outcome.failures else {}
    for stage, reason in outcome.failures.items():
        log(f"failed: {descriptions.get(stage, stage)} ({stage}): {reason}")
    if files:
        log(f"wrote {', '.join(files)}")
    if outcome.failures:
        results_are = "results are" if outcome.num_missing > 1 else "result is"
        log(f"{outcome.num_missing} {results_are} missing; run the same command to try again")
        raise typer.Exit(1)
    log(f"next: open {files[-1]}")


def _print_plan(run: "ExperimentRun", *, as_json: bool) -> None:
    """Print the stages to run and their estimated minutes."""
    if run.find_missing_stages():
        log("measuring the speed of this machine …")
    stages = run.plan()
    total_minutes = sum(stage.seconds or 0.0 for stage in stages) / 60
    if as_json:
        print_json({"stages": list(map(_plan_to_json, stages)), "minutes": total_minutes})
        return
    rows = []
    for stage in stages:
        minutes = "" if stage.seconds is None else f"{stage.seconds / 60:.1f}"
        num_steps = f"{stage.num_steps:,}" if stage.num_steps else ""
        rows.append((stage.stage.name, stage.description, num_steps, minutes))
    print_table(("stage", "description", "steps", "minutes"), rows)
    num_results = len(run.stages)
    num_unknown = sum(stage.seconds is None for stage in stages)
    about = "at least" if num_unknown else "about"
    unknown = f", and {num_unknown} without an estimate" if num_unknown else ""
    print_line(
        f"{count_noun(len(stages), 'stage')} to run for "
        f"{count_noun(num_results, 'result')}: {about} {total_minutes:,.0f} "
        f"minutes{unknown}"
    )


def _plan_to_json(stage: "PlannedStage") -> dict[str, object]:
    return {
        "name": stage.stage.name,
        "description": stage.description,
        "steps": stage.num_steps,
        "settings": dict(stage.stage.settings),
        "minutes": None if stage.seconds is None else stage.seconds / 60,
    }
