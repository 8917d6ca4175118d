"""``bertsmith inspect``: show the content of a model, run, store or other artifact."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli import model_options
from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json, print_line
from bertsmith.cli.corpus_options import terminal_progress
from bertsmith.cli.hints import format_predict_command, quote_path
from bertsmith.errors import StoreError

if TYPE_CHECKING:
    from bertsmith.use.inspection.artifacts import ArtifactKind

#: The suggested next command for each kind of artifact; PATH stands for its path.
_NEXT_COMMANDS: "dict[ArtifactKind, str]" = {
    "tokenizer": "bertsmith prepare CORPUS... --tokenizer PATH --out STORE",
    "store": "bertsmith pretrain --data PATH --out RUN",
    "index": 'bertsmith search PATH "..."',
}
#: The suggested next command for a pre-trained model with a masked-LM head.
_FILL_COMMAND = 'bertsmith fill PATH "... [MASK] ..."'
#: The suggested next command for a pre-trained model without a masked-LM head.
_FINETUNE_COMMAND = "bertsmith finetune TASK --model PATH --data DATA --out RUN"


@app.command(
    epilog=format_examples(
        "bertsmith inspect my-run",
        "bertsmith inspect my-store --examples 10 --length 64",
        "bertsmith inspect my-classifier --json",
    )
)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A tokenizer folder or vocab.txt, a token store, a model directory, a run "
            "directory or a folder of several runs, a checkpoint, an index, a .safetensors file or "
            "a settings file.",
            show_default=False,
        ),
    ],
    examples: Annotated[
        int | None,
        typer.Option(
            help="Number of training examples to sample from a store.", min=0, show_default="3"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Length of the sampled examples in tokens.", min=8, show_default="128"),
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Sample pairs of segments for next-sentence prediction, as in `bertsmith pretrain "
            "--recipe paper`.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of the sampled examples.", min=0, show_default="0"),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the checksums of a store's files.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, without examples of a store.")
    ] = False,
) -> None:
    """Show the content of a model, run, store or tokenizer.

    In the examples of a store, {input→label} marks a token that the model predicts. With --pairs,
    each example starts with its next-sentence label.
    """
    from bertsmith.use.inspection.artifacts import identify_artifact

    kind, artifact_path = identify_artifact(path)
    if verify and kind != "store":
        raise StoreError(f"{path}: --verify is for token stores, found {kind!r}; remove --verify")
    if kind != "store" or as_json:
        sampling = {"--examples": examples, "--length": length, "--seed": seed}
        model_options.check_unused_options(
            sampling | {"--pairs": pairs or None},
            "only selects the examples of a token store, which --json does not print; remove it",
        )
    if kind == "store":
        report, lines = _describe_store(artifact_path, verify)
        if not as_json:
            lines = [*_describe_examples(artifact_path, examples, length, pairs, seed), *lines]
    elif kind == "tokenizer":
        report, lines = _describe_tokenizer(artifact_path)
    else:
        report, lines = _describe_with_torch(kind, artifact_path)
    if as_json:
        print_json({"kind": kind} | report)
        return
    for line in lines:
        print_line(line)
    next_command = _NEXT_COMMANDS.get(kind)
    if kind == "model":
        next_command = _choose_model_command(report["heads"], artifact_path)
    if next_command:
        log("next: " + next_command.replace("PATH", quote_path(artifact_path)))


def _choose_model_command(heads: list[str], path: Path) -> str:
    """Return the suggested command for a model; PATH stands for the model's path.

    Args:
        heads: Descriptions of the model's heads, such as "masked LM" or "fine-tuned (single)".
        path: The model directory.
    """
    from bertsmith.bundle.metadata import get_recorded_task, read_info

    first_head = heads[0] if heads else ""
    if first_head.startswith("fine-tuned"):
        task_kind = first_head.partition("(")[2].rstrip(")")
        return format_predict_command("PATH", task_kind, get_recorded_task(read_info(path)))
    return _FILL_COMMAND if first_head.startswith("masked LM") else _FINETUNE_COMMAND


def _describe_tokenizer(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the properties of a tokenizer as JSON and as lines of text."""
    from bertsmith.text.vocabulary_report import describe_vocabulary
    from bertsmith.text.wordpiece import Tokenizer

    description = describe_vocabulary(Tokenizer.load(path))
    return (
        {"path": str(path)} | description.to_json(),
        [f"tokenizer {path}", *description.lines()],
    )


def _describe_examples(
    path: Path, examples: int | None, length: int | None, pairs: bool, seed: int | None
) -> list[str]:
    """Return a store's manifest and sampled examples as lines of text; None for the defaults."""
    from bertsmith.data.describe import describe_store
    from bertsmith.data.settings import DataSettings
    from bertsmith.data.store import Store

    settings = DataSettings.parse({"max_seqlen": length or 128, "nsp": pairs}, "--length")
    num_examples = 3 if examples is None else examples
    text = describe_store(Store.open(path), settings, examples=num_examples, seed=seed or 0)
    return text.splitlines()


def _describe_store(path: Path, verify: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a store's manifest as JSON, and the result of its verification as lines of text."""
    from bertsmith.data.store import Store

    store = Store.open(path)
    report = {"path": str(path)} | store.manifest.model_dump(mode="json")
    lines = []
    if verify:
        with terminal_progress() as progress:
            has_checksums = store.verify(progress)
        report["verified"] = "checksums" if has_checksums else "sizes, offsets, ids"
        lines = [f"verified: {report['verified']}"]
    return report, lines


def _describe_with_torch(kind: "ArtifactKind", path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of an artifact as JSON and as lines of text; this imports torch."""
    from bertsmith.use.inspection import describe, describe_collections

    describe_artifact = {
        "model": describe.describe_model,
        "run": describe.describe_run,
        "checkpoint": describe.describe_checkpoint,
        "tensors": describe.describe_tensors,
        "settings": describe.describe_settings,
        "runs": describe_collections.describe_sweep,
        "index": describe_collections.describe_index,
    }[kind]
    description = describe_artifact(path)
    return description.facts, description.lines
