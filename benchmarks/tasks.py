"""The rows of docs/results.md: each a `bertsmith finetune` command, run seed after seed.

A row's figures are written to benchmarks/results/tasks/ROW.json after every seed, and a run that
was stopped goes on where it was, so that hours of work can be done in pieces. Usage:

    python benchmarks/tasks.py --data FOLDER --model DIR --work DIR [--seeds N] [ROW …]

--data: the unpacked labelled data, with the folders glue, squad, conll2003 and so on. --model: real
pre-trained weights. --korean, --mini, --untrained, --adapted: models that some rows need instead.
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

from reporting import machine

RESULTS = Path(__file__).parent / "results" / "tasks"
#: Articles of the half of SQuAD v2.0's dev set that are held out; the others are trained on, with
#: one in so many of v1.1's, lest questions without an answer be few.
HELD_ARTICLES, EVERY_ARTICLE = 5, 4


@dataclass(frozen=True)
class Row:
    """A row: the command's words, in which {data}, {work} and the models stand; how many seeds."""

    words: str
    seeds: int = 5
    #: Which model: the option's name.
    model: str = "model"


def glue(task: str, folder: str, more: str = "") -> str:
    """Return the words of a GLUE task."""
    return f"{task} --data {{data}}/glue/{folder} {more}".strip()


#: The recorded results are of the first rows of a file.
FIRST = "--set task.examples_draw=first --set task.examples="
CONLL = "conll2003 --data {data}/conll2003"
FEATURES = (
    "embeddings", "second-to-last", "last", "weighted-sum-last-four", "concat-last-four",
    "weighted-sum-all",
)  # fmt: skip
ROWS: dict[str, Row] = {
    # Twice the highest rate of the paper: in few steps the usual one leaves these weights short.
    "cola": Row(glue("cola", "CoLA", "--lr 1e-4")),
    "sst-2": Row(glue("sst-2", "SST-2", f"--lr 1e-4 {FIRST}10000"), 3),
    "mrpc": Row(glue("mrpc", "MRPC", "--lr 1e-4")),
    "sts-b": Row(glue("sts-b", "STS-B", "--lr 1e-4")),
    "rte": Row(glue("rte", "RTE", "--lr 1e-4")),
    "wnli": Row(glue("wnli", "WNLI")),
    "squad": Row(
        "squad --data {data}/squad --set task.train={data}/squad/train-v1.1-11877.json "
        "--epochs 2 --lr 1e-4", 1,
    ),
    "squad2": Row(
        "squad2 --data {data}/squad --set task.train={work}/squad2-train.json "
        "--dev {work}/squad2-dev.json --epochs 2 --lr 1e-4", 1,
    ),
    **{
        f"codah-fold-{fold}": Row(f"codah --data {{data}}/codah --set task.heldout_fold={fold}", 1)
        for fold in range(5)
    },
    "comve-b": Row("comve-b --data {data}/comve-b", 1),
    "conll2003": Row(CONLL, 3),
    # A window of 256 tokens has several sentences: smaller batches, and a rate for few steps.
    "conll2003-4000": Row(f"{CONLL} {FIRST}4000 --epochs 4 --lr 1e-4", 1),
    "conll2003-4000-document": Row(
        f"{CONLL} {FIRST}4000 --epochs 4 --lr 1e-4 --set task.context=document "
        "--length 256 --batch 8", 1
    ),
    **{
        f"conll2003-{layers}": Row(
            f"{CONLL} --features {layers} --set features.width=256 --epochs 4 "
            f"{FIRST}4000", 1,
        )
        for layers in FEATURES
    },
    "conll2003-pos": Row("conll2003-pos --data {data}/conll2003 --epochs 1", 1),
    "nsmc": Row("nsmc --data {data}/korean/nsmc --lr 1e-4", 3, "korean"),
    "korsts": Row("korsts --data {data}/korean/KorSTS --lr 1e-4", 3, "korean"),
    "klue-ner": Row(
        "tag --data {data}/korean/klue-ner/klue-ner-v1.1_dev.tsv --set task.unit=character "
        "--set task.heldout_share=0.2 --lr 2e-4 --epochs 5", 3, "korean",
    ),
    **{
        f"{name}-{task}": Row(words, 3, name)
        for task, words in {
            # A rate at which what was read before is used, and not learnt anew beside it.
            "sst-2": glue("sst-2", "SST-2", f"--lr 5e-4 {FIRST}10000"),
            "sst-2-1000": glue("sst-2", "SST-2", f"--lr 5e-4 {FIRST}1000 --epochs 10"),
            "mrpc": glue("mrpc", "MRPC", "--lr 1e-4"),
            "sts-b": glue("sts-b", "STS-B", "--lr 1e-4"),
            "cola": glue("cola", "CoLA", "--lr 1e-4"),
            "conll2003": f"{CONLL} --lr 2e-4",
        }.items()
        # Adapted: to the sentences of SST-2, without their labels.
        for name in ("mini", "untrained", *(["adapted"] if task.startswith("sst-2") else []))
    },
}  # fmt: skip


