"""``bertsmith finetune``: fine-tune a model on a task; the group of all kinds of fine-tuning."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from bertsmith.cli.app import GroupWithDefaultCommand, app, format_examples
from bertsmith.cli.console import (
    TerminalProgress,
    log,
    print_example_counts,
    print_json,
    print_line,
)
from bertsmith.cli.hints import format_predict_command
from bertsmith.cli.launcher import check_single_process, report_once
from bertsmith.cli.model_options import SkipInvalid, TableDelimiter, check_positive
from bertsmith.cli.signals import SIGNAL_EXIT_OFFSET, describe_stop
from bertsmith.cli.task_options import LabelColumns, parse_columns
from bertsmith.files import name_paths
from bertsmith.plurals import count_noun
from bertsmith.settings import read_stored_settings

if TYPE_CHECKING:
    from bertsmith.train.engine.finetuning_run import FinetuneResult


#: Options of all kinds of fine-tuning.
StartModel = Annotated[
    Path,
    typer.Option(
        help="The model to start from: a model directory, a run directory, the name of a reference "
        "model (mini-en), or a Hugging Face Hub id."
    ),
]
RunDirectory = Annotated[Path, typer.Option(help="The run directory to write.")]
FilesEncoding = Annotated[
    str | None,
    typer.Option(help="Encoding of the files if they are not UTF-8, such as cp949."),
]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file with settings.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting, such as optim.lr=2e-5; may be repeated."),
]
#: Options of embedding models and rerankers.
Epochs = Annotated[
    float | None,
    typer.Option(help="Passes over the training data. Default: 3.", callback=check_positive),
]
#: Option of tasks and rerankers, whose default depends on the width of the model.
LearningRateByWidth = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate. Default: 3e-5 for width 768, more for narrower models.",
        callback=check_positive,
    ),
]
#: Inputs of the BiLSTM in the feature-based approach (Devlin et al. 2018, table 7).
FeatureLayers = Literal[
    "embeddings", "second-to-last", "last", "weighted-sum-last-four", "concat-last-four",
    "weighted-sum-all",
]  # fmt: skip

group = typer.Typer(
    name="finetune",
    cls=GroupWithDefaultCommand,
    help="Fine-tune a model on a task, or train embeddings or a reranker.\n\n"
    "`bertsmith finetune classify ...` is short for `bertsmith finetune task classify ...`, and "
    "likewise for answer, choose, tag and the public tasks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=format_examples(
        "bertsmith finetune classify --model my-run --data reviews.csv \\\n"
        "      --text review --label mood --out my-classifier",
        "bertsmith finetune embed --model my-run --data questions.csv \\\n"
        "      --text question --pair answer --out my-embedder",
        "bertsmith finetune rerank --model my-run --data judged.csv \\\n"
        "      --text query --pair document --score relevance --out my-reranker",
        "bertsmith finetune task --help",
    ),
)
app.add_typer(group)


@group.command(
    "task",
    epilog=format_examples(
        "bertsmith finetune classify --model my-run --data reviews.csv \\\n"
        "      --text review --label mood --out my-classifier",
        "bertsmith finetune squad --model google-bert/bert-base-uncased \\\n"
        "      --data SQUAD/ --epochs 2 --out my-squad",
        "bertsmith finetune tag --model my-run --data train.conll --dev dev.conll \\\n"
        "      --out my-tagger",
    ),
)
def finetune(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="classify, answer, choose or tag for your own files; or a public task: cola, "
            "sst-2, mrpc, sts-b, qqp, mnli, qnli, rte, wnli, nsmc, korsts, squad, squad2, swag, "
            "codah, comve-b, conll2003, conll2003-pos or klue-ner.",
            show_default=False,
        ),
    ],
    model: StartModel,
    data: Annotated[
        Path,
        typer.Option(help="The training file, or the folder of a public task's files."),
    ],
    out: RunDirectory,
    dev: Annotated[
        Path | None,
        typer.Option(help="The validation file. Default: a tenth of the training data."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    label_columns: LabelColumns = None,
    endings: Annotated[
        str | None,
        typer.Option(help="choose: the columns of the endings, such as a,b,c,d."),
    ] = None,
    kind: Annotated[
        Literal["single", "multi", "regression", "entities", "tags"] | None,
        typer.Option(
            help="Kind of label. classify: single (one label per text), multi (several, separated "
            "by |) or regression (a number); tag: entities or tags (such as parts of speech)."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A validation metric, such as roc_auc, mae or f1:LABEL; may be repeated. The "
            "first selects the best run of --seeds and --grid, and the best epoch with --set "
            "run.model_selection=best."
        ),
    ] = None,
    features: Annotated[
        FeatureLayers | None,
        typer.Option(help="Freeze the encoder and train a BiLSTM on the outputs of these layers."),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the training data. Default: 3, or more for at least 100 steps.",
            callback=check_positive,
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Batch size in examples.", min=1)] = None,
    lr: LearningRateByWidth = None,
    max_seqlen: Annotated[
        int | None, typer.Option(help="Maximum length of an input in tokens.", min=8)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of the new weights, the data order and dropout.", min=0),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(help="Number of runs with different seeds; the best model is kept.", min=1),
    ] = 1,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Search the paper's grid: batch 16, 32; lr 5e-5, 3e-5, 2e-5; epochs 2, 3, 4.",
        ),
    ] = False,
    skip_invalid: SkipInvalid = False,
    encoding: FilesEncoding = None,
    delimiter: TableDelimiter = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fine-tune a model to classify, tag, answer or choose.

    classify: predict a label, several labels or a number for a text or a pair of texts. tag:
    predict a tag for each word, such as entities or parts of speech. answer: find the answer to a
    question in a context. choose: select one of several endings of a prompt.

    Ctrl-C and SIGTERM save a checkpoint; the same command then continues the run.

    torchrun --nproc-per-node 2 -m bertsmith finetune ... trains in 2 processes.
    """
    settings = {
        "text_column": text, "pair_column": pair, "label_column": label, "kind": kind,
        "label_columns": parse_columns("--label-columns", label_columns),
        "ending_columns": parse_columns("--endings", endings), "metrics": metric or None,
    }  # fmt: skip
    values = build_values(
        "task", settings,
        dev=[dev] if dev else None, batch_size=batch_size, max_seqlen=max_seqlen,
        skip_invalid=skip_invalid, encoding=encoding, delimiter=delimiter, epochs=epochs, lr=lr,
        seed=seed,
    )  # fmt: skip
    if features is not None:
        # Even an empty table would select the feature-based approach.
        values["features"] = {"layers": features}
    options: dict[str, Any] = {
        "data": data,
        "config": config,
        "assignments": assignments or [],
        "values": values,
        "progress": TerminalProgress(),
    }
    is_sweep = seeds > 1 or grid
    from bertsmith.train.finetuning.settings import check_finetune_arguments

    with report_once():
        check_finetune_arguments(
            task, model, data, None if is_sweep else out, config, assignments or [], values
        )
    if is_sweep:
        _run_sweep(task, model, out, seeds=seeds, grid=grid, as_json=as_json, options=options)
    else:
        _finetune_once(task, model, out, as_json=as_json, options=options)


