"""Fine-tune on a task beside transformers' Trainer: the same weights, inputs, settings and seeds.

For each seed it runs, in turn: Bertsmith; the Trainer with its defaults (its order of examples is
random, so that its batches are padded most); the Trainer with batches of like lengths. Each scores
the held-out file after every epoch. The clock of Bertsmith runs from the call to the written model,
reading and tokenizing included; that of the Trainer over ``train()`` alone, and its inputs are
those that Bertsmith made. A line is appended to --out after every run, and what stands there is not
run again.

    python benchmarks/finetune.py --task rte --data FOLDER --model DIR --seeds 5 --out RESULTS
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from reporting import machine

from bertsmith.bundle import TaskKind
from bertsmith.runtime import device
from bertsmith.tasks.families import get_family
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import schedule
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.task_data import build_head, read_task_data, resolve_task_settings

PEERS = {"transformers": "random", "transformers, like lengths": "group_by_length"}


#: The class, and what pads a batch, for each kind of task.
CLASSES = {
    "span": (transformers.AutoModelForQuestionAnswering, transformers.DataCollatorWithPadding),
    "entities": (
        transformers.AutoModelForTokenClassification,
        transformers.DataCollatorForTokenClassification,
    ),
}
SEQUENCES = (
    transformers.AutoModelForSequenceClassification,
    transformers.DataCollatorWithPadding,
)


class Trainer(transformers.Trainer):
    """The Trainer, with the learning rates that Bertsmith takes: its own warm-up ends higher.

    Grouped by length, it shuffles the held-out examples as well: ``order`` tells which is which.
    """

    order: Sequence[int] = ()

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        sampler = super()._get_eval_sampler(eval_dataset)
        self.order = list(range(len(eval_dataset)) if sampler is None else sampler)
        return self.order

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Return linear warm-up and decay as the original's code has them."""
        timing = schedule.ScheduleSettings(steps=num_training_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: schedule.lr_factor(step, timing)
        )
        return self.lr_scheduler


class Table(torch.utils.data.Dataset[dict[str, Any]]):
    """Units of a task as the Trainer takes them, unpadded."""

    def __init__(self, inputs: ModelInputs, kind: TaskKind) -> None:
        """Keep the inputs."""
        self._inputs, self._kind = inputs, kind

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return ids, segments and what is right, under the names that the classes ask for."""
        assert self._inputs.targets is not None
        [(ids, segments)] = self._inputs.sequences[number]
        row: dict[str, Any] = {"input_ids": ids, "token_type_ids": segments}
        target = self._inputs.targets[number]
        if self._kind == "span":
            first, last = target[0].tolist()
            return row | {"start_positions": first, "end_positions": last}
        if self._kind == "entities":
            assert self._inputs.token_indices is not None
            labels = [-100] * len(ids)
            for place, label in zip(
                self._inputs.token_indices[number], target.tolist(), strict=True
            ):
                labels[place] = label
            return row | {"labels": labels}
        return row | {"labels": target[0].item()}


def rows_of(
    found: Any, inputs: ModelInputs, kind: TaskKind, order: Sequence[int]
) -> list[np.ndarray[Any, Any]]:
    """Return the Trainer's outputs, float32 [m, C] for each unit, as our scores take them.

    order: the number of the unit of each of the outputs.
    """
    if kind == "span":
        logits = np.stack(found.predictions[:2], -1)
    else:
        logits = np.asarray(found.predictions, np.float32)
    logits = logits[np.argsort(order)]
    if logits.ndim < 3:
        return list(logits.reshape(len(inputs), 1, -1))
    rows = []
    for number, own in enumerate(logits):
        places = (
            inputs.token_indices[number]
            if inputs.token_indices is not None
            else range(inputs.num_tokens(number))
        )
        rows.append(own[list(places)].astype(np.float32))
    return rows


def ours(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run Bertsmith."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = finetune(
            options.task, options.model, Path(folder) / "run", data=options.data,
            values={
                "task": changes(options),
                "optim": {"lr": options.lr},
                "schedule": {"epochs": options.epochs},
                "run": {"seed": seed, "precision": "fp32"},
                # As the peer: none on the way.
                "checkpoint": {"every": 10**9},
            },
        )  # fmt: skip
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "training_seconds": result.seconds,
            **{name: result.figures[name] for name in result.metrics}}  # fmt: skip


def theirs(options: argparse.Namespace, seed: int, sampling: str) -> dict[str, Any]:
    """Run the Trainer over transformers' own class."""
    settings = with_model_length(options)
    task, family = settings, get_family(settings.kind)
    data = read_task_data(task)
    head = build_head(task, data)
    words = Tokenizer.load(options.model)
    name, examples = next(iter(data.heldout.items()))
    train = family.encode_examples(data.train, words, head, task, data.counts["train"])
    dev = family.encode_examples(examples, words, head, task, data.counts[name])
    # The peer gains by it as Bertsmith does, in whichever order the two run.
    device.keep_freed_memory()
    # Bertsmith has PyTorch compute the same bytes every time; its peer need not.
    torch.use_deterministic_algorithms(False)
    transformers.set_seed(seed)
    form, collator = CLASSES.get(head.kind, SEQUENCES)
    size = {} if head.kind == "span" else {"num_labels": head.num_outputs}
    model = form.from_pretrained(options.model, **size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def metrics(found: Any) -> dict[str, float]:
        return family.compute_metrics(
            rows_of(found, dev, head.kind, trainer.order), dev, examples, head, task
        )

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out, use_cpu=True, seed=seed, save_strategy="no", eval_strategy="epoch",
            report_to=[], disable_tqdm=True, train_sampling_strategy=sampling,
            per_device_train_batch_size=options.batch, per_device_eval_batch_size=options.batch,
            learning_rate=options.lr, num_train_epochs=options.epochs,
            weight_decay=0.01, adam_epsilon=1e-6, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Table(train, head.kind),
            eval_dataset=Table(dev, head.kind), data_collator=collator(tokenizer),
            processing_class=tokenizer, compute_metrics=metrics,
        )  # fmt: skip
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    last = [line for line in trainer.state.log_history if "eval_loss" in line][-1]
    return {"seconds": seconds, **{name: last[f"eval_{name}"] for name in task.metrics}}


def changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the task that were asked for."""
    said = {"batch": options.batch, "length": options.length, "examples": options.examples}
    if options.train:
        said["train"] = str(options.train.resolve())
    if options.dev:
        said["heldout"] = {"dev": str(options.dev.resolve())}
    return {key: value for key, value in said.items() if value is not None}


def with_model_length(options: argparse.Namespace) -> TaskSettings:
    """Return the task as Bertsmith resolves it."""
    said = {"task": changes(options)}
    task = resolve_task_settings(options.task, options.model, options.data, said).task
    length = task.length or get_family(task.kind).DEFAULT_LENGTH
    return task.model_copy(update={"length": length})


def main() -> None:
    """Run what is missing in --out, then tell medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(PUBLIC_TASKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", default="all-MiniLM-L6-v2", help="their name, for the record")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--length", type=int)
    parser.add_argument("--train", type=Path, help="another training file")
    parser.add_argument("--dev", type=Path, help="another held-out file")
    parser.add_argument(
        "--random-seeds", type=int, help="run the Trainer's slow defaults for so many seeds only"
    )
    parser.add_argument(
        "--grouped-seeds", type=int, help="run the Trainer with like lengths for so many seeds only"
    )
    parser.add_argument("--examples", type=int, help="only the first so many for training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run what is missing, seed by seed, and tell of all."""
    settings = {name: getattr(options, name) for name in ("task", "epochs", "batch", "lr")}
    settings["examples"] = options.examples
    settings |= {"length": options.length, "weights": options.weights}
    settings["train"] = options.train.name if options.train else None
    settings["dev"] = options.dev.name if options.dev else None
    settings["threads"] = torch.get_num_threads()
    fewer = dict(zip(PEERS, (options.random_seeds, options.grouped_seeds), strict=True))
    for seed in range(options.seeds):
        for name in ("bertsmith", *PEERS):
            most = fewer.get(name)
            if most is not None and seed >= most:
                continue
            done = [(one["name"], one["seed"]) for one in lines(options.out, settings)]
            if (name, seed) in done:
                continue
            found = ours(options, seed) if name == "bertsmith" else (
                theirs(options, seed, PEERS[name]))  # fmt: skip
            line = {"name": name, "seed": seed, **settings, **found, "load": os.getloadavg()[0],
                    "machine": machine()}  # fmt: skip
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, {k: round(v, 4) for k, v in found.items()}, flush=True)
    tell(lines(options.out, settings), PUBLIC_TASKS[options.task].fixed_settings["metrics"])


def lines(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in a file that were made with these settings."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in found if all(one.get(key) == value for key, value in settings.items())]


def tell(found: list[dict[str, Any]], metrics: list[str]) -> None:
    """Print medians and spread of each, and how much longer the peers take."""
    seconds = {}
    for name in ("bertsmith", *PEERS):
        own = [one for one in found if one["name"] == name]
        if not own:
            continue
        seconds[name] = median(one["seconds"] for one in own)
        told = ", ".join(
            f"{metric} {median(one[metric] for one in own):.4f} "
            f"({min(one[metric] for one in own):.4f} to {max(one[metric] for one in own):.4f})"
            for metric in metrics
        )
        print(f"{name}: {told}; {seconds[name]:.1f} s, {len(own)} seeds")
    for name in (peer for peer in PEERS if peer in seconds):
        print(f"time of bertsmith / {name}: {seconds['bertsmith'] / seconds[name]:.3f}")


if __name__ == "__main__":
    main()