def main() -> None:
    """Run the rows that are asked for and not done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the runs are made")
    parser.add_argument("--seeds", type=int, help="at most so many of each row")
    for name in ("model", "korean", "mini", "untrained", "adapted"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    part_squad2(options.data / "squad", options.work)
    for name in options.rows or ROWS:
        row = ROWS[name]
        start = getattr(options, row.model)
        if start is None:
            print(f"{name}: left out, it needs --{row.model}")
            continue
        for seeds in range(1, min(row.seeds, options.seeds or row.seeds) + 1):
            told = run(name, row, start, options, seeds)
            print(f"{name}: {told}", flush=True)


def run(name: str, row: Row, start: Path, options: argparse.Namespace, seeds: int) -> str:
    """Run a row with so many seeds, write its figures, and return them as words."""
    file = RESULTS / f"{name}.json"
    shown = row.words.replace("{data}", "DATA").replace("{work}", "WORK")
    command = f"bertsmith finetune {shown} --model {row.model.upper()} --out RUN"
    before = json.loads(file.read_text()) if file.exists() else {}
    # A row whose words have changed is another one.
    if before.get("command") == command and len(before["runs"]) >= seeds:
        return "done before"
    filled = row.words.format(data=options.data, work=options.work)
    out = options.work / name
    words = ["finetune", *shlex.split(filled), "--model", str(start)]
    for seed in range(seeds):
        own = [sys.executable, "-m", "bertsmith", *words, "--out", f"{out}/seed-{seed}"]
        own += ["--seed", str(seed)]
        done = subprocess.run(
            own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True
        )
        if done.returncode:
            raise SystemExit(f"{done.stderr}\n{shlex.join(own)} ended with {done.returncode}")
    runs = [json.loads((out / f"seed-{seed}" / "result.json").read_text())
            for seed in range(seeds)]  # fmt: skip
    content: dict[str, Any] = {
        "name": name,
        "command": command,
        "metrics": runs[0]["metrics"],
        "date": datetime.now(UTC).date().isoformat(),
        "runs": [{"figures": one["figures"], "seconds": one["seconds"]} for one in runs],
        "counts": runs[0]["counts"],
        "machine": machine(),
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
    metric = runs[0]["metrics"][0]
    return f"{seeds} seeds, {metric} {median(one['figures'][metric] for one in runs):.4f}"


def part_squad2(folder: Path, work: Path) -> None:
    """Write SQuAD v2.0 in two parts: some of v1.1 and most of the half; and the rest of it."""
    if (work / "squad2-dev.json").exists():
        return
    answerable = json.loads((folder / "train-v1.1-11877.json").read_text(encoding="utf-8"))["data"]
    half = json.loads((folder / "dev-v2.0-half.json").read_text(encoding="utf-8"))["data"]
    parts = {
        "train": answerable[::EVERY_ARTICLE] + half[:-HELD_ARTICLES],
        "dev": half[-HELD_ARTICLES:],
    }
    for name, articles in parts.items():
        text = json.dumps({"version": "v2.0", "data": articles})
        (work / f"squad2-{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
