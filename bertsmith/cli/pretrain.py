"""``bertsmith pretrain``: from a token store to a model.

It never knows how training works, only how to ask for it and what to say afterwards.
"""

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.hints import fill_command, quote_path


class RecipeName(StrEnum):
    """The recipes."""

    fast = "fast"
    paper = "paper"


@app.command()
def pretrain(
    data: Annotated[Path, typer.Option(help="The store made by `bertsmith prepare`.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's directory; not needed with --plan.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="tiny, mini (the default), small, medium, base or large.")
    ] = None,
    recipe: Annotated[
        RecipeName, typer.Option(help="fast: what has been learnt since; paper: as published.")
    ] = RecipeName.fast,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", min=1)] = None,
    epochs: Annotated[float | None, typer.Option(help="Walks through the data.", min=0)] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time; a probe turns it into steps, and a run that is "
            "much slower or faster than probed is planned anew once.",
            min=0,
        ),
    ] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", help="Go on from a model directory, a RUN or a hub id.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as optim.lr=2e-4.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Probe, tell steps, tokens, memory and time, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Pre-train a BERT with masked LM and next-sentence prediction.

    The same command again goes on where a stopped run left off. Ctrl-C and SIGTERM save first.
    """
    lengths = {"steps": steps, "epochs": epochs, "minutes": minutes}
    wishes: dict[str, Any] = {
        "size": size, "recipe": recipe.value, "start_from": start_from, "config": config,
        "assignments": assign or [],
    }  # fmt: skip
    if out is None and not plan:
        raise typer.BadParameter("say where the run is to be written: --out RUN")
    from bertsmith.train.pretraining.checks import check_pretraining

    check_pretraining(data, out, lengths, wishes)
    wishes |= lengths
    from bertsmith.train.pretraining import pretrain as training

    if plan:
        log("probing the speed of this machine …")
        expected = training.estimate_run(data, **wishes)
        print_json(expected) if as_json else _tell_plan(expected)
        return
    assert out is not None
    result = training.pretrain(data, out, progress=TerminalProgress(), **wishes)
    if as_json:
        print_json(
            {
                "run": str(result.run),
                "model": str(result.model) if result.model else None,
                "step": result.outcome.state.step,
                "steps": result.steps,
                "heldout": result.heldout,
            }
        )
    if result.model is None:
        log(f"stopped after step {result.outcome.state.step} of {result.steps}, all saved; "
            "the same command goes on from there")  # fmt: skip
        raise typer.Exit(128 + (result.outcome.signal or signal.SIGINT))
    _tell(result.heldout, as_json=as_json)
    log(f"wrote {result.model} (and {result.curve or 'no curve'})")
    if result.is_masked_lm:
        log(f"next: {fill_command(result.model)}")
    else:
        model = quote_path(result.model)
        log(f"next: bertsmith finetune TASK --model {model} --data DATA --out RUN")
    log(f"to train it further: bertsmith pretrain --from {quote_path(out)} --data {quote_path(data)} "
        "--out NEW")  # fmt: skip


def _tell(heldout: dict[str, float], *, as_json: bool) -> None:
    from bertsmith.text.unknown import unknown_warning

    share = heldout.get("unknown_share")
    warning = unknown_warning(share or 0.0, "the held-out tokens")
    if warning is not None:
        log(f"{warning}; the figures leave [UNK] out")
    if as_json:
        return
    # Runs of version 0.1 did not count it.
    unknown = "" if share is None else f"; {share:.1%} of the tokens are [UNK], left out"
    print_line(
        f"held out: masked-LM loss {heldout['masked_lm']:.3f} "
        f"(unigram entropy {heldout['unigram_entropy']:.3f}), "
        f"perplexity {heldout['perplexity']:.1f}, accuracy {heldout['masked_accuracy']:.1%}"
        f"{unknown}"
    )
    if "next_sentence_accuracy" in heldout:
        print_line(
            f"next sentence: accuracy {heldout['next_sentence_accuracy']:.1%}, 95 % interval "
            f"{heldout['next_sentence_low']:.1%} to {heldout['next_sentence_high']:.1%} "
            f"(larger class {heldout['larger_class']:.1%})"
        )


def _tell_plan(expected: dict[str, Any]) -> None:
    print_line(f"machine      {expected['machine']}")
    print_line(f"parameters   {expected['parameters']:,}")
    print_line(f"steps        {expected['steps']:,} of {expected['batch']} sequences")
    print_line(f"tokens       {expected['tokens']:,} ({expected['epochs']:.2f} epochs)")
    print_line(f"speed        {expected['tokens_per_second']:,} tokens a second, "
        f"{expected['mfu']:.0%} of the matrix ceiling "
        f"({expected['ceiling_flops'] / 1e9:,.0f} GFLOP/s)")  # fmt: skip
    print_line(
        f"evaluations  {expected['evaluations']:,} of {expected['eval_sequences']:,} sequences"
    )
    print_line(f"time         {expected['minutes']:,.1f} minutes")
    print_line(f"memory       {expected['memory_bytes'] / 2**20:,.0f} MiB")
