"""``bertsmith push``: upload a model to the Hugging Face Hub."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json, print_line
from bertsmith.cli.hints import format_fill_command, format_predict_command
from bertsmith.cli.model_options import Json
from bertsmith.plurals import count_noun


@app.command(
    epilog=format_examples(
        "bertsmith push my-run my-name/my-bert --private",
        "bertsmith push my-model my-name/my-bert --revision v2",
    )
)
def push(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A model directory or a run directory.", show_default=False
        ),
    ],
    repo_id: Annotated[
        str,
        typer.Argument(
            metavar="REPO_ID", help="The repository on the Hub, OWNER/NAME.", show_default=False
        ),
    ],
    private: Annotated[
        bool,
        typer.Option("--private", help="If the repository does not exist, create it as private."),
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(help="The branch; created if it does not exist.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload a model to the Hugging Face Hub.

    Uploads the weights, the tokenizer and the model card in one commit. Before you push, add the
    license to the model's README.md, and log in with `hf auth login` or set HF_TOKEN.
    """
    from bertsmith.bundle.directory import locate_model

    directory = locate_model(model)
    from bertsmith.interop.huggingface import push_to_hub

    upload = push_to_hub(model, repo_id, private=private, revision=revision)
    if as_json:
        print_json(asdict(upload))
    else:
        print_line(upload.url)
    branch = f"@{revision}" if revision else ""
    log(f"uploaded {count_noun(len(upload.files), 'file')} of {model}, commit {upload.commit[:12]}")
    log(f"next: {_choose_next_command(directory, repo_id + branch)}")


def _choose_next_command(directory: Path, name: str) -> str:
    """Return a command that uses the model in this directory under another name."""
    from bertsmith.bundle.any_model import is_bare_encoder
    from bertsmith.bundle.config import is_fine_tuned, require_task_kind
    from bertsmith.bundle.metadata import get_recorded_task, read_info

    if is_fine_tuned(directory):
        task = get_recorded_task(read_info(directory))
        return format_predict_command(name, require_task_kind(directory), task)
    if is_bare_encoder(directory):
        return f"bertsmith embed {name} FILE"
    return format_fill_command(name)
