"""``bertsmith export``: a model directory, written in another maker's form.

It never knows a foreign name, only who writes what.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.asking import Model
from bertsmith.cli.console import put_json, say

#: Each form, and what writes it: a function of the model and the folder that returns notes.
_WRITERS = {
    "tensorflow": "bertsmith.interop.tensorflow.write_tensorflow",
}


@app.command()
def export(
    model: Model,
    to: Annotated[str, typer.Option("--to", help=f"The form: {', '.join(_WRITERS)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Write a model in another form, with the same numbers; refuse what that form cannot say.

    tensorflow: the original release: bert_config.json, vocab.txt, bert_model.ckpt.*.
    """
    from bertsmith.errors import SettingsError

    if to not in _WRITERS:
        raise SettingsError(f"--to {to}: expected one of {', '.join(_WRITERS)}")
    module, _, name = _WRITERS[to].rpartition(".")
    notes: list[str] = getattr(import_module(module), name)(model, out)
    if as_json:
        put_json({"model": str(model), "to": to, "out": str(out), "notes": notes})
    for note in notes:
        say(f"note: {note}")
    say(f"wrote {out}")
    say(f"next: bertsmith import {out} --out DIR reads it back")
