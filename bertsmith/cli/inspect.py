"""``bertsmith inspect``: show anything that Bertsmith writes, for human eyes.

It never knows what is in it, only who can tell.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.hints import predict_command, quote_path

if TYPE_CHECKING:
    from bertsmith.use.inspection.artifacts import ArtifactKind

#: What comes next after each kind; PATH stands for the path that was looked at.
_NEXT: "dict[ArtifactKind, str]" = {
    "tokenizer": "bertsmith prepare CORPUS... --tokenizer PATH --out STORE",
    "store": "bertsmith pretrain --data PATH --out RUN",
    "index": 'bertsmith search PATH "..."',
}
#: The same of a model, by how the first of its heads begins.
_NEXT_OF_HEADS = {
    "masked LM": 'bertsmith fill PATH "... [MASK] ..."',
    "": "bertsmith finetune TASK --model PATH --data DATA --out RUN",
}


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A tokenizer or vocab.txt, a store, a model directory, a RUN (of one seed or "
            "more), a checkpoint, an index, a .safetensors file or a settings file.",
            show_default=False,
        ),
    ],
    examples: Annotated[int, typer.Option(help="Examples drawn from a store.", min=0)] = 3,
    length: Annotated[int, typer.Option(help="Their length in tokens.", min=8)] = 128,
    seed: Annotated[int, typer.Option(help="The seed they are drawn with.", min=0)] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the checksums of a store's files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on stdout.")] = False,
) -> None:
    """Show what a file or folder made by Bertsmith holds.

    In a store's examples a token that the model is asked for stands in braces, {seen→asked}, after
    the label of the pair.
    """
    from bertsmith.cli.console import log, print_json, print_line
    from bertsmith.errors import StoreError
    from bertsmith.use.inspection.artifacts import identify_artifact

    kind, opened = identify_artifact(path)
    if verify and kind != "store":
        raise StoreError(f"{path}: --verify is for token stores, found: {kind}; leave it out")
    if kind == "store":
        facts, lines = _store(opened, examples, length, seed, verify)
    elif kind == "tokenizer":
        facts, lines = _tokenizer(opened)
    else:
        facts, lines = _trained(kind, opened)
    if as_json:
        print_json({"kind": kind} | facts)
        return
    for line in lines:
        print_line(line)
    following = _NEXT.get(kind)
    if kind == "model":
        first = "".join(facts["heads"][:1])
        following = next(own for head, own in _NEXT_OF_HEADS.items() if first.startswith(head))
        if first.startswith("fine-tuned"):
            following = predict_command("PATH", first.partition("(")[2].rstrip(")"))
    if following:
        log("next: " + following.replace("PATH", quote_path(opened)))


def _tokenizer(path: Path) -> tuple[dict[str, Any], list[str]]:
    from bertsmith.text.vocabulary_report import describe_vocabulary
    from bertsmith.text.wordpiece import Tokenizer

    found = describe_vocabulary(Tokenizer.load(path))
    return {"path": str(path)} | found.to_json(), [f"tokenizer {path}", *found.lines()]


def _store(
    path: Path, examples: int, length: int, seed: int, verify: bool
) -> tuple[dict[str, Any], list[str]]:
    from bertsmith.cli.corpus_options import terminal_progress
    from bertsmith.data.describe import describe_store
    from bertsmith.data.settings import DataSettings
    from bertsmith.data.store import Store

    store = Store.open(path)
    facts = {"path": str(path)} | store.manifest.model_dump(mode="json")
    lines = []
    if verify:
        with terminal_progress() as progress:
            facts["verified"] = "checksums" if store.verify(progress) else "sizes, offsets, ids"
        lines = [f"verified: {facts['verified']}"]
    settings = DataSettings.parse({"length": length}, "--length")
    text = describe_store(store, settings, examples=examples, seed=seed)
    return facts, [*text.splitlines(), *lines]


def _trained(kind: "ArtifactKind", path: Path) -> tuple[dict[str, Any], list[str]]:
    """Describe what takes torch to be read."""
    from bertsmith.use.inspection import describe, describe_collections

    found = {
        "model": describe.describe_model,
        "run": describe.describe_run,
        "checkpoint": describe.describe_checkpoint,
        "tensors": describe.describe_tensors,
        "settings": describe.describe_settings,
        "runs": describe_collections.describe_sweep,
        "index": describe_collections.describe_index,
    }[kind](path)
    return found.facts, found.lines