def _finetune_once(
    task: str, model: Path, out: Path, *, as_json: bool, options: dict[str, Any]
) -> None:
    """Fine-tune once and print the metrics."""
    from bertsmith.train.finetuning import finetune as finetuning

    result = finetuning.finetune(task, model, out, **options)
    model_path = report_result(result, as_json=as_json, other_metrics=["loss"])
    log(f"wrote {model_path}")
    _log_next_command(result.run, model_path)


def _run_sweep(
    task: str,
    model: Path,
    out: Path,
    *,
    seeds: int,
    grid: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Fine-tune once per seed and grid point; print the metrics of each point and the best run."""
    check_single_process("a search over seeds or the grid")
    from bertsmith.train.finetuning.sweep import run_sweep

    sweep = run_sweep(task, model, out, seeds=seeds, grid=grid, **options)
    if sweep.stopped_run is not None:
        if as_json:
            _print_result_json(sweep.stopped_run)
        _exit_stopped(sweep.stopped_run)
    assert sweep.best is not None
    assert sweep.model is not None
    metric = sweep.best.metric_names[0]
    if as_json:
        print_json(json.loads((sweep.out / "results.json").read_text(encoding="utf-8")))
    else:
        for point in sweep.points:
            median, minimum, maximum = point.summarize_metric(metric)
            hyperparameters = " ".join(
                f"{key.rpartition('.')[2]}={value}" for key, value in point.hyperparameters.items()
            )
            print_line(
                f"{hyperparameters or metric}: median {median:.4f}, {minimum:.4f} to "
                f"{maximum:.4f} over {count_noun(len(point.runs), 'seed')}"
            )
        _print_metrics(sweep.best, ("example", "examples"), ["loss"])
    log(f"wrote {sweep.model}, the best by {metric}: {sweep.best.run.name}")
    _log_next_command(sweep.best.run, sweep.model)


def _log_next_command(run: Path, model: Path) -> None:
    """Log a ``predict`` command with placeholders for the texts that the task needs."""
    from bertsmith.train.engine.run_directory import SETTINGS_FILE

    task = read_stored_settings(run / SETTINGS_FILE)["task"]
    log(f"next: {format_predict_command(model, task['kind'], task)}")


def _exit_stopped(result: "FinetuneResult") -> NoReturn:
    """Log that a run was stopped, and exit with the status of the signal that stopped it."""
    log(f"{describe_stop(result.step, result.steps)}; run the same command to continue")
    stop_signal = result.signal or result.late_signal or signal.SIGINT
    raise typer.Exit(SIGNAL_EXIT_OFFSET + stop_signal)


def _print_result_json(result: "FinetuneResult") -> None:
    """Print the result of a run as JSON."""
    print_json(
        {
            "run": str(result.run),
            "model": str(result.model) if result.model else None,
            "step": result.step,
            "steps": result.steps,
            "metrics": result.metrics,
            "counts": result.counts,
        }
    )


def report_result(
    result: "FinetuneResult",
    *,
    as_json: bool,
    unit: tuple[str, str] = ("example", "examples"),
    other_metrics: Sequence[str] = (),
) -> Path:
    """Print the result of a run, and exit if a signal stopped it; return the model directory.

    Args:
        result: The result.
        as_json: Whether to print JSON instead of the validation metrics and the examples used.
        unit: Singular and plural of what the metrics are computed on.
        other_metrics: Names of metrics to print after those of the result.
    """
    if as_json:
        _print_result_json(result)
    if result.model is None:
        _exit_stopped(result)
    if not as_json:
        _print_metrics(result, unit, other_metrics)
    return result.model


def _print_metrics(
    result: "FinetuneResult", unit: tuple[str, str], other_metrics: Sequence[str]
) -> None:
    """Print the metrics of each validation set, and how many examples of each file were used."""
    first_names = (*result.metric_names, *other_metrics)
    for set_name, metrics in _split_by_set(result).items():
        # Another set can be of another kind, and have other metrics.
        is_same_kind = result.metric_names[0] in metrics
        names = first_names if is_same_kind else [name for name in metrics if name != "examples"]
        values = ", ".join(f"{name} {metrics[name]:.4f}" for name in names if name in metrics)
        title = f"held out, {set_name}" if set_name else "held out"
        set_unit = unit if is_same_kind else ("example", "examples")
        print_line(f"{title} ({count_noun(metrics['examples'], *set_unit)}): {values}")
    for name, counts in result.counts.items():
        print_example_counts(counts, f"{name}: ")


def _split_by_set(result: "FinetuneResult") -> dict[str, dict[str, float]]:
    """Return the metrics of each validation set by its name; the first set has the name ""."""
    # The metrics of the other sets have their names as prefix, which can be the start of another.
    set_names = sorted(result.counts, key=len, reverse=True)
    metrics: dict[str, dict[str, float]] = {"": {}}
    metrics |= {name: {} for name in result.counts}
    for key, value in result.metrics.items():
        name = ""
        if key not in result.metric_names:
            name = next((name for name in set_names if key.startswith(f"{name}_")), "")
        metrics[name][key.removeprefix(f"{name}_") if name else key] = value
    return {name: values for name, values in metrics.items() if "examples" in values}


def drop_missing(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table without values that are None."""
    return {name: value for name, value in table.items() if value is not None}


def name_files(files: list[Path]) -> dict[str, str]:
    """Return validation files by name: "dev" for a single file, else the names of the files."""
    names = ["dev"] if len(files) == 1 else name_paths(files)
    return {name: str(file.resolve()) for name, file in zip(names, files, strict=True)}


def build_values(
    table: str,
    settings: dict[str, Any],
    *,
    dev: list[Path] | None,
    batch_size: int | None,
    max_seqlen: int | None,
    skip_invalid: bool,
    encoding: str | None,
    delimiter: str | None,
    epochs: float | None,
    lr: float | None,
    seed: int | None,
) -> dict[str, dict[str, Any]]:
    """Return the options of a run as nested settings, without those that were not given.

    Args:
        table: The settings table of this kind of run, such as "embedding".
        settings: The settings of this table that other kinds of runs do not have.
        dev: Value of --dev.
        batch_size: Value of --batch-size.
        max_seqlen: Value of --max-seqlen.
        skip_invalid: Value of --skip-invalid.
        encoding: Value of --encoding.
        delimiter: Value of --delimiter.
        epochs: Value of --epochs.
        lr: Value of --lr.
        seed: Value of --seed.
    """
    tables: dict[str, dict[str, Any]] = {
        table: {
            **settings, "batch_size": batch_size, "max_seqlen": max_seqlen,
            "skip_invalid": skip_invalid or None, "encoding": encoding, "delimiter": delimiter,
            "validation_files": name_files(dev or []) or None,
        },
        "optim": {"lr": lr},
        "schedule": {"epochs": epochs},
        "run": {"seed": seed},
    }  # fmt: skip
    return {name: drop_missing(values) for name, values in tables.items()}
