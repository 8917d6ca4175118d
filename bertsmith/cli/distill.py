"""``bertsmith distill``: train a small student model from a larger teacher."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_table
from bertsmith.cli.finetune import (
    Assignments,
    ConfigFile,
    FilesEncoding,
    RunDirectory,
    build_values,
    report_result,
)
from bertsmith.cli.hints import quote_path
from bertsmith.cli.launcher import check_single_process
from bertsmith.cli.model_options import SkipInvalid, TableDelimiter, check_positive, parse_numbers
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET
from bertsmith.cli.task_options import LabelColumns, parse_columns


@app.command(
    epilog=format_examples(
        "bertsmith distill --teacher my-embedder --data lines.txt --layers 3 \\\n      --out small",
        "bertsmith distill --teacher my-classifier --data reviews.csv --size tiny \\\n"
        "      --out small",
        "bertsmith distill --teacher my-run --data my-store --layers 2 --out small",
    )
)
def distill(
    teacher: Annotated[
        Path,
        typer.Option(
            help="The teacher: a model directory, a run directory, the name of a reference model "
            "or a Hub id."
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            help="A table or a .txt file of lines, which may be repeated; task: a table, or the "
            "folder of a public task; mlm, relations, hidden: a token store (`prepare`)."
        ),
    ],
    out: RunDirectory,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Student: this many layers of the teacher, evenly spaced from first to last.",
            min=1,
        ),
    ] = None,
    student_layers: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER,...",
            help="Student: these layers of the teacher, from 1, such as 1,3,5.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Student: tiny, mini, small, medium, base or large, with random weights."
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--from", help="Student: another model with the teacher's tokenizer."),
    ] = None,
    objective: Annotated[
        Literal["embedding", "task", "mlm", "relations", "hidden"] | None,
        typer.Option(
            help="What the student learns: embedding (vectors of texts), task (outputs of a "
            "fine-tuned teacher), mlm (masked tokens), relations (self-attention, MiniLMv2) or "
            "hidden (hidden states). Default: by the kind of teacher."
        ),
    ] = None,
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            help="embedding, task: a validation table with labels or scores; may be repeated. "
            "Default: a tenth of the training data (embedding: at most 1,000 texts)."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="The column of the text. Default: as in the teacher's training table."),
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    label_columns: LabelColumns = None,
    score: Annotated[
        str | None,
        typer.Option(help="embedding: the column of the similarity of two texts, for --dev."),
    ] = None,
    projection: Annotated[
        Literal["dense", "pca"] | None,
        typer.Option(
            help="embedding, if the widths differ: dense (a linear layer; vectors of the teacher's "
            "width) or pca (vectors of the student's width). Default: dense."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="task, mlm: logits are divided by it. Default: 2.", min=0),
    ] = None,
    hard_weight: Annotated[
        float | None,
        typer.Option(
            help="task, mlm: weight of the loss on the labels or original tokens; the teacher has "
            "the remaining weight. Default: 0.",
            min=0,
            max=1,
        ),
    ] = None,
    teacher_layer: Annotated[
        int | None,
        typer.Option(help="relations: layer of the teacher. Default: the last.", min=1),
    ] = None,
    relation_heads: Annotated[
        int | None,
        typer.Option(
            help="relations: number of relation heads. Default: the largest possible, up to 48.",
            min=1,
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the training data. Default: 3, or 1 over a token store.",
            callback=check_positive,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Batch size. Default: 64 texts for embedding, else 32.", min=1),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate. Default: 1e-4; with --size 5e-4."),
    ] = None,
    max_seqlen: Annotated[
        int | None,
        typer.Option(help="Maximum tokens per input. Default: as the teacher.", min=8),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of new weights, data order and dropout.", min=0),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="embedding, task: also train the student without the teacher, and print a table: "
            "parameters, file size, texts per second and score of all models. Needs --dev.",
        ),
    ] = False,
    skip_invalid: SkipInvalid = False,
    encoding: FilesEncoding = None,
    delimiter: TableDelimiter = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a small student model from the outputs of a larger teacher.

    Give one of --layers, --student-layers, --size and --from. An embedding student computes the
    vectors of its teacher, from texts without labels; OUT/model is a sentence-transformers
    directory. A task student predicts the labels of its fine-tuned teacher. Students of the other
    objectives are fine-tuned afterwards.

    For embedding and task, the teacher's outputs are computed once and stored in OUT/teacher in 16
    bits; their size is printed first. For mlm, relations and hidden, the teacher computes in each
    step: masks are new in each epoch, and hidden states are too large to store. Ctrl-C and SIGTERM
    save a checkpoint; the same command then continues the run.
    """
    options: dict[str, Any] = {
        "layers": layers, "size": size,
        "student_layers": parse_numbers("--student-layers", student_layers, int),
        "objective": objective, "text_column": text, "pair_column": pair, "label_column": label,
        "label_columns": parse_columns("--label-columns", label_columns),
        "score_column": score, "projection": projection,
        "teacher_layer": teacher_layer, "relation_heads": relation_heads,
        "temperature": temperature, "hard_weight": hard_weight,
    }  # fmt: skip
    values = build_values(
        "distill", options,
        dev=dev, batch_size=batch_size, max_seqlen=max_seqlen, skip_invalid=skip_invalid,
        encoding=encoding, delimiter=delimiter, epochs=epochs, lr=lr, seed=seed,
    )  # fmt: skip
    check_single_process("`distill`")
    from bertsmith.train.distillation.settings import check_arguments, check_is_comparable

    settings = check_arguments(teacher, data, start_from, out, config, assignments or [], values)
    if compare:
        check_is_comparable(settings)
        from bertsmith.lab.distillation_comparison import check_validation_table

        check_validation_table(settings)
    from bertsmith.train.distillation.distill import distill as train_student

    result = train_student(
        teacher,
        out,
        data=data,
        start_from=start_from,
        config=config,
        assignments=assignments or [],
        values=values,
        progress=TerminalProgress(),
    )
    does_compare = compare and result.model is not None
    if not (does_compare and as_json):
        report_result(result, as_json=as_json)
    log(f"wrote {result.model}")
    if does_compare:
        if result.late_signal is not None:
            raise typer.Exit(SIGNAL_EXIT_OFFSET + result.late_signal)
        rows = _compare(result.run)
        if as_json:
            print_json({"run": str(result.run), "metrics": result.metrics, "comparison": rows})
        else:
            _print_comparison(rows)
    log(f"next: bertsmith compare {quote_path(teacher)} {quote_path(result.run)}")


def _compare(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the table of a run, as JSON values."""
    from bertsmith.lab.distillation_comparison import compare_distilled

    return [asdict(row) for row in compare_distilled(run, TerminalProgress())]


def _print_comparison(rows: list[dict[str, Any]]) -> None:
    """Print the table of a run. The fast mode has no files, so it has no file size."""
    columns = ("model", "precision", "size", "file", "speed", "score")
    lines = [
        (
            row["model"],
            row["precision"],
            f"{row['num_parameters']:,} parameters",
            f"{row['num_bytes'] / 1e6:,.1f} MB" if row["precision"] == "fp32" else "same file",
            f"{row['texts_per_second']:,.0f} texts/s",
            f"{row['metric']} {row['score']:.4f}",
        )
        for row in rows
    ]
    print_table(columns, lines)
