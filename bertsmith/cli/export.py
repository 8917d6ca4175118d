"""``bertsmith export``: a model directory, written in another maker's form.

It never knows a foreign name, only who writes what.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.cli.model_options import Model
from bertsmith.cli.models import find_model

#: Each form: what writes it, a function of the model and the folder that returns notes; and the
#: options that it takes.
_WRITERS = {
    "hf": ("bertsmith.interop.huggingface.write_huggingface", ()),
    "sentence-transformers": (
        "bertsmith.interop.sentence_transformers.write_sentence_transformers",
        ("pooling", "normalize"),
    ),
    "tensorflow": ("bertsmith.interop.tensorflow.write_tensorflow", ()),
    "onnx": ("bertsmith.interop.onnx.write_onnx", ("int8",)),
}
#: What to do with each.
_NEXT = {
    "hf": "bertsmith compare {model} {word}",
    "sentence-transformers": 'in Python, SentenceTransformer({text}).encode(["..."])',
    "tensorflow": "bertsmith import {word} --out DIR",
    "onnx": "in Python, onnxruntime.InferenceSession on the .onnx file there",
}


@app.command()
def export(
    model: Model,
    to: Annotated[str, typer.Option("--to", help=f"The form: {', '.join(_WRITERS)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    int8: Annotated[
        bool, typer.Option("--int8", help="onnx: weights in 8 bits, a third of the size.")
    ] = False,
    pooling: Annotated[
        str | None,
        typer.Option(help="sentence-transformers: mean, cls, max …; else as the model says, mean."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="sentence-transformers: vectors of length 1; else as the model says, or yes "
            "(embed: or no).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Write a model in another form, with the same numbers; refuse what that form cannot say.

    hf: Hugging Face's layout, as every model directory has it, in one safetensors file.
    sentence-transformers: modules.json with pooling. tensorflow: the original release, whose GELU
    is the tanh form: for models of --recipe paper, or of --set model.activation=gelu_tanh. onnx:
    for onnxruntime, any batch and length.
    """
    from bertsmith.errors import SettingsError
    from bertsmith.files import check_new_directory

    if to not in _WRITERS:
        raise SettingsError(f"--to {to}: expected one of {', '.join(_WRITERS)}")
    writer, options = _WRITERS[to]
    source = model
    given = {"int8": int8 or None, "pooling": pooling, "normalize": normalize}
    said = {name: value for name, value in given.items() if value is not None}
    for name in sorted(set(said) - set(options)):
        raise SettingsError(f"--{name}: the form {to} has no such option")
    check_new_directory(out)
    model = find_model(model)
    module, _, name = writer.rpartition(".")
    notes: list[str] = getattr(import_module(module), name)(model, out, **said)
    if as_json:
        print_json({"model": str(source), "to": to, "out": str(out), "notes": notes})
    for note in notes:
        log(f"note: {note}")
    log(f"wrote {out}")
    log(
        f"next: {_NEXT[to].format(model=quote_path(source), word=quote_path(out), text=repr(str(out)))}"
    )
