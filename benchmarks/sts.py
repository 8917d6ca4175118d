"""Compare training of sentence embeddings with sentence-transformers' trainer on scored pairs.

All runs start from the same model, with the CoSENT loss and the same batch size, epochs, learning
rate, schedule, weight decay and precision. For each seed the benchmark runs Bertsmith and the
trainer of sentence-transformers, and computes the Spearman correlation of both models and of the
start model on the test table.

Bertsmith's time includes everything from reading the data to writing the model. The time of
sentence-transformers includes only ``train()``. Runs on a CPU. sentence-transformers needs the
package datasets for training.

    python benchmarks/sts.py --model MODEL --train STS-B/train.tsv --test STS-B/dev.tsv --seeds 3
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import sentence_transformers
import torch
from reporting import report
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

from bertsmith.tasks.embedding_columns import open_rows, resolve_columns
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor
from bertsmith.use.evaluate_embeddings import evaluate_embeddings

#: Optimizer settings of Bertsmith that the trainer gets, too.
WEIGHT_DECAY, ADAM_EPSILON, MAX_GRAD_NORM = 0.01, 1e-6, 1.0


def read_pairs(path: Path, limit: int | None) -> dict[str, list[Any]]:
    """Return the columns of a table of scored pairs; at most ``limit`` rows."""
    settings = EmbeddingSettings(skip_invalid=True)
    columns = resolve_columns(path, settings, settings.columns)
    names = {"sentence1": columns.text, "sentence2": columns.pair, "score": columns.score}
    table: dict[str, list[Any]] = {name: [] for name in names}
    with open_rows(path, settings, columns) as rows:
        for row in rows:
            if row.error or (limit is not None and len(table["score"]) == limit):
                continue
            for name, column in names.items():
                value = row.cells[column or name]
                table[name].append(float(value) if name == "score" else value)
    return table


def write_pairs(path: Path, table: dict[str, list[Any]]) -> Path:
    """Write scored pairs as TSV without quotation marks."""
    rows = zip(*table.values(), strict=True)
    lines = ["\t".join(table), *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_bertsmith(
    options: argparse.Namespace, train: Path, test: Path, seed: int
) -> dict[str, Any]:
    """Train with Bertsmith; return the seconds and the test score."""
    with tempfile.TemporaryDirectory() as directory:
        values = {
            "embedding": {
                "batch_size": options.batch_size,
                "validation_files": {"test": str(test)},
                "max_seqlen": options.max_seqlen,
                "skip_invalid": True,
            },
            "optim": {"lr": options.lr},
            "schedule": {"epochs": options.epochs},
            "run": {"seed": seed, "eval_strategy": "end", "precision": options.precision,
                    "threads": torch.get_num_threads(), "device": "cpu"},
        }  # fmt: skip
        start = time.perf_counter()
        result = finetune_embedder(
            options.model, Path(directory) / "run", data=train, values=values
        )
        seconds = time.perf_counter() - start
        assert result.model is not None
        return {"seconds": seconds, "spearman": evaluate_embeddings(result.model, test)["spearman"]}


def run_sentence_transformers(
    options: argparse.Namespace, table: dict[str, list[Any]], test: Path, seed: int
) -> dict[str, Any]:
    """Train with sentence-transformers; return the seconds of ``train()`` and the test score."""
    try:
        from datasets import Dataset
    except ModuleNotFoundError:
        sys.exit("error: sentence-transformers needs the package datasets for training; install it")
    model = sentence_transformers.SentenceTransformer(str(options.model), device="cpu")
    model.max_seq_length = options.max_seqlen

    class Trainer(sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
        """The trainer with Bertsmith's learning rate schedule."""

        def create_scheduler(
            self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
        ) -> Any:
            settings = ScheduleSettings(steps=num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: compute_lr_factor(step, settings)
            )
            return self.lr_scheduler

    with tempfile.TemporaryDirectory() as directory:
        arguments = sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=directory,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr,
            weight_decay=WEIGHT_DECAY,
            adam_epsilon=ADAM_EPSILON,
            max_grad_norm=MAX_GRAD_NORM,
            seed=seed,
            use_cpu=True,
            bf16=options.precision == "bf16",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(table),
            loss=CoSENTLoss(model),
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        model.save(str(Path(directory) / "model"))
        score = evaluate_embeddings(Path(directory) / "model", test)["spearman"]
    return {"seconds": seconds, "spearman": score}


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model directory to start from")
    parser.add_argument("--train", type=Path, required=True, help="table of scored pairs")
    parser.add_argument("--test", type=Path, required=True, help="table of scored pairs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--max-seqlen", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--max-train-examples", type=int, help="use only the first examples")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def main() -> None:
    """Run all seeds and report the median ratio of the times and the scores."""
    options = parse_options()
    table = read_pairs(options.train, options.max_train_examples)
    ratios, measurements = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        train = write_pairs(Path(directory) / "train.tsv", table)
        test = write_pairs(Path(directory) / "test.tsv", read_pairs(options.test, None))
        measurements["start model: spearman"] = evaluate_embeddings(options.model, test)["spearman"]
        times: dict[str, list[float]] = {"bertsmith": [], "sentence-transformers": []}
        for seed in range(options.seeds):
            runs = {
                "bertsmith": run_bertsmith(options, train, test, seed),
                "sentence-transformers": run_sentence_transformers(options, table, test, seed),
            }
            for name, run in runs.items():
                times[name].append(run["seconds"])
                measurements[f"{name}, seed {seed}: spearman"] = run["spearman"]
                measurements[f"{name}, seed {seed}: seconds"] = run["seconds"]
    pairs = zip(times["sentence-transformers"], times["bertsmith"], strict=True)
    ratios["speed, compared with sentence-transformers"] = median(a / b for a, b in pairs)
    report("sts", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
