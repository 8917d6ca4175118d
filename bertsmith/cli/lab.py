"""``bertsmith lab``: run one of the paper's experiments, or compare models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertsmith.cli.app import GroupWithDefaultCommand, app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line, print_table
from bertsmith.errors import SettingsError
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertsmith.lab.experiment_run import ExperimentRun, PlannedStage

#: Names of the experiments. They are repeated here so that --help does not import the experiments;
#: a test compares the names.
EXPERIMENTS = (
    "pretraining-tasks", "model-size", "training-steps", "features", "masking", "pooling",
    "context", "activations", "normalization", "positions", "vocabulary", "learning",
)  # fmt: skip

group = typer.Typer(
    name="lab",
    cls=GroupWithDefaultCommand,
    help="Run one of the paper's experiments, or compare models.\n\n"
    "`bertsmith lab NAME` is short for `bertsmith lab run NAME`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=format_examples(
        "bertsmith lab activations --scale smoke",
        "bertsmith lab panel my-run --data glue/ --plan",
    ),
)
app.add_typer(group)


@group.command(
    "run",
    epilog=format_examples(
        "bertsmith lab activations --scale smoke",
        "bertsmith lab masking --text my-text/ --plan",
        "bertsmith lab features --text my-text/ --tasks my-tasks/ --seeds 3",
    ),
)
def run_experiment(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"The experiment: {', '.join(EXPERIMENTS)}; or several, separated by commas.",
        ),
    ],
    scale: Annotated[
        Literal["smoke", "small", "medium", "full"],
        typer.Option(
            help="smoke: a toy language, seconds; small: about an hour; medium: about 14 "
            "core-hours for tables 5 and 6 and figure 5, without structured initialization; full: "
            "the paper's size."
        ),
    ] = "small",
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
        typer.Option(help="Number of runs with different seeds. Default: set by the scale.", min=1),
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
    """Run one of the paper's experiments, or several.

    Prints a verdict on the published claims, and a table of the results next to the paper's
    numbers. An interrupted command continues
    where it stopped if it is run again. A model that several experiments need is trained only once.
    If a run fails, the others continue.
    """
    names = list(dict.fromkeys(name.split(",")))
    for experiment in names:
        if experiment not in EXPERIMENTS:
            raise SettingsError(
                f"unknown experiment {experiment!r}; expected: {', '.join(EXPERIMENTS)}"
            )
    from bertsmith.lab.experiment_run import ExperimentRun
    from bertsmith.lab.sources import Sources

    runs = [
        ExperimentRun(
            experiment,
            scale=scale,
            sources=Sources(text, korean_text, tasks, None if model is None else str(model)),
            out=out,
            results_dir=results,
            work_dir=work,
            num_seeds=seeds,
            progress=TerminalProgress(),
        )
        for experiment in names
    ]
    if plan:
        _print_plan(runs, as_json=as_json)
        return
    results_by_name = []
    has_failures = False
    for run in runs:
        value, has_failed = _run(run, as_json=as_json)
        results_by_name.append(value)
        has_failures = has_failures or has_failed
    if as_json:
        print_json(results_by_name[0] if len(runs) == 1 else results_by_name)
    if has_failures:
        raise typer.Exit(1)


def _run(run: "ExperimentRun", *, as_json: bool) -> tuple[dict[str, object], bool]:
    """Run an experiment, and print its report unless ``as_json``.

    Returns:
        The result as a JSON value, and whether a stage failed.
    """
    name = run.experiment.name
    log(f"{name}: {run.experiment.question} ({run.experiment.source})")
    outcome = run.run()
    files = list(map(str, outcome.files))
    value: dict[str, object] = {
        "experiment": name,
        "data": outcome.report.data,
        "failures": outcome.failures,
        "files": files,
    }
    if not as_json:
        print_line(outcome.report.to_markdown().rstrip())
    descriptions = run.describe_stages() if outcome.failures else {}
    for stage, reason in outcome.failures.items():
        log(f"failed: {descriptions.get(stage, stage)} ({stage}): {reason}")
    if files:
        log(f"wrote {', '.join(files)}")
    if outcome.failures:
        missing_results = count_noun(outcome.num_missing, "result is", "results are")
        log(f"{missing_results} missing; run the same command to try again")
    else:
        log(f"next: open {files[-1]}")
    return value, bool(outcome.failures)


def _print_plan(runs: "Sequence[ExperimentRun]", *, as_json: bool) -> None:
    """Print the stages to run and their estimated costs; shared stages are counted once."""
    from bertsmith.lab.cost import CostEstimator, convert_to_core_hours

    if any(run.find_missing_stages() for run in runs):
        log("measuring the speed of this machine …")
    planned_by_name: dict[str, PlannedStage] = {}
    costs = CostEstimator()
    for run in runs:
        for planned in run.plan(costs):
            planned_by_name.setdefault(planned.stage.name, planned)
    planned_stages = list(planned_by_name.values())
    total_seconds = sum(planned.seconds or 0.0 for planned in planned_stages)
    total_minutes, core_hours = total_seconds / 60, convert_to_core_hours(total_seconds)
    if as_json:
        stages = [_planned_stage_to_json(planned) for planned in planned_stages]
        print_json({"stages": stages, "minutes": total_minutes, "core_hours": core_hours})
        return
    rows = []
    for planned in planned_stages:
        minutes = "" if planned.seconds is None else f"{planned.seconds / 60:.1f}"
        num_steps = f"{planned.num_steps:,}" if planned.num_steps else ""
        rows.append((planned.stage.name, planned.description, num_steps, minutes))
    print_table(("stage", "description", "steps", "minutes"), rows)
    num_results = sum(len(run.stages) for run in runs)
    num_without_estimate = sum(planned.seconds is None for planned in planned_stages)
    total = f"{total_minutes:,.0f} minutes ({core_hours:,.1f} core-hours)"
    estimate = f"about {total}"
    if num_without_estimate:
        estimate = f"at least {total}, and {num_without_estimate} without an estimate"
    print_line(
        f"{count_noun(len(planned_stages), 'stage')} to run for "
        f"{count_noun(num_results, 'result')}: {estimate}"
    )


def _planned_stage_to_json(planned: "PlannedStage") -> dict[str, object]:
    """Return a stage, its settings and its estimated minutes as a JSON value."""
    return {
        "name": planned.stage.name,
        "description": planned.description,
        "steps": planned.num_steps,
        "settings": dict(planned.stage.settings),
        "minutes": None if planned.seconds is None else planned.seconds / 60,
    }
