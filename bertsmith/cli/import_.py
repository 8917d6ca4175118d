"""``bertsmith import``: convert a TensorFlow or Hugging Face model to a model directory."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.errors import ModelError, SettingsError
from bertsmith.files import check_new_directory
from bertsmith.plurals import count_noun


@app.command(
    "import",
    epilog=format_examples(
        "bertsmith import uncased_L-12_H-768_A-12/ --out bert-base",
        "bertsmith import google-bert/bert-base-cased --out bert-base-cased",
        "bertsmith import model.ckpt-900 --files-from original/ --out my-model",
    ),
)
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="An original BERT release (TensorFlow), as a folder or a checkpoint in it; or a "
            "Hugging Face model, as a folder, a run directory, a Hub id or the name of a reference "
            "model.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The model directory to write.")],
    uncased: Annotated[
        bool | None,
        typer.Option(
            "--uncased/--cased",
            help="Whether the model expects lowercase text. Default: from the tokenizer files, the "
            "folder's name or the vocabulary.",
            show_default=False,
        ),
    ] = None,
    files_from: Annotated[
        Path | None,
        typer.Option(
            help="The folder of bert_config.json and vocab.txt if they are not in SOURCE's folder."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a TensorFlow or Hugging Face model to a model directory.

    TensorFlow is not needed. Classifiers and SQuAD models that were fine-tuned with the original
    code keep their output layers. Missing and unused weights are reported.
    """
    check_new_directory(out)
    if not Path(source).exists() and not _is_name_or_checkpoint(source):
        raise ModelError(
            f"{source}: no such file or directory; expected an original BERT release, a model "
            "directory, a run directory, the name of a reference model, or a Hugging Face Hub id "
            "(OWNER/NAME)"
        )
    from bertsmith.bundle import save_model
    from bertsmith.interop.huggingface import is_model_directory, write_huggingface
    from bertsmith.interop.tensorflow.reading import read_tensorflow

    if is_model_directory(source):
        if uncased is not None or files_from is not None:
            raise SettingsError(
                "--uncased, --cased and --files-from are only for TensorFlow checkpoints, but "
                f"{source} is a Hugging Face model; remove them"
            )
        notes = write_huggingface(source, out)
        for note in notes:
            log(f"note: {note}")
        if as_json:
            print_json({"source": source, "out": str(out), "notes": notes})
        log(f"wrote {out}")
        log(f"next: bertsmith inspect {quote_path(out)}")
        return
    bundle = read_tensorflow(Path(source), lowercase=uncased, files_from=files_from)
    report = bundle.info["imported"]
    save_model(out, bundle)
    if as_json:
        print_json(report | {"out": str(out)})
    _log_report(report)
    log(f"wrote {out}")
    log(f"next: bertsmith inspect {quote_path(out)}")


def _log_report(report: dict[str, Any]) -> None:
    """Log the format of a checkpoint, its casing, and its missing and unused weights."""
    log(f"read {report['source']}")
    log(report["case"])
    if report["newly_initialized"]:
        log(f"newly initialized: {', '.join(report['newly_initialized'])}")
    if report["unused"]:
        log(f"not used: {', '.join(report['unused'])}")
    if report["num_training_state_tensors"]:
        log(
            f"not used: {count_noun(report['num_training_state_tensors'], 'tensor')} of the "
            "optimizer and the training"
        )


def _is_name_or_checkpoint(source: str) -> bool:
    """Return whether a source that is not an existing path is a model's name or a checkpoint."""
    from bertsmith.bundle.directory import is_hub_id, is_reference_model

    path = Path(source)
    # A TensorFlow checkpoint is named by the common prefix of its files.
    return (
        is_reference_model(path)
        or is_hub_id(path)
        or any(Path(source).parent.glob(f"{Path(source).name}.*"))
    )
