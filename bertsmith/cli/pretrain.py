"""``bertsmith pretrain``: train a model on a token store."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.hints import format_fill_command, quote_path
from bertsmith.cli.launcher import report_once
from bertsmith.cli.model_options import check_positive
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET, describe_stop
from bertsmith.errors import SettingsError
from bertsmith.plurals import count_noun
from bertsmith.text.unknown import format_unknown_warning

if TYPE_CHECKING:
    from bertsmith.train.pretraining.result import PretrainResult


@app.command(
    epilog=format_examples(
        "bertsmith pretrain --data my-store --minutes 30 --out my-run",
        "bertsmith pretrain --data my-store --size base --recipe paper --plan",
        "bertsmith pretrain --from my-run --data my-store --steps 1000 --out my-run-2",
    )
)
def pretrain(
    data: Annotated[Path, typer.Option(help="A token store made by `bertsmith prepare`.")],
    out: Annotated[
        Path | None, typer.Option(help="The run directory to write; not needed with --plan.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="tiny, mini, small, medium, base or large. Default: mini. Not with --from, whose "
            "model has its own size."
        ),
    ] = None,
    recipe: Annotated[
        Literal["fast", "paper"] | None,
        typer.Option(
            help="paper: as published (Devlin et al. 2018); fast: with later improvements for "
            "short runs, such as a higher learning rate. Default: fast."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.", min=1)] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the training data. Default, without --steps and --minutes: 1, or "
            "1,000,000 steps with --recipe paper.",
            callback=check_positive,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Wall-clock time of the whole command, from its start to the written model.",
            callback=check_positive,
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Continue from a model directory, a run directory, the name of a reference model "
            "(mini-en) or a Hub id, by default with half of the learning rate of a new model. The "
            "store must have its vocabulary.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, such as optim.lr=2e-4; may be repeated."),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only measure the speed and print steps, tokens, memory and time."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Pre-train a BERT with masked LM, and NSP if data.nsp is true.

    Writes checkpoints, metrics, a loss curve and the final model to the run directory. Ctrl-C,
    SIGTERM and a closed terminal save a checkpoint; the same command then continues the run.

    torchrun --nproc-per-node 2 -m bertsmith pretrain ... trains in 2 processes.
    """
    command_start = time.perf_counter()
    budget = {"steps": steps, "epochs": epochs, "minutes": minutes}
    overrides: dict[str, Any] = {
        "size": size,
        "recipe": recipe,
        "start_from": start_from,
        "config": config,
        "assignments": assignments or [],
    }
    if out is None and not plan:
        raise SettingsError("--out is missing; give the run directory: --out RUN")
    from bertsmith.train.pretraining.resolve import check_pretrain_arguments

    with report_once():
        check_pretrain_arguments(data, out, budget, overrides)
    overrides |= budget
    if plan:
        _estimate(data, overrides, as_json=as_json)
        return
    assert out is not None
    from bertsmith.runtime.process_start import find_process_start
    from bertsmith.train.pretraining import pretrain as training

    result = training.pretrain(
        data, out, progress=TerminalProgress(), start_time=find_process_start(command_start),
        **overrides,
    )  # fmt: skip
    step = result.outcome.state.step
    if as_json:
        print_json(
            {
                "run": str(result.run),
                "model": str(result.model) if result.model else None,
                "step": step,
                "steps": result.steps,
                "metrics": result.heldout,
                "start_metrics": result.start_heldout or None,
            }
        )
    if result.model is None:
        log(f"{describe_stop(step, result.steps)}; run the same command to continue")
        raise typer.Exit(SIGNAL_EXIT_OFFSET + (result.outcome.signal or signal.SIGINT))
    _print_metrics(result, as_json=as_json)
    if not result.was_finished:
        log(f"wrote {result.model}" + (f" and {result.curve}" if result.curve else ""))
    if result.is_masked_lm:
        log(f"next: {format_fill_command(result.model)}")
    else:
        model = quote_path(result.model)
        log(f"next: bertsmith finetune TASK --model {model} --data DATA --out RUN")
    log(
        f"to train this model further: bertsmith pretrain --from {quote_path(out)} "
        f"--data {quote_path(data)} --out NEW"
    )


