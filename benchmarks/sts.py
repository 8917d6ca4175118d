"""Compare training of sentence embeddings with sentence-transformers' trainer on scored pairs.

All runs start from the same model, with the CoSENT loss and the same batch size, epochs, learning
rate, schedule, weight decay and precision. For each seed the benchmark runs Bertsmith and the
trainer of sentence-transformers, and computes the Spearman correlation of both models and of the
start model on the test table.

Bertsmith's time includes everything from reading the data to writing the model. The time of
sentence-transformers includes only ``train()``. Runs on a CPU. The trainer of sentence-transformers
needs the package datasets, even for a table in memory; ``--bertsmith-only`` runs without it.

    python benchmarks/sts.py --model MODEL --train STS-B/train.tsv --test STS-B/dev.tsv --seeds 3

With ``--runs FILE``, each finished run is stored in FILE, and the same command continues with the
runs that are missing, such as further seeds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reporting import report

from bertsmith.bundle import compute_model_id
from bertsmith.tasks.embedding_columns import open_rows, resolve_columns
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.engine.data_files import hash_files
from bertsmith.train.engine.schedule import ScheduleSettings, compute_lr_factor
from bertsmith.use.evaluate_embeddings import evaluate_embeddings

#: Optimizer settings of Bertsmith that the trainer gets, too.
WEIGHT_DECAY, ADAM_EPSILON, MAX_GRAD_NORM = 0.01, 1e-6, 1.0
#: Options that change the results.
SETTING_NAMES = ("epochs", "batch_size", "lr", "max_seqlen", "precision", "max_train_examples")


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
    # The benchmark also runs without these packages.
    import sentence_transformers
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

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


class StoredRuns:
    """The finished runs of a file, which has a line of JSON for each of them."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read a file, which need not exist; ``settings`` are those of all runs."""
        self._path = path
        self._settings = settings
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._runs = [json.loads(line) for line in lines]

    def find(self, name: str, seed: int) -> dict[str, Any] | None:
        """Return the result of a run with the same settings; None if there is none."""
        key = {"name": name, "seed": seed, "settings": self._settings}
        matches = (run for run in self._runs if {k: run[k] for k in key} == key)
        run = next(matches, None)
        return None if run is None else run["result"]

    def append(self, name: str, seed: int, result: dict[str, Any]) -> None:
        """Append the result of a run to the file."""
        if self._path is None:
            return
        run = {"name": name, "seed": seed, "settings": self._settings, "result": result}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")


def check_datasets() -> None:
    """Exit if sentence-transformers cannot train."""
    if find_spec("datasets") is None:
        sys.exit(
            "error: the trainer of sentence-transformers needs the package datasets, which is not "
            "installed; install it, or measure only Bertsmith with --bertsmith-only"
        )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; None for those of the command line."""
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
    parser.add_argument(
        "--bertsmith-only", action="store_true", help="do not run sentence-transformers"
    )
    parser.add_argument("--runs", type=Path, help="file of finished runs, which are not repeated")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all seeds and report the median ratio of the times and the scores."""
    options = parse_options(arguments)
    names = ["bertsmith"] if options.bertsmith_only else ["bertsmith", "sentence-transformers"]
    if not options.bertsmith_only:
        check_datasets()
    table = read_pairs(options.train, options.max_train_examples)
    settings = {name: getattr(options, name) for name in SETTING_NAMES}
    data_hash = hash_files([options.train, options.test])
    key = {
        "model": compute_model_id(options.model),
        "data": data_hash,
        "threads": torch.get_num_threads(),
        **settings,
    }
    runs = StoredRuns(options.runs, key)
    ratios, measurements = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        train = write_pairs(Path(directory) / "train.tsv", table)
        test = write_pairs(Path(directory) / "test.tsv", read_pairs(options.test, None))
        measurements["start model: spearman"] = evaluate_embeddings(options.model, test)["spearman"]
        times: dict[str, list[float]] = {name: [] for name in names}
        for seed in range(options.seeds):
            for name in names:
                result = runs.find(name, seed)
                if result is None:
                    if name == "bertsmith":
                        result = run_bertsmith(options, train, test, seed)
                    else:
                        result = run_sentence_transformers(options, table, test, seed)
                    runs.append(name, seed, result)
                times[name].append(result["seconds"])
                measurements[f"{name}, seed {seed}: spearman"] = result["spearman"]
                measurements[f"{name}, seed {seed}: seconds"] = result["seconds"]
    if not options.bertsmith_only:
        pairs = zip(times["sentence-transformers"], times["bertsmith"], strict=True)
        ratios["speed, compared with sentence-transformers"] = median(a / b for a, b in pairs)
    report("sts", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
