"""``bertsmith demo``: the whole way, from text that every machine has to a BERT.

It never knows more than its user: it gives the commands that a person would type.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log
from bertsmith.cli.hints import quote_path

#: Words of the demo's vocabulary: enough for the prose of documentation, and quick to learn.
VOCAB_SIZE = 8000
#: Held-out sequences that an evaluation reads: all of them, for a narrow interval.
EVAL_SEQUENCES = 5000

SENTENCES = (
    "Return the [MASK] of the list.",
    "If the file does not [MASK], an error is raised.",
    "The [MASK] value is None.",
    "This function returns a [MASK] array.",
    "Set this to [MASK] to disable the check.",
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path(
        "bertsmith-demo"
    ),
    minutes: Annotated[float, typer.Option(help="Minutes of pre-training.", min=0.1)] = 3.0,
    seed: Annotated[int, typer.Option(help="The seed of weights, data and dropout.", min=0)] = 0,
) -> None:
    """Make a small BERT from the documentation of the Python packages on this machine.

    It gives the five commands that make a model of any text. Stopped and started again, it goes
    on where it was.
    """
    corpus, tokenizer, store = out / "corpus.jsonl", out / "tokenizer", out / "store"
    run = out / f"run-{seed}"
    if not corpus.exists():
        _do("corpus", "docstrings", "--out", corpus)
    if not tokenizer.exists():
        _do("vocab", corpus, "--size", VOCAB_SIZE, "--out", tokenizer)
    if not (store / "manifest.json").exists():
        _do("prepare", corpus, "--tokenizer", tokenizer, "--held-out", 0.05, "--out", store)
    # Of four heads, two look at the neighbours, and one compares the sentences of a pair.
    settings = ("model.heads=4", f"run.eval_sequences={EVAL_SEQUENCES}", f"run.seed={seed}")
    _do(
        "pretrain", "--data", store, "--size", "tiny", "--minutes", minutes, "--out", run,
        *(part for setting in settings for part in ("--set", setting)),
    )  # fmt: skip
    _do("fill", run, *SENTENCES, "--top", 3)
    log("")
    log(f"The model is in {run / 'model'}; the loss curve is {run / 'curve.png'}.")
    log("Next: the same commands with your own text make your own BERT. Or go on with this one:")
    log(f'  bertsmith fill {quote_path(run)} "The [MASK] of the function."')
    log(f"  bertsmith inspect {quote_path(run)}")


def _do(*words: object) -> None:
    """Show a command and run it; a command that stops early ends the demo with its status."""
    arguments = [str(word) for word in words]
    log("")
    log(f"$ bertsmith {shlex.join(arguments)}")
    status = app(arguments, standalone_mode=False)
    if status:
        raise typer.Exit(status)