def _print_metrics(result: "PretrainResult", *, as_json: bool) -> None:
    """Log warnings about the metrics of a run; print the metrics unless ``as_json``."""
    heldout = result.heldout
    unknown_share = heldout.get("unknown_share")
    warning = format_unknown_warning(unknown_share or 0.0, "the held-out tokens")
    if warning is not None:
        log(f"{warning}; the metrics exclude [UNK]")
    start_loss = result.start_heldout.get("mlm_loss")
    if start_loss is not None and heldout["mlm_loss"] > start_loss:
        log(
            "warning: on the held-out text, this model is worse than the model of --from; use "
            "more text, a longer run or a lower optim.lr"
        )
    if as_json:
        return
    # Runs of version 0.1 have no unknown_share.
    unknown = (
        "" if unknown_share is None else f"; {unknown_share:.1%} of the tokens are [UNK], excluded"
    )
    # Runs of version 0.2 have no num_sequences.
    sequences = ""
    if "num_sequences" in heldout:
        sequences = f" ({count_noun(heldout['num_sequences'], 'sequence')})"
    start = "" if start_loss is None else f"before training {start_loss:.3f}, "
    loss_name = "masked-LM loss" if result.is_masked_lm else "left-to-right loss"
    print_line(
        f"held out{sequences}: {loss_name} {heldout['mlm_loss']:.3f} "
        f"({start}unigram entropy {heldout['unigram_entropy']:.3f}), "
        f"perplexity {heldout['perplexity']:.1f}, accuracy {heldout['mlm_accuracy']:.1%}"
        f"{unknown}"
    )
    if "phase2_mlm_loss" in heldout:
        print_line(
            "at the length of the second phase "
            f"({count_noun(int(heldout['phase2_num_sequences']), 'sequence')}): "
            f"{loss_name} {heldout['phase2_mlm_loss']:.3f}, "
            f"accuracy {heldout['phase2_mlm_accuracy']:.1%}"
        )
    if "nsp_accuracy" in heldout:
        is_order = result.settings.data.pair_objective == "sop"
        print_line(
            f"{'sentence order' if is_order else 'next sentence'}: "
            f"accuracy {heldout['nsp_accuracy']:.1%}, 95% confidence "
            f"interval {heldout['nsp_accuracy_low']:.1%} to {heldout['nsp_accuracy_high']:.1%} "
            f"(majority class {heldout['nsp_majority_accuracy']:.1%})"
        )


def _estimate(data: Path, overrides: dict[str, Any], *, as_json: bool) -> None:
    """Measure the speed of this machine, and print the estimated cost of a run."""
    from bertsmith.train.pretraining.estimate import estimate_run

    log("measuring the speed of this machine …")
    estimate = estimate_run(data, progress=TerminalProgress(), **overrides)
    if as_json:
        print_json(estimate)
    else:
        _print_estimate(estimate)


def _print_estimate(estimate: dict[str, Any]) -> None:
    """Print the estimated cost of a run."""
    print_line(f"machine      {estimate['machine']}")
    print_line(f"parameters   {estimate['parameters']:,}")
    print_line(
        f"steps        {estimate['steps']:,} of {count_noun(estimate['batch_size'], 'sequence')}"
    )
    print_line(f"tokens       {estimate['tokens']:,} ({estimate['epochs']:.2f} epochs)")
    print_line(
        f"speed        {estimate['tokens_per_second']:,} tokens/s, "
        f"{estimate['mfu']:.0%} of peak matmul speed "
        f"({estimate['peak_flops'] / 1e9:,.0f} GFLOP/s)"
    )
    print_line(
        f"evaluations  {estimate['evaluations']:,} of "
        f"{count_noun(estimate['num_eval_sequences'], 'sequence')}"
    )
    print_line(f"time         {estimate['minutes']:,.1f} minutes")
    at_least = "at least " if estimate["is_extrapolated"] else ""
    print_line(f"memory       {at_least}{estimate['memory_bytes'] / 2**20:,.0f} MiB")
    if estimate["is_extrapolated"]:
        print_line("measured     only a part of one step, because a step is slow")
