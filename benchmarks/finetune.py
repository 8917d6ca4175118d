"""Compare the time and the scores of fine-tuning with transformers' Trainer.

All runs use the same initial weights, inputs, settings and seeds. For each seed the benchmark runs
Bertsmith, the Trainer with its defaults, and the Trainer with batches of similar length. The
defaults need the most padding, because batches have a random order. Each run evaluates on the
validation file after every epoch.

Bertsmith's time includes everything from reading the data to writing the model. The Trainer's time
includes only ``train()``, on inputs that Bertsmith has tokenized. Each run appends a line to the
file --out, and runs that are in this file are skipped.

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
from reporting import describe_machine

from bertsmith.bundle import TaskKind, compute_model_id
from bertsmith.runtime import device
from bertsmith.tasks.families import get_family
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings, get_default_max_seqlen
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import schedule
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.task_data import build_head, read_task_data, resolve_task_settings

#: Sampling strategy of the Trainer for each baseline.
BASELINES = {"transformers": "random", "transformers, like lengths": "group_by_length"}

#: Model class and data collator of transformers, for each kind of task.
HF_CLASSES = {
    "span": (transformers.AutoModelForQuestionAnswering, transformers.DataCollatorWithPadding),
    "entities": (
        transformers.AutoModelForTokenClassification,
        transformers.DataCollatorForTokenClassification,
    ),
}
HF_SEQUENCE_CLASSES = (
    transformers.AutoModelForSequenceClassification,
    transformers.DataCollatorWithPadding,
)


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer with Bertsmith's learning rate schedule.

    Attributes:
        order: Indices of the validation examples in the order of evaluation. The Trainer also
            groups validation examples by length.
    """

    order: Sequence[int] = ()

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        sampler = super()._get_eval_sampler(eval_dataset)
        self.order = list(range(len(eval_dataset)) if sampler is None else sampler)
        return self.order

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Create the linear warm-up and decay of BERT's original code."""
        settings = schedule.ScheduleSettings(steps=num_training_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: schedule.compute_lr_factor(step, settings)
        )
        return self.lr_scheduler


class TaskDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Inputs of a task in transformers' format, without padding."""

    def __init__(self, inputs: ModelInputs, kind: TaskKind) -> None:
        """Create a dataset from inputs with targets."""
        self._inputs = inputs
        self._kind = kind

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the token ids, segment ids and labels of one example."""
        assert self._inputs.targets is not None
        [(ids, segments)] = self._inputs.sequences[index]
        row: dict[str, Any] = {"input_ids": ids, "token_type_ids": segments}
        target = self._inputs.targets[index]
        if self._kind == "span":
            start, end = target[0].tolist()
            return row | {"start_positions": start, "end_positions": end}
        if self._kind == "entities":
            assert self._inputs.token_indices is not None
            labels = [-100] * len(ids)
            for position, label in zip(
                self._inputs.token_indices[index], target.tolist(), strict=True
            ):
                labels[position] = label
            return row | {"labels": labels}
        return row | {"labels": target[0].item()}


def convert_outputs(
    prediction: Any, inputs: ModelInputs, kind: TaskKind, order: Sequence[int]
) -> list[np.ndarray[Any, Any]]:
    """Convert the Trainer's outputs to Bertsmith's format.

    Args:
        prediction: Output of the Trainer's evaluation.
        inputs: Inputs of the validation examples.
        kind: Kind of the targets.
        order: Index of the example of each output.

    Returns:
        Logits of each example, float32 [predictions, C].
    """
    if kind == "span":
        logits = np.stack(prediction.predictions[:2], -1)
    else:
        logits = np.asarray(prediction.predictions, np.float32)
    logits = logits[np.argsort(order)]
    if logits.ndim < 3:
        return list(logits.reshape(len(inputs), 1, -1))
    outputs = []
    for index, token_logits in enumerate(logits):
        token_indices = (
            inputs.token_indices[index]
            if inputs.token_indices is not None
            else range(inputs.count_tokens(index))
        )
        outputs.append(token_logits[list(token_indices)].astype(np.float32))
    return outputs


def run_bertsmith(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Fine-tune with Bertsmith; return the seconds and the scores."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        result = finetune(
            options.task,
            options.model,
            Path(directory) / "run",
            data=options.data,
            values={
                "task": build_task_overrides(options),
                "optim": {"lr": options.lr},
                "schedule": {"epochs": options.epochs},
                "run": {"seed": seed, "precision": "fp32", "device": "cpu"},
                # Like the Trainer, write no checkpoints during training.
                "checkpoint": {"steps": 10**9},
            },
        )
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "training_seconds": result.seconds,
        **{name: result.metrics[name] for name in result.metric_names},
    }


def run_transformers(options: argparse.Namespace, seed: int, sampling: str) -> dict[str, Any]:
    """Fine-tune with the Trainer; return the seconds and the scores."""
    task = resolve_task(options)
    family = get_family(task.kind)
    data = read_task_data(task)
    head = build_head(task, data)
    bertsmith_tokenizer = Tokenizer.load(options.model)
    name, examples = next(iter(data.heldout.items()))
    train_inputs = family.encode_examples(
        data.train, bertsmith_tokenizer, head, task, data.counts["train"]
    )
    dev_inputs = family.encode_examples(
        examples, bertsmith_tokenizer, head, task, data.counts[name]
    )
    # Bertsmith changes this setting for the process, so the Trainer always gets it too.
    device.keep_freed_memory()
    # Bertsmith enables deterministic algorithms for the process; the Trainer's default is faster.
    torch.use_deterministic_algorithms(False)
    transformers.set_seed(seed)
    model_class, collator_class = HF_CLASSES.get(head.kind, HF_SEQUENCE_CLASSES)
    size = {} if head.kind == "span" else {"num_labels": head.num_outputs}
    model = model_class.from_pretrained(options.model, **size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        return family.compute_metrics(
            convert_outputs(prediction, dev_inputs, head.kind, trainer.order),
            dev_inputs,
            examples,
            head,
            task,
        )

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out,
            use_cpu=True,
            seed=seed,
            save_strategy="no",
            eval_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy=sampling,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.batch,
            learning_rate=options.lr,
            num_train_epochs=options.epochs,
            weight_decay=0.01,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=TaskDataset(train_inputs, head.kind),
            eval_dataset=TaskDataset(dev_inputs, head.kind),
            data_collator=collator_class(tokenizer),
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    scores = [record for record in trainer.state.log_history if "eval_loss" in record][-1]
    return {"seconds": seconds, **{name: scores[f"eval_{name}"] for name in task.metrics}}


def build_task_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the task settings that the command line specifies."""
    settings = {
        "batch_size": options.batch,
        "max_seqlen": options.length,
        "max_train_examples": options.examples,
    }
    if options.train:
        settings["train_file"] = str(options.train.resolve())
    if options.dev:
        settings["validation_files"] = {"dev": str(options.dev.resolve())}
    return {key: value for key, value in settings.items() if value is not None}


