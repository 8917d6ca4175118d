"""``bertsmith import``: a model in another maker's form, written as a model directory.

It never knows a foreign name, only who reads what.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="An original BERT release (TensorFlow): its folder, or one of its checkpoints; or "
            "a Hugging Face model of any age: a folder, or OWNER/NAME on the hub.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The model directory to write.")],
    uncased: Annotated[
        bool | None,
        typer.Option(
            "--uncased/--cased",
            help="Whether its text was lowered; else tokenizer files, the folder's name or the "
            "vocabulary tell.",
            show_default=False,
        ),
    ] = None,
    files_from: Annotated[
        Path | None,
        typer.Option(help="The folder of bert_config.json and vocab.txt, if they are elsewhere."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")] = False,
) -> None:
    """Make a model directory of a model in another form, and tell what was found in it.

    Needs no TensorFlow. Fine-tuned checkpoints of the original's classifier and of its SQuAD model
    come with their output layer.
    """
    from bertsmith.errors import ModelError, SettingsError
    from bertsmith.files import check_new_directory

    check_new_directory(out)
    if not Path(source).exists() and not _is_hub_id(source):
        raise ModelError(
            f"{source}: no such file or directory; expected an original BERT release, a model "
            "directory, or a model of the hub by its owner and name"
        )
    from bertsmith.bundle import save_model
    from bertsmith.interop.huggingface import is_model_directory, write_huggingface
    from bertsmith.interop.tensorflow import read_tensorflow

    if is_model_directory(source):
        if uncased is not None or files_from is not None:
            raise SettingsError("--uncased and --files-from are for TensorFlow checkpoints")
        for note in write_huggingface(source, out):
            log(f"note: {note}")
        if as_json:
            print_json({"from": source, "out": str(out)})
        log(f"wrote {out}")
        log(f"next: bertsmith inspect {quote_path(out)}")
        return
    bundle = read_tensorflow(Path(source), lowercase=uncased, files_from=files_from)
    report = bundle.info["imported"]
    save_model(out, bundle)
    if as_json:
        print_json(report | {"out": str(out)})
    _tell(report)
    log(f"wrote {out}")
    log(f"next: bertsmith inspect {quote_path(out)}")


def _tell(report: dict[str, Any]) -> None:
    log(f"read {report['from']}")
    log(report["case"])
    if report["new"]:
        log(f"new, drawn at random: {', '.join(report['new'])}")
    if report["left"]:
        log(f"left, known to no part of the model: {', '.join(report['left'])}")
    if report["left_of_training"]:
        log(f"left, of the optimizer and the training: {report['left_of_training']} tensors")


def _is_hub_id(source: str) -> bool:
    from bertsmith.bundle.directory import is_hub_id

    # A checkpoint is named by how its files begin: no file has the name itself.
    return is_hub_id(Path(source)) or any(Path(source).parent.glob(f"{Path(source).name}.*"))
