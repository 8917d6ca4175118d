"""Run the `bertsmith finetune` commands of the task results table, with several seeds each.

Each row of the table is one command. Its metrics are written to benchmarks/results/tasks/ROW.json
after every seed, so an interrupted run continues where it stopped.

    python benchmarks/tasks.py --data FOLDER --model DIR --work DIR [--seeds N] [ROW …]

--data: the unpacked datasets, in folders such as glue, squad and conll2003. --model: pre-trained
weights. --korean, --mini, --untrained, --adapted: models that some rows need instead.
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from reporting import describe_machine

from bertsmith.bundle import compute_model_id

RESULTS = Path(__file__).parent / "results" / "tasks"
#: Number of validation articles for SQuAD v2.0, from the available half of its dev set.
NUM_DEV_ARTICLES = 5
#: The training file for SQuAD v2.0 has the other articles of that half, and every fourth article of
#: v1.1, which balances answerable and unanswerable questions.
V1_ARTICLE_STEP = 4


@dataclass(frozen=True)
class Row:
    """One row of the results table.

    Attributes:
        arguments: Arguments of `bertsmith finetune`; may contain {data} and {work}.
        seeds: Number of seeds.
        model: Command-line option with the path of the model.
    """

    arguments: str
    seeds: int = 5
    model: str = "model"


def build_glue_arguments(task: str, directory: str, options: str = "") -> str:
    """Return the arguments of `bertsmith finetune` for a GLUE task."""
    return f"{task} --data {{data}}/glue/{directory} {options}".strip()


#: Options that select the first examples of the training file; the number follows.
FIRST_EXAMPLES = "--set task.train_subset=first --set task.max_train_examples="
CONLL = "conll2003 --data {data}/conll2003"
FEATURES = (
    "embeddings", "second-to-last", "last", "weighted-sum-last-four", "concat-last-four",
    "weighted-sum-all",
)  # fmt: skip
ROWS: dict[str, Row] = {
    # Twice the paper's highest learning rate: with few steps, the paper's rates underfit.
    "cola": Row(build_glue_arguments("cola", "CoLA", "--lr 1e-4")),
    "sst-2": Row(build_glue_arguments("sst-2", "SST-2", f"--lr 1e-4 {FIRST_EXAMPLES}10000"), 3),
    "mrpc": Row(build_glue_arguments("mrpc", "MRPC", "--lr 1e-4")),
    "sts-b": Row(build_glue_arguments("sts-b", "STS-B", "--lr 1e-4")),
    "rte": Row(build_glue_arguments("rte", "RTE", "--lr 1e-4")),
    "wnli": Row(build_glue_arguments("wnli", "WNLI")),
    "squad": Row(
        "squad --data {data}/squad --set task.train_file={data}/squad/train-v1.1-11877.json "
        "--epochs 2 --lr 1e-4", 1,
    ),
    "squad2": Row(
        "squad2 --data {data}/squad --set task.train_file={work}/squad2-train.json "
        "--dev {work}/squad2-dev.json --epochs 2 --lr 1e-4", 1,
    ),
    **{
        f"codah-fold-{fold}": Row(
            f"codah --data {{data}}/codah --set task.validation_fold={fold}", 1
        )
        for fold in range(5)
    },
    "comve-b": Row("comve-b --data {data}/comve-b", 1),
    "conll2003": Row(CONLL, 3),
    "conll2003-4000": Row(f"{CONLL} {FIRST_EXAMPLES}4000 --epochs 4 --lr 1e-4", 1),
    # A window of 256 tokens has several sentences, hence the smaller batch.
    "conll2003-4000-document": Row(
        f"{CONLL} {FIRST_EXAMPLES}4000 --epochs 4 --lr 1e-4 --set task.context=document "
        "--max-seqlen 256 --batch-size 8", 1
    ),
    **{
        f"conll2003-{layers}": Row(
            f"{CONLL} --features {layers} --set features.width=256 --epochs 4 "
            f"{FIRST_EXAMPLES}4000", 1,
        )
        for layers in FEATURES
    },
    "conll2003-pos": Row("conll2003-pos --data {data}/conll2003 --epochs 1", 1),
    "nsmc": Row("nsmc --data {data}/korean/nsmc --lr 1e-4", 3, "korean"),
    "korsts": Row("korsts --data {data}/korean/KorSTS --lr 1e-4", 3, "korean"),
    "klue-ner": Row(
        "tag --data {data}/korean/klue-ner/klue-ner-v1.1_dev.tsv --set task.tag_level=character "
        "--set task.validation_fraction=0.2 --lr 2e-4 --epochs 5", 3, "korean",
    ),
    **{
        f"{name}-{task}": Row(arguments, 3, name)
        for task, arguments in {
            # With this learning rate, pre-training improves the scores.
            "sst-2": build_glue_arguments("sst-2", "SST-2", f"--lr 5e-4 {FIRST_EXAMPLES}10000"),
            "sst-2-1000": build_glue_arguments(
                "sst-2", "SST-2", f"--lr 5e-4 {FIRST_EXAMPLES}1000 --epochs 10"
            ),
            "mrpc": build_glue_arguments("mrpc", "MRPC", "--lr 1e-4"),
            "sts-b": build_glue_arguments("sts-b", "STS-B", "--lr 1e-4"),
            "cola": build_glue_arguments("cola", "CoLA", "--lr 1e-4"),
            "conll2003": f"{CONLL} --lr 2e-4",
        }.items()
        # The adapted model was pre-trained further on SST-2's sentences, without labels.
        for name in ("mini", "untrained", *(["adapted"] if task.startswith("sst-2") else []))
    },
}  # fmt: skip


def main() -> None:
    """Run the commands of the requested rows that have no results yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory for the runs")
    parser.add_argument("--seeds", type=int, help="maximum number of seeds per row")
    for name in ("model", "korean", "mini", "untrained", "adapted"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    for name in options.rows or ROWS:
        row = ROWS[name]
        model = getattr(options, row.model)
        if model is None:
            print(f"{name}: skipped, needs --{row.model}")
            continue
        if "{work}/squad2" in row.arguments:
            split_squad2(options.data / "squad", options.work)
        for num_seeds in range(1, min(row.seeds, options.seeds or row.seeds) + 1):
            summary = run_row(name, row, model, options, num_seeds)
            print(f"{name}: {summary}", flush=True)


def run_row(name: str, row: Row, model: Path, options: argparse.Namespace, num_seeds: int) -> str:
    """Run the command of a row with ``num_seeds`` seeds, write its metrics, return a summary."""
    file = RESULTS / f"{name}.json"
    arguments_without_paths = row.arguments.replace("{data}", "DATA").replace("{work}", "WORK")
    command = f"bertsmith finetune {arguments_without_paths} --model {row.model.upper()} --out RUN"
    old_content = json.loads(file.read_text()) if file.exists() else {}
    # Results that were recorded with other arguments or another model are outdated.
    key = {"command": command, "model": compute_model_id(model)}
    is_same = key.items() <= old_content.items()
    if is_same and len(old_content["runs"]) >= num_seeds:
        return "already finished"
    arguments = row.arguments.format(data=options.data, work=options.work)
    out = options.work / name
    words = ["finetune", *shlex.split(arguments), "--model", str(model)]
    for seed in range(num_seeds):
        run_command = [sys.executable, "-m", "bertsmith", *words, "--out", f"{out}/seed-{seed}"]
        run_command += ["--seed", str(seed)]
        process = subprocess.run(
            run_command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True
        )
        if process.returncode:
            raise SystemExit(
                f"{process.stderr}\nthe command failed with exit status {process.returncode}: "
                f"{shlex.join(run_command)}"
            )
    runs = [
        json.loads((out / f"seed-{seed}" / "result.json").read_text()) for seed in range(num_seeds)
    ]
    content: dict[str, Any] = {
        "name": name,
        **key,
        "metric_names": runs[0]["metric_names"],
        "date": datetime.now(UTC).date().isoformat(),
        "runs": [{"metrics": run["metrics"], "seconds": run["seconds"]} for run in runs],
        "counts": runs[0]["counts"],
        "machine": describe_machine(),
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
    metric = runs[0]["metric_names"][0]
    return f"{num_seeds} seeds, {metric} {median(run['metrics'][metric] for run in runs):.4f}"


def split_squad2(directory: Path, work: Path) -> None:
    """Write a training and a dev file for SQuAD v2.0, from v1.1 and half of the v2.0 dev set."""
    if (work / "squad2-dev.json").exists():
        return
    v1_articles = json.loads((directory / "train-v1.1-11877.json").read_text(encoding="utf-8"))[
        "data"
    ]
    v2_articles = json.loads((directory / "dev-v2.0-half.json").read_text(encoding="utf-8"))["data"]
    parts = {
        "train": v1_articles[::V1_ARTICLE_STEP] + v2_articles[:-NUM_DEV_ARTICLES],
        "dev": v2_articles[-NUM_DEV_ARTICLES:],
    }
    for name, articles in parts.items():
        text = json.dumps({"version": "v2.0", "data": articles})
        (work / f"squad2-{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