def resolve_task(options: argparse.Namespace) -> TaskSettings:
    """Return the task settings, with the family's default length if none is set."""
    user_settings = {"task": build_task_overrides(options)}
    task = resolve_task_settings(options.task, options.model, options.data, user_settings).task
    length = task.max_seqlen or get_default_max_seqlen(task.kind)
    return task.model_copy(update={"max_seqlen": length})


def main() -> None:
    """Parse the command line and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(PUBLIC_TASKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", help="name of the model to record (default: its folder)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--length", type=int)
    parser.add_argument("--train", type=Path, help="another training file")
    parser.add_argument("--dev", type=Path, help="another validation file")
    parser.add_argument(
        "--random-seeds", type=int, help="number of seeds for the Trainer's default order"
    )
    parser.add_argument(
        "--grouped-seeds", type=int, help="number of seeds for the Trainer with similar lengths"
    )
    parser.add_argument("--examples", type=int, help="limit for the number of training examples")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run the comparisons that have no record in the file --out; print medians and time ratios."""
    settings = {name: getattr(options, name) for name in ("task", "epochs", "batch", "lr")}
    settings["examples"] = options.examples
    settings |= {"length": options.length, "weights": options.weights or options.model.name}
    settings["model"] = compute_model_id(options.model)
    settings["train"] = options.train.name if options.train else None
    settings["dev"] = options.dev.name if options.dev else None
    settings["threads"] = torch.get_num_threads()
    seed_limits = dict(zip(BASELINES, (options.random_seeds, options.grouped_seeds), strict=True))
    for seed in range(options.seeds):
        for name in ("bertsmith", *BASELINES):
            seed_limit = seed_limits.get(name)
            if seed_limit is not None and seed >= seed_limit:
                continue
            finished = [
                (record["name"], record["seed"]) for record in read_records(options.out, settings)
            ]
            if (name, seed) in finished:
                continue
            if name == "bertsmith":
                scores = run_bertsmith(options, seed)
            else:
                scores = run_transformers(options, seed, BASELINES[name])
            record = {
                "name": name,
                "seed": seed,
                **settings,
                **scores,
                "load": os.getloadavg()[0],
                "machine": describe_machine(),
            }
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            rounded = {metric: round(value, 4) for metric, value in scores.items()}
            print(name, seed, rounded, flush=True)
    print_summary(
        read_records(options.out, settings), PUBLIC_TASKS[options.task].fixed_settings["metrics"]
    )


def read_records(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records in a file whose settings equal ``settings``."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        record
        for record in records
        if all(record.get(key) == value for key, value in settings.items())
    ]


def print_summary(records: list[dict[str, Any]], metrics: list[str]) -> None:
    """Print the median and range of each metric, and the time ratios."""
    seconds = {}
    for name in ("bertsmith", *BASELINES):
        runs = [record for record in records if record["name"] == name]
        if not runs:
            continue
        seconds[name] = median(run["seconds"] for run in runs)
        scores = ", ".join(
            f"{metric} {median(run[metric] for run in runs):.4f} "
            f"({min(run[metric] for run in runs):.4f} to {max(run[metric] for run in runs):.4f})"
            for metric in metrics
        )
        print(f"{name}: {scores}; {seconds[name]:.1f} s, {len(runs)} seeds")
    for name in (baseline for baseline in BASELINES if baseline in seconds):
        print(f"time of bertsmith / {name}: {seconds['bertsmith'] / seconds[name]:.3f}")


if __name__ == "__main__":
    main()
