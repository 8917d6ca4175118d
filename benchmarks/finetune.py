"""Fine-tune on a task beside transformers' Trainer: the same weights, settings and seeds.

For each seed it runs, in turn: Bertsmith; the Trainer with its defaults; the Trainer with batches
of like lengths. Each reads the tables, trains, and scores the held-out file after every epoch. The
clock of Bertsmith runs from the call to the written model, that of the Trainer over ``train()``
alone. A line is appended to --out after every run, and what stands there is not run again.

    python benchmarks/finetune.py --task rte --data FOLDER --model DIR --seeds 5 --out RESULTS
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from reporting import machine

from bertsmith.bundle import Head
from bertsmith.tasks.classify import Example, read, score, targets_of
from bertsmith.tasks.inputs import Inputs
from bertsmith.tasks.public import TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.finetune import finetune

PEERS = {"transformers": "random", "transformers, like lengths": "group_by_length"}


class Table(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples as the Trainer takes them."""

    def __init__(self, examples: list[Example], head: Head, tokenizer: Any, length: int) -> None:
        """Tokenize all, as the published example scripts do, without padding."""
        texts = list(zip(*(example.texts for example in examples), strict=True))
        self._rows = tokenizer(*map(list, texts), truncation=True, max_length=length)
        self._targets = targets_of(examples, head)

    def __len__(self) -> int:
        return len(self._rows["input_ids"])

    def __getitem__(self, number: int) -> dict[str, Any]:
        assert self._targets is not None
        row = {key: values[number] for key, values in self._rows.items()}
        return row | {"labels": self._targets[number].item()}


def ours(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run Bertsmith."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = finetune(
            options.task, options.model, Path(folder) / "run", data=options.data,
            values={
                "task": {"batch": options.batch, "length": options.length},
                "optim": {"lr": options.lr},
                "schedule": {"epochs": options.epochs},
                "run": {"seed": seed, "precision": "fp32"},
            },
        )  # fmt: skip
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "training_seconds": result.seconds,
            **{name: result.figures[name] for name in result.metrics}}  # fmt: skip


def theirs(options: argparse.Namespace, seed: int, sampling: str) -> dict[str, Any]:
    """Run the Trainer over transformers' own class and tokenizer."""
    facts = TASKS[options.task].settings(Path(options.data))
    task = TaskSettings.parse({"name": options.task, **facts}, "the task")
    train, _ = read(Path(task.train), task, labels=task.labels or None)
    dev, _ = read(Path(next(iter(task.heldout.values()))), task, labels=task.labels or None)
    head = Head(task.kind, tuple(task.labels))
    # Bertsmith has PyTorch compute the same bytes every time; its peer need not.
    torch.use_deterministic_algorithms(False)
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=head.outputs
    )
    tables = [Table(examples, head, tokenizer, options.length) for examples in (train, dev)]

    def metrics(found: Any) -> dict[str, float]:
        logits = np.asarray(found.predictions, np.float32).reshape(len(dev), 1, head.outputs)
        right = np.asarray(found.label_ids).reshape(len(dev), 1)
        inputs = Inputs([], [], [], list(right))
        return score(list(logits), inputs, dev, head, task)

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out, use_cpu=True, seed=seed, save_strategy="no", eval_strategy="epoch",
            report_to=[], disable_tqdm=True, train_sampling_strategy=sampling,
            per_device_train_batch_size=options.batch, per_device_eval_batch_size=options.batch,
            learning_rate=options.lr, num_train_epochs=options.epochs, warmup_steps=0.1,
            weight_decay=0.01, adam_epsilon=1e-6, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=tables[0], eval_dataset=tables[1],
            processing_class=tokenizer, compute_metrics=metrics,
        )  # fmt: skip
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    last = [line for line in trainer.state.log_history if "eval_loss" in line][-1]
    return {"seconds": seconds, **{name: last[f"eval_{name}"] for name in task.metrics}}


def main() -> None:
    """Run what is missing in --out, then tell medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", default="all-MiniLM-L6-v2", help="their name, for the record")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--examples", type=int, help="only the first so many for training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.examples:
            shorten(options, Path(folder))
        compare(options)


def shorten(options: argparse.Namespace, folder: Path) -> None:
    """Make a copy of the task's folder whose training file is shorter, and name it instead."""
    task = TASKS[options.task]
    for name in task.dev.values():
        (folder / name).write_bytes((options.data / name).read_bytes())
    lines = (options.data / task.train).read_text(encoding="utf-8").splitlines(keepends=True)
    header = bool(task.facts.get("header", True))
    (folder / task.train).write_text("".join(lines[: options.examples + header]), encoding="utf-8")
    options.data = folder


def compare(options: argparse.Namespace) -> None:
    """Run what is missing, seed by seed, and tell of all."""
    settings = {name: getattr(options, name) for name in ("task", "epochs", "batch", "lr")}
    settings["examples"] = options.examples
    settings |= {"length": options.length, "weights": options.weights}
    for seed in range(options.seeds):
        for name in ("bertsmith", *PEERS):
            done = [(one["name"], one["seed"]) for one in lines(options.out, settings)]
            if (name, seed) in done:
                continue
            found = ours(options, seed) if name == "bertsmith" else (
                theirs(options, seed, PEERS[name]))  # fmt: skip
            line = {"name": name, "seed": seed, **settings, **found, "machine": machine()}
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, {k: round(v, 4) for k, v in found.items()}, flush=True)
    tell(lines(options.out, settings), TASKS[options.task].facts["metrics"])


def lines(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in a file that were made with these settings."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in found if all(one[key] == value for key, value in settings.items())]


def tell(found: list[dict[str, Any]], metrics: list[str]) -> None:
    """Print medians and spread of each, and how much longer the peers take."""
    seconds = {}
    for name in ("bertsmith", *PEERS):
        own = [one for one in found if one["name"] == name]
        seconds[name] = median(one["seconds"] for one in own)
        told = ", ".join(
            f"{metric} {median(one[metric] for one in own):.4f} "
            f"({min(one[metric] for one in own):.4f} to {max(one[metric] for one in own):.4f})"
            for metric in metrics
        )
        print(f"{name}: {told}; {seconds[name]:.1f} s, {len(own)} seeds")
    for name in PEERS:
        print(f"time of bertsmith / {name}: {seconds['bertsmith'] / seconds[name]:.3f}")


if __name__ == "__main__":
    main()
