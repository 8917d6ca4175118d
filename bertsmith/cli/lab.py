"""``bertsmith lab``: the paper's experiments, each as one command.

It never knows what an experiment does.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line, print_table
from bertsmith.errors import SettingsError

if TYPE_CHECKING:
    from bertsmith.lab.experiment_run import ExperimentRun

#: The experiments, named here too so that --help needs nothing loaded; a test compares them.
EXPERIMENTS = (
    "pretraining-tasks", "model-size", "training-steps", "features", "masking", "pooling",
    "context", "activations", "normalization", "positions", "vocabulary", "learning",
)  # fmt: skip


class ScaleName(StrEnum):
    """The scales."""

    smoke = "smoke"
    small = "small"
    full = "full"


@app.command()
def lab(
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(EXPERIMENTS) + ".")],
    scale: Annotated[
        ScaleName,
        typer.Option(help="smoke: seconds, a toy; small: an hour or so; full: the paper's size."),
    ] = ScaleName.small,
    text: Annotated[Path | None, typer.Option(help="English text: a file or a folder.")] = None,
    korean_text: Annotated[
        Path | None, typer.Option(help="Korean text, for context and vocabulary.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="A folder with the tasks' own: MRPC, SST-2, squad, …")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Ask this model, for features, pooling, context and positions."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each; by default as the scale says.", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="Tables and pictures, in OUT/SCALE.")] = Path("lab"),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of SCALE/results.jsonl; by default OUT."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Stores, runs and models; by default OUT/SCALE/work.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Probe, tell runs and minutes, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Run one of the paper's experiments at a size one can afford, beside the paper's figures.

    The same command again goes on where a stopped one was, and makes nothing twice: runs that
    several experiments ask for are shared. A run that fails does not take others with it.
    """
    if name not in EXPERIMENTS:
        raise SettingsError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    from bertsmith.lab.experiment_run import ExperimentRun
    from bertsmith.lab.sources import Sources
    from bertsmith.lab.stage_runners import StoppedError

    laboratory = ExperimentRun(
        name, scale=scale.value,
        sources=Sources(text, korean_text, tasks, None if model is None else str(model)),
        out=out, results_dir=results, work_dir=work, num_seeds=seeds, progress=TerminalProgress(),
    )  # fmt: skip
    if plan:
        _tell_plan(laboratory, as_json=as_json)
        return
    log(f"{name}: {laboratory.experiment.question} ({laboratory.experiment.source})")
    try:
        done = laboratory.run()
    except StoppedError as stopped:
        log(str(stopped))
        raise typer.Exit(128 + stopped.signal) from None
    if as_json:
        print_json({"experiment": name, "figures": done.report.data, "failures": done.failures,
                  "files": list(map(str, done.files))})  # fmt: skip
    else:
        print_line(done.report.to_markdown().rstrip())
    words = laboratory.describe_stages() if done.failures else {}
    for stage, why in done.failures.items():
        log(f"failed: {words.get(stage, stage)} ({stage}): {why}")
    if done.files:
        log(f"wrote {', '.join(map(str, done.files))}")
    if done.failures:
        are = "results are" if done.num_missing > 1 else "result is"
        log(f"{done.num_missing} {are} missing; the same command tries again")
        raise typer.Exit(1)
    log(f"next: look at {done.files[-1]}")


def _tell_plan(laboratory: "ExperimentRun", *, as_json: bool) -> None:
    """Tell what is to be made and how long it takes; kinds that take no time to speak of, too."""
    if laboratory.missing_stages():
        log("probing the speed of this machine …")
    planned = laboratory.plan()
    total = sum(own.seconds or 0.0 for own in planned) / 60
    if as_json:
        stages = [{"name": own.stage.name, "words": own.description, "steps": own.num_steps,
                  "settings": dict(own.stage.settings),
                  "minutes": None if own.seconds is None else own.seconds / 60}
                 for own in planned]  # fmt: skip
        print_json({"stages": stages, "minutes": total})
        return
    rows = []
    for own in planned:
        minutes = "" if own.seconds is None else f"{own.seconds / 60:.1f}"
        rows.append(
            (
                own.stage.name,
                own.description,
                f"{own.num_steps:,}" if own.num_steps else "",
                minutes,
            )
        )
    print_table(("to make", "what", "steps", "minutes"), rows)
    wanted, dark = len(laboratory.stages), sum(own.seconds is None for own in planned)
    about = "at least" if dark else "about"
    beside = f", and {dark} whose time cannot be told beforehand" if dark else ""
    print_line(
        f"{len(planned)} stages to make for {wanted} results: {about} {total:,.0f} minutes{beside}"
    )
