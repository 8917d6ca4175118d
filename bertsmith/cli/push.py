"""``bertsmith push``: send a model to a hub.

It never knows how it is sent.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log, print_json, print_line
from bertsmith.cli.hints import fill_command
from bertsmith.cli.model_options import Json


@app.command()
def push(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A model directory or a RUN.", show_default=False),
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="REPO_ID", help="Its name on the hub, OWNER/NAME.", show_default=False
        ),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Others cannot see it, if it is made now.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="A branch, made if it is not there.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a model to the Hugging Face hub, weights, tokenizer and model card in one commit.

    The token is the one that `hf auth login` keeps, or HF_TOKEN. Fill in the licence in the model's
    README.md first: only who trained it can say it.
    """
    from bertsmith.bundle.directory import locate_model

    locate_model(model)
    from bertsmith.interop.huggingface import push_to_hub as send

    done = send(model, name, private=private, revision=revision)
    if as_json:
        print_json(asdict(done))
    else:
        print_line(done.url)
    branch = f"@{revision}" if revision else ""
    log(f"sent {len(done.files)} files of {model}, commit {done.commit[:12]}")
    log(f"next: {fill_command(name + branch)}")
