"""Labels for many texts of mixed length, beside transformers' pipeline at its best batch size.

Both load the same directory of a classifier, in float32, and get the same texts: documentation of
the installed packages, from one sentence to eight each. The pipeline first tries its batch sizes on
a sample of the texts; then the two take turns over equal parts of all of them, in one process.
Labels that differ are counted, beside the largest difference of a probability. A model that is not
fine-tuned gets an output layer drawn at random, which costs as much as a learnt one. Usage:

    python benchmarks/predict.py --model DIR [--texts 10000] [--sample 300] [--json FILE]
"""

import argparse
import random
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from reporting import report

from bertsmith.bundle import (
    FineTunedBundle,
    HeadConfig,
    load_fine_tuned,
    load_for_fine_tuning,
    save_fine_tuned,
)
from bertsmith.errors import ModelError
from bertsmith.runtime import device
from bertsmith.tasks.families import get_task_settings
from bertsmith.text.docstrings import read_documentation
from bertsmith.use.predict import predict

#: Batch sizes that the pipeline may choose from.
SIZES = (1, 8, 32, 128)
#: Turns that the two take.
TURNS = 5
#: The goal of the project.
GOAL = 2.0


def texts_of(count: int) -> list[str]:
    """Return texts of one to eight sentences, all of these lengths equally often by their log."""
    chance = random.Random(0)
    sentences = (
        sentence
        for module in read_documentation()
        for paragraph in module.paragraphs
        for sentence in paragraph
    )
    found = []
    for _ in range(count):
        text = " ".join(islice(sentences, round(2 ** chance.uniform(0, 3))))
        if not text:
            raise SystemExit(f"the installed packages document themselves in {len(found):,} texts")
        found.append(text)
    # Modules stand beside each other in their order, and each has a style of its own.
    chance.shuffle(found)
    return found


def classifier(path: Path, folder: Path) -> FineTunedBundle:
    """Return the model at ``path``, or one of two labels that is made of it in ``folder``."""
    try:
        return load_fine_tuned(path)
    except ModelError:
        torch.manual_seed(0)
        head = HeadConfig("single", ("no", "yes"))
        start = load_for_fine_tuning(path, head)
        save_fine_tuned(folder / "model", start.model, start.tokenizer, head, {"task": "classify"})
        return load_fine_tuned(folder / "model")


def pipeline(bundle: FineTunedBundle) -> Any:
    """Return the peer, over the same directory."""
    return transformers.pipeline(
        "text-classification", model=str(bundle.path), dtype=torch.float32, device=-1
    )


def asked(peer: Any, texts: list[str], size: int, length: int) -> list[dict[str, Any]]:
    """Return the peer's answers."""
    found: list[dict[str, Any]] = peer(texts, batch_size=size, truncation=True, max_length=length)
    return found


def best_size(peer: Any, sample: list[str], length: int) -> tuple[int, dict[int, float]]:
    """Return the batch size with which the peer is fastest, and the seconds of each."""
    asked(peer, sample[:16], 8, length)
    seconds = {}
    for size in SIZES:
        began = time.perf_counter()
        asked(peer, sample, size, length)
        seconds[size] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__), seconds


def compared(
    bundle: FineTunedBundle, peer: Any, texts: list[str], size: int, length: int
) -> tuple[dict[str, list[float]], int, float]:
    """Return the seconds of each turn, labels that differ, and the largest gap of probabilities."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    differ, gap = 0, 0.0
    predict(bundle, texts[:16])
    for turn in range(TURNS):
        part = texts[turn * len(texts) // TURNS : (turn + 1) * len(texts) // TURNS]
        answers: dict[str, list[Any]] = {}
        # Who begins changes from turn to turn: a machine that slows down favours neither.
        for name in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
            began = time.perf_counter()
            if name == "ours":
                answers[name] = predict(bundle, part)
            else:
                answers[name] = asked(peer, part, size, length)
            seconds[name].append(time.perf_counter() - began)
        for own, other in zip(answers["ours"], answers["theirs"], strict=True):
            differ += own.labels[0][0] != other["label"]
            gap = max(gap, abs(dict(own.labels)[other["label"]] - other["score"]))
    return seconds, differ, gap


def main() -> None:
    """Measure, compare with the goal, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = classifier(options.model, Path(folder))
        peer = pipeline(bundle)
        # As our own task cuts off a text that is too long.
        length = get_task_settings(bundle).length or bundle.config.max_positions
        texts = texts_of(options.texts)
        size, tried = best_size(peer, texts[: options.sample], length)
        seconds, differ, gap = compared(bundle, peer, texts, size, length)
    lengths = [min(len(ids) + 2, length) for ids in bundle.tokenizer.encode_batch(texts)]
    products = sum(one * bundle.config.macs_per_token(one) for one in lengths)
    machine = device.Machine(torch.device("cpu"), "fp32", "padded")
    total = {name: sum(own) for name, own in seconds.items()}
    turns = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
    ratios = {
        "texts a second, ours / theirs": total["theirs"] / total["ours"],
        "median of the turns": median(turns),
        "least of the turns": min(turns),
        "of the goal of 2": total["theirs"] / total["ours"] / GOAL,
        "ours of the machine's matrix product": products
        / total["ours"]
        / device.measure_peak_macs(machine, seconds=2.0),
    }
    figures = {
        "texts": len(texts), "tokens": sum(lengths), "shortest": min(lengths),
        "longest": max(lengths), "threads": torch.get_num_threads(),
        "seconds, ours": total["ours"], "seconds, theirs": total["theirs"],
        "texts a second, ours": len(texts) / total["ours"],
        "texts a second, theirs": len(texts) / total["theirs"],
        "their batch size": size,
        **{f"their seconds for the sample at {one}": value for one, value in tried.items()},
        "labels that differ": differ, "largest difference of a probability": gap,
    }  # fmt: skip
    report("predict", ratios, figures, options.json)


if __name__ == "__main__":
    main()
