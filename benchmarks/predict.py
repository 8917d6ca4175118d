"""Compare the speed of text classification with transformers' pipeline.

Both programs load the same model directory in float32 and classify the same texts of one to eight
sentences, which are taken from the documentation of the installed packages. The pipeline uses the
batch size that is fastest on a sample. The two programs alternate over equal parts of the texts in
one process. The benchmark also reports the number of different labels and the largest difference of
probabilities. A model without a classifier gets a random one.

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

#: Batch sizes to try for the pipeline.
BATCH_SIZES = (1, 8, 32, 128)
#: Number of parts of the texts; both programs process each part once.
NUM_PARTS = 5
#: Target for the speed ratio.
TARGET_RATIO = 2.0


def make_texts(count: int) -> list[str]:
    """Return ``count`` texts of one to eight sentences; their number is log-uniform."""
    generator = random.Random(0)
    sentences = (
        sentence
        for module in read_documentation()
        for paragraph in module.paragraphs
        for sentence in paragraph
    )
    texts: list[str] = []
    for _ in range(count):
        text = " ".join(islice(sentences, round(2 ** generator.uniform(0, 3))))
        if not text:
            raise SystemExit(
                "too few texts in the documentation of the installed packages: "
                f"{len(texts):,}; use a smaller --texts"
            )
        texts.append(text)
    # Neighboring texts come from the same module and are similar.
    generator.shuffle(texts)
    return texts


def load_classifier(path: Path, directory: Path) -> FineTunedBundle:
    """Load a classifier, or create a random classifier of two labels from a pre-trained model."""
    try:
        return load_fine_tuned(path)
    except ModelError:
        torch.manual_seed(0)
        head = HeadConfig("single", ("no", "yes"))
        start = load_for_fine_tuning(path, head)
        save_fine_tuned(
            directory / "model", start.model, start.tokenizer, head, {"task": "classify"}
        )
        return load_fine_tuned(directory / "model")


def make_pipeline(bundle: FineTunedBundle) -> Any:
    """Return transformers' pipeline for the same model directory."""
    return transformers.pipeline(
        "text-classification", model=str(bundle.path), dtype=torch.float32, device=-1
    )


def run_pipeline(
    pipeline: Any, texts: list[str], batch_size: int, max_length: int
) -> list[dict[str, Any]]:
    """Return the predictions of the pipeline."""
    predictions: list[dict[str, Any]] = pipeline(
        texts, batch_size=batch_size, truncation=True, max_length=max_length
    )
    return predictions


def find_best_batch_size(
    pipeline: Any, sample: list[str], max_length: int
) -> tuple[int, dict[int, float]]:
    """Return the fastest batch size of the pipeline, and the seconds by batch size."""
    run_pipeline(pipeline, sample[:16], 8, max_length)
    seconds = {}
    for batch_size in BATCH_SIZES:
        start = time.perf_counter()
        run_pipeline(pipeline, sample, batch_size, max_length)
        seconds[batch_size] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__), seconds


def compare(
    bundle: FineTunedBundle, pipeline: Any, texts: list[str], batch_size: int, max_length: int
) -> tuple[dict[str, list[float]], int, float]:
    """Classify all texts with both programs.

    Returns:
        Seconds of each part by program, the number of different labels, and the largest difference
        of probabilities.
    """
    seconds: dict[str, list[float]] = {"bertsmith": [], "transformers": []}
    num_different, max_difference = 0, 0.0
    predict(bundle, texts[:16])
    for part in range(NUM_PARTS):
        part_texts = texts[part * len(texts) // NUM_PARTS : (part + 1) * len(texts) // NUM_PARTS]
        predictions: dict[str, list[Any]] = {}
        # The programs take turns to go first, because the CPU may slow down during a part.
        for name in (
            ("bertsmith", "transformers") if part % 2 == 0 else ("transformers", "bertsmith")
        ):
            start = time.perf_counter()
            if name == "bertsmith":
                predictions[name] = predict(bundle, part_texts)
            else:
                predictions[name] = run_pipeline(pipeline, part_texts, batch_size, max_length)
            seconds[name].append(time.perf_counter() - start)
        for prediction, expected in zip(
            predictions["bertsmith"], predictions["transformers"], strict=True
        ):
            num_different += prediction.labels[0][0] != expected["label"]
            difference = abs(dict(prediction.labels)[expected["label"]] - expected["score"])
            max_difference = max(max_difference, difference)
    return seconds, num_different, max_difference


def main() -> None:
    """Run the comparison and report its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = load_classifier(options.model, Path(directory))
        pipeline = make_pipeline(bundle)
        # The length at which Bertsmith truncates texts.
        max_length = get_task_settings(bundle).max_seqlen or bundle.config.max_positions
        texts = make_texts(options.texts)
        batch_size, sample_seconds = find_best_batch_size(
            pipeline, texts[: options.sample], max_length
        )
        seconds, num_different, max_difference = compare(
            bundle, pipeline, texts, batch_size, max_length
        )
    lengths = [min(len(ids) + 2, max_length) for ids in bundle.tokenizer.encode_batch(texts)]
    macs = sum(length * bundle.config.macs_per_token(length) for length in lengths)
    machine = device.Machine(torch.device("cpu"), "fp32", "padded")
    totals = {name: sum(times) for name, times in seconds.items()}
    part_ratios = [
        pipeline_time / bertsmith_time
        for bertsmith_time, pipeline_time in zip(*seconds.values(), strict=True)
    ]
    ratios = {
        "texts per second, Bertsmith / transformers": totals["transformers"] / totals["bertsmith"],
        "median of the parts": median(part_ratios),
        "minimum of the parts": min(part_ratios),
        "speed ratio / target ratio": totals["transformers"] / totals["bertsmith"] / TARGET_RATIO,
        "MFU of Bertsmith": macs
        / totals["bertsmith"]
        / device.measure_peak_macs_per_second(machine, seconds=2.0),
    }
    measurements = {
        "texts": len(texts), "tokens": sum(lengths), "shortest": min(lengths),
        "longest": max(lengths), "threads": torch.get_num_threads(),
        "seconds, Bertsmith": totals["bertsmith"], "seconds, transformers": totals["transformers"],
        "texts per second, Bertsmith": len(texts) / totals["bertsmith"],
        "texts per second, transformers": len(texts) / totals["transformers"],
        "batch size of transformers": batch_size,
        **{f"seconds of transformers for the sample at batch size {size}": value
           for size, value in sample_seconds.items()},
        "different labels": num_different,
        "largest difference of a probability": max_difference,
    }  # fmt: skip
    report("predict", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
