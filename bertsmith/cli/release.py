"""``bertsmith lab release``: write the model of a run as a directory to publish."""

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import format_examples
from bertsmith.cli.console import log, print_json
from bertsmith.cli.hints import quote_path
from bertsmith.cli.lab import group
from bertsmith.cli.model_options import find_model
from bertsmith.files import check_new_directory


@group.command(
    epilog=format_examples(
        "bertsmith lab release my-run --license apache-2.0 --out my-bert",
        "bertsmith lab release my-run --panel my-panel/panel.json --out my-bert",
    )
)
def release(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a pre-training run."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write. Its name is the model's name.")],
    license_id: Annotated[
        str,
        typer.Option(
            "--license",
            metavar="ID",
            help="License of the weights, as the Hub names it, such as apache-2.0. Default: to be "
            "filled in in README.md.",
            show_default=False,
        ),
    ] = "",
    notes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Markdown text for the model card, such as the licenses of the text and what the "
            "model is good for.",
            show_default=False,
        ),
    ] = None,
    panel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The panel.json of a `bertsmith lab panel` with this model, or with the folder "
            "that an earlier `lab release` wrote; for the model card.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the weights: bf16, fp16 or fp32.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the model of a run as a directory to publish.

    Writes a model directory with 16-bit weights, the settings (settings.toml), all evaluations
    (training.json), the loss curve (curve.png), the results of a panel (results/panel.json) and a
    model card (README.md) that shows them. No file contains a path of this machine.

    If the run started from new weights, the settings repeat the training, on the device of the
    machine that repeats it: bertsmith pretrain --config OUT/settings.toml --data STORE --out RUN.
    """
    check_new_directory(out)
    model = find_model(run)
    from bertsmith.lab.release import ReleaseOptions, write_release

    options = ReleaseOptions(license_id=license_id, notes=notes, panel=panel, dtype=dtype)
    messages = write_release(run, model, out, options)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if as_json:
        print_json({"run": str(run), "out": str(out), "bytes": size, "notes": messages})
    for message in messages:
        log(f"note: {message}")
    log(f"wrote {out} ({size / 1e6:.1f} MB)")
    if panel is None:
        log(f"next: bertsmith lab panel {quote_path(out)} --data FOLDER --out PANEL")
    else:
        log(f"next: bertsmith push {quote_path(out)} OWNER/NAME")
