"""Speed of pseudo-log-likelihoods for a list of sentences, compared with one sentence at a time.

Three programs score the same sentences with the same model, alternating over equal parts in one
process: `score` with the list, `score` once per sentence (its masked copies share a batch), and
transformers' BertForMaskedLM with one forward pass per token, as a simple implementation does. The
benchmark also reports the cost of computing both variants together, and the largest differences of
the log-probabilities.

Without --model it uses a random model whose vocabulary is learned from the documentation of the
installed packages; the speed does not depend on the weights. With --commands N, the command
`bertsmith score` is also timed for N single sentences, including the start of the program.

    python benchmarks/score.py --pairs FOLDER [--model DIR | --size tiny --vocab 8192]
        [--sentences 1000] [--commands 5] [--device cpu] [--json FILE]
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reporting import report
from transformers import BertForMaskedLM

from bertsmith.bundle import PretrainedBundle, load, save
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.progress import NullProgress
from bertsmith.tasks.tables import get_text, read_rows
from bertsmith.text.docstrings import read_documentation
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.use.minimal_pairs import SENTENCE_COLUMNS, find_pair_files
from bertsmith.use.pseudo_log_likelihood import PLL_VARIANTS, compute_log_probabilities
from bertsmith.use.score import score

#: Number of parts of the sentences; every program processes each part once.
NUM_PARTS = 5
#: Target for the speed of a list compared with one call per sentence.
GOAL = 20.0

LogProbabilities = list[tuple[float, ...]]


def read_sentences(folder: Path, count: int) -> list[str]:
    """Return sentences drawn at random from all minimal pairs of a folder."""
    sentences = [
        get_text(row, column)
        for file in find_pair_files([folder])
        for row in read_rows(file)
        for column in SENTENCE_COLUMNS
    ]
    return random.Random(0).sample(sentences, count)


def save_random_model(directory: Path, size: str, vocab_size: int) -> Path:
    """Save a random model of a named size and return its path."""
    paragraphs = (
        " ".join(paragraph) for module in read_documentation() for paragraph in module.paragraphs
    )
    tokenizer = train_wordpiece(paragraphs, vocab_size)
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {"vocab_size": tokenizer.vocab_size, **get_size_preset(size)}
    )
    save(directory / "model", BertForPreTraining(config), tokenizer, {})
    return directory / "model"


@torch.inference_mode()
def score_with_transformers(
    model: Any, bundle: PretrainedBundle, sentence: str
) -> tuple[float, ...]:
    """Return each token's log-probability, with one forward pass of transformers per token."""
    tokenizer = bundle.tokenizer
    ids = [tokenizer.cls_id, *tokenizer.encode(sentence), tokenizer.sep_id]
    values = []
    for position in range(1, len(ids) - 1):
        masked_ids = torch.tensor([ids], device=model.device)
        masked_ids[0, position] = tokenizer.mask_id
        logits = model(input_ids=masked_ids).logits[0, position, : tokenizer.vocab_size]
        values.append(float(logits.log_softmax(-1)[ids[position]]))
    return tuple(values)


def time_commands(model: Path, sentences: list[str]) -> float:
    """Return the median seconds of the command `bertsmith score` for a single sentence."""
    seconds = []
    for sentence in sentences:
        command = [sys.executable, "-m", "bertsmith", "score", str(model), "--text", sentence]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure(
    programs: dict[str, Callable[[list[str]], LogProbabilities]], sentences: list[str]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run all programs over the parts of the sentences.

    Returns:
        Seconds of each part, and the largest difference of a log-probability to the first program.
    """
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    differences = dict.fromkeys(names[1:], 0.0)
    for program in programs.values():
        program(sentences[:16])
    for part in range(NUM_PARTS):
        part_sentences = sentences[part::NUM_PARTS]
        results = {}
        # The order alternates, so that throttling affects all programs alike.
        for name in names if part % 2 == 0 else names[::-1]:
            start = time.perf_counter()
            results[name] = programs[name](part_sentences)
            seconds[name].append(time.perf_counter() - start)
        for name in differences:
            pairs = zip(results[names[0]], results[name], strict=True)
            difference = max(
                abs(value - expected)
                for values, expected_values in pairs
                for value, expected in zip(values, expected_values, strict=True)
            )
            differences[name] = max(differences[name], difference)
    return seconds, differences


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path, required=True, help="folder of minimal pairs")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--commands", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sentences = read_sentences(options.pairs, options.sentences)
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or save_random_model(Path(directory), options.size, options.vocab)
        bundle = load(path, device=options.device)
        if options.commands:
            command_seconds = time_commands(bundle.path, sentences[: options.commands])
        hf_model = BertForMaskedLM.from_pretrained(bundle.path).eval().to(options.device)

    def score_both_variants(texts: list[str]) -> LogProbabilities:
        sequences = bundle.tokenizer.encode_batch(texts)
        results = compute_log_probabilities(bundle, sequences, PLL_VARIANTS, NullProgress())
        return [tuple(values) for values in results["original"]]

    programs: dict[str, Callable[[list[str]], LogProbabilities]] = {
        "list": lambda texts: [line.log_probabilities for line in score(bundle, texts)],
        "one call per sentence": lambda texts: [
            score(bundle, text).log_probabilities for text in texts
        ],
        "transformers, one forward pass per token": lambda texts: [
            score_with_transformers(hf_model, bundle, text) for text in texts
        ],
        "list, both variants": score_both_variants,
    }
    seconds, differences = measure(programs, sentences)
    ratios = {
        f"list / {name}": median(
            other_time / list_time
            for list_time, other_time in zip(seconds["list"], times, strict=True)
        )
        for name, times in seconds.items()
        if name != "list"
    }
    if options.commands:
        ratios["list / one command per sentence"] = (
            command_seconds * len(sentences) / sum(seconds["list"])
        )
    ratios[f"of the goal of {GOAL:g}"] = ratios["list / one call per sentence"] / GOAL
    lengths = [len(ids) for ids in bundle.tokenizer.encode_batch(sentences)]
    figures = {
        "sentences": len(sentences),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "threads": torch.get_num_threads(),
        "vocabulary": bundle.config.vocab_size,
        **{
            f"milliseconds per sentence, {name}": 1e3 * sum(times) / len(sentences)
            for name, times in seconds.items()
        },
        **{f"largest difference, {name}": value for name, value in differences.items()},
    }
    report("score", ratios, figures, options.json)


if __name__ == "__main__":
    main()
