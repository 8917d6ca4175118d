"""Options, results and test data of the checks in gpu_checks.py."""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_training import open_session

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.files import write_json
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.train.pretraining.session import Session

CPU = torch.device("cpu")
#: Vocabulary size of BERT base and large.
VOCAB_SIZE = 30522


class Check:
    """The options and results of a check.

    Attributes:
        store: Token store.
        out: Folder for files.
        data: Folder with the data of GLUE; None if it is not given.
        is_dry: Whether to use tiny sizes.
        device: CUDA unless ``is_dry``.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Create a check without results."""
        self.store: Path = options.store
        self.out: Path = options.out
        self.data: Path | None = options.data
        self.is_dry: bool = options.dry
        self.device = CPU if self.is_dry else torch.device("cuda")
        self._path = self.out / f"{name}.json"
        self._results: dict[str, Any] = {}

    def record(self, name: str, value: Any) -> None:
        """Add a result and write all results."""
        self._results[name] = value
        print(name, value, flush=True)
        write_json(self._path, self._results)

    def make_folder(self, name: str) -> Path:
        """Return an empty folder in ``out``."""
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def list_settings(self, **settings: Any) -> list[str]:
        """Return settings for --set; "__" in a name stands for "."."""
        # With the bias of the first steps, the kernel `padded` would be measured, not `varlen`.
        values: dict[str, Any] = {
            "run__device": str(self.device),
            "schedule__neighbor_bias_steps": 0,
        }
        if not self.is_dry:
            values["model__vocab_size"] = VOCAB_SIZE
        values |= settings
        return [f"{name.replace('__', '.')}={value}" for name, value in values.items()]

    def open_session(self, size: str, **settings: Any) -> Session:
        """Return a session of a size, which is tiny with --dry."""
        if self.is_dry:
            settings |= {"data__batch_size": 4, "data__max_seqlen": 32}
            size = "tiny"
        return open_session(self.store, size, self.list_settings(**settings))

    @property
    def num_steps(self) -> int:
        """Number of measured training steps."""
        return 2 if self.is_dry else 30

    def run_cli(self, *arguments: str, **environment: str) -> float:
        """Run a command of Python and return its seconds; raise an error if it fails."""
        start = time.monotonic()
        command = [sys.executable, *arguments]
        print("$", " ".join(command), flush=True)
        subprocess.run(command, check=True, env={**os.environ, **environment})
        return time.monotonic() - start


def time_function(function: Callable[[], object], machine: Machine, repeats: int = 20) -> float:
    """Return the median seconds of a function, after three calls that are not measured."""
    seconds = []
    for _ in range(repeats + 3):
        device.synchronize(machine)
        start = time.perf_counter()
        function()
        device.synchronize(machine)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def write_random_model(check: Check, size: str) -> Path:
    """Write a random model with the tokenizer of the store; return its directory."""
    tokenizer = Store.open(check.store).load_tokenizer()
    values = {"vocab_size": tokenizer.vocab_size, **get_size_preset(size)}
    torch.manual_seed(0)
    folder = check.make_folder("model")
    bundle.save(folder, BertForPreTraining(ModelConfig.parse(values, size)), tokenizer, {})
    return folder


def write_texts(check: Check, count: int) -> list[str]:
    """Return texts of 3 to 250 random words of the vocabulary."""
    tokenizer = Store.open(check.store).load_tokenizer()
    tokens = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
    words = [token for token in tokens if token.isalpha()]
    generator = random.Random(0)
    lengths = [round(3 * (250 / 3) ** generator.random()) for _ in range(count)]
    return [" ".join(generator.choices(words, k=length)) for length in lengths]


def write_entailment_data(check: Check) -> Path:
    """Write random pairs in the format of RTE, a task of GLUE; return the folder of all tasks."""
    folder = check.make_folder("glue")
    (folder / "RTE").mkdir()
    for name, count in (("train", 40), ("dev", 20)):
        texts = iter(write_texts(check, 2 * count))
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for number, (first, second) in enumerate(zip(texts, texts, strict=True)):
            label = ("entailment", "not_entailment")[number % 2]
            lines.append(f"{number}\t{first}\t{second}\t{label}")
        (folder / "RTE" / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
