"""``bertsmith demo``: train a small BERT from the documentation of installed packages."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_line
from bertsmith.cli.hints import quote_path
from bertsmith.cli.model_options import REFERENCE_MODEL
from bertsmith.cli.signals import Interrupted
from bertsmith.errors import InputError
from bertsmith.settings import read_stored_settings

#: Large enough for documentation text, small enough for quick training.
VOCAB_SIZE = 8000
#: Maximum number of sequences per evaluation. It is large enough to evaluate on all of the
#: validation split, which narrows the confidence interval.
EVAL_SEQUENCES = 5000

MASKED_SENTENCES = (
    "Return the [MASK] of the list.",
    "If the file does not [MASK], an error is raised.",
    "The [MASK] value is None.",
    "This function returns a [MASK] array.",
    "Set this to [MASK] to disable the check.",
)
#: The first ones are like the text of the demo, the others like that of the reference model.
COMPARED_SENTENCES = (
    "If the file does not [MASK], an error is raised.",
    "This function returns a [MASK] array.",
    "The river flows into the [MASK].",
    "She was born in 1850 and [MASK] in 1921.",
    "He opened the [MASK] and went into the room.",
)
#: Number of held-out sentences on which the models are compared, which takes some seconds.
NUM_COMPARED = 100


@app.command(
    epilog=format_examples(
        "bertsmith demo",
        "bertsmith demo --minutes 15 --out my-demo",
    )
)
def demo(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("bertsmith-demo"),
    minutes: Annotated[float, typer.Option(help="Minutes of pre-training.", min=0.1)] = 3.0,
    seed: Annotated[
        int, typer.Option(help="Random seed of the weights, the data order and dropout.", min=0)
    ] = 0,
) -> None:
    """Train a small BERT on the documentation of installed packages.

    Prints and runs five commands, which you can repeat with your own text: collect the text, learn
    a vocabulary, prepare the data, pre-train, and fill in masks. Then compares the model with the
    reference model mini-en. An interrupted demo continues where it stopped.
    """
    corpus, tokenizer, store = out / "corpus.jsonl", out / "tokenizer", out / "store"
    run = out / f"run-{seed}"
    _check_output(out, corpus)
    _check_minutes(run, minutes)
    if not corpus.exists():
        _run_command("corpus", "docstrings", "--out", corpus)
    if not tokenizer.exists():
        _run_command("vocab", corpus, "--size", VOCAB_SIZE, "--out", tokenizer)
    if not (store / "manifest.json").exists():
        _run_command(
            "prepare", corpus, "--tokenizer", tokenizer, "--held-out", 0.05, "--out", store
        )
    # With four heads, two are initialized to attend to neighboring tokens and one to the other
    # segment.
    settings = ("model.heads=4", f"run.max_eval_sequences={EVAL_SEQUENCES}", f"run.seed={seed}")
    set_options = [argument for setting in settings for argument in ("--set", setting)]
    _run_command(
        "pretrain", "--data", store, "--size", "tiny", "--minutes", minutes, "--out", run,
        *set_options,
    )  # fmt: skip
    _run_command("fill", run, *MASKED_SENTENCES, "--top", 3)
    _compare(run, store)
    log("")
    log(f"The model is in {run / 'model'}; the loss curve is {run / 'curve.png'}.")
    log("Next: run the same commands on your own text, or continue with this model:")
    log(f'  bertsmith fill {quote_path(run)} "The [MASK] of the function."')
    log(f"  bertsmith inspect {quote_path(run)}")


def _compare(run: Path, store: Path) -> None:
    """Print the words and the bits per character of the demo's and of the reference model."""
    from bertsmith.lab.demo_comparison import compare_on_store

    (demo, reference), num_sentences = compare_on_store(
        [run, REFERENCE_MODEL], store, COMPARED_SENTENCES, num_sentences=NUM_COMPARED, top=3,
        progress=TerminalProgress(),
    )  # fmt: skip
    log("")
    log(
        f"Comparison with {REFERENCE_MODEL}, a larger model that was trained longer, on Wikipedia "
        "and books:"
    )
    for sentence, demo_words, reference_words in zip(
        COMPARED_SENTENCES, demo.words, reference.words, strict=True
    ):
        print_line(sentence)
        print_line(f"  demo     {', '.join(demo_words)}")
        print_line(f"  {REFERENCE_MODEL}  {', '.join(reference_words)}")
    print_line(
        f"bits per character of {num_sentences} held-out sentences of the demo's text (lower is "
        "better):"
    )
    print_line(f"  demo     {demo.bits_per_character:.3f}, trained on text of this kind")
    print_line(f"  {REFERENCE_MODEL}  {reference.bits_per_character:.3f}, trained on other text")


def _check_output(out: Path, corpus: Path) -> None:
    """Raise InputError if ``out`` is a file, or a folder that contains files but no demo."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: this is a file; give --out a new folder")
    # A killed demo may have left a hidden temporary file.
    if out.exists() and not corpus.exists():
        others = [path.name for path in out.iterdir() if not path.name.startswith(".")]
        if others:
            raise InputError(f"{out}: this folder has other files ({others[0]}); give a new --out")


def _check_minutes(run: Path, minutes: float) -> None:
    """Raise InputError if ``run`` was started with another time budget."""
    path = run / "settings.toml"
    if not path.exists():
        return
    previous = read_stored_settings(path).get("schedule", {}).get("minutes")
    if previous is not None and previous != minutes:
        raise InputError(
            f"{run}: this demo was started with --minutes {previous:g}, got {minutes:g}; give "
            "another folder, such as --out my-demo"
        )


def _run_command(*arguments: object) -> None:
    """Log a bertsmith command and run it; exit with its status if it fails."""
    command = [str(argument) for argument in arguments]
    log("")
    log(f"$ bertsmith {shlex.join(command)}")
    try:
        status = app(command, standalone_mode=False)
    except Interrupted:
        # The message says how to continue the demo, not its last command.
        raise Interrupted("demo") from None
    if status:
        raise typer.Exit(status)
