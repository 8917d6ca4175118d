"""Record numerical results of tiny models, to check that a code change does not alter them.

The script pre-trains, fine-tunes and exports tiny models on generated text with Bertsmith's
commands. It records the losses of every step, the embeddings and the ONNX outputs:

    PYTHONPATH=OLD_CHECKOUT python benchmarks/fingerprint.py --store STORE --json before.json
    PYTHONPATH=. python benchmarks/fingerprint.py --store STORE --compare before.json

PYTHONPATH selects the commit whose commands run. Commits back to 0e90cdf, the last one before
settings and metrics were renamed, work. The first run creates STORE, a token store with its
vocabulary; the second run trains on the same store, so a change of the vocabulary learner or of
the validation split does not affect the comparison.

Everything runs in fp32 on one CPU thread. The results depend on the CPU and the PyTorch version, so
compare only results from the same machine.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

NAMES = ["Anna", "Omar", "Lena", "Igor", "Mina", "Hugo"]
PLACES = ["Oslo", "Paris", "Seoul", "Lima", "Cairo"]
OBJECTS = ["a lamp", "the old map", "two apples", "a green coat", "the letter", "some water"]
VERBS = ["carried", "found", "sold", "painted", "hid", "forgot"]
#: The recorded fields of metrics.jsonl. ``masked_lm`` and ``next_sentence`` are the former names of
#: ``mlm_loss`` and ``nsp_loss``.
RECORDED_METRICS = ("step", "lr", "grad_norm", "loss", "mlm_loss", "nsp_loss", "masked_lm",
                    "next_sentence")  # fmt: skip
FP32 = ["--set", "run.precision=fp32", "--set", "run.log_every=1", "--set", "run.device=cpu"]


def run_bertsmith(work: Path, *arguments: object) -> None:
    """Run a Bertsmith command in ``work``.

    Raises:
        RuntimeError: If the command fails.
    """
    command = [sys.executable, "-m", "bertsmith", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


def write_data(work: Path) -> None:
    """Write a corpus and a labeled file for each task family; each call writes the same files."""
    generator = random.Random(0)

    def draw_sentence() -> tuple[str, str, str]:
        name, place = generator.choice(NAMES), generator.choice(PLACES)
        verb, noun = generator.choice(VERBS), generator.choice(OBJECTS)
        return f"{name} {verb} {noun} in {place} .", name, place

    documents = [[draw_sentence()[0] for _ in range(12)] for _ in range(240)]
    lines = [json.dumps({"text": "\n".join(document)}) for document in documents]
    (work / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    rows = ["text,label"]
    tags: list[str] = []
    paragraphs = []
    endings = ["prompt,first,second,right"]
    for number in range(96):
        text, name, place = draw_sentence()
        rows.append(f"{text},{'north' if place in ('Oslo', 'Seoul') else 'south'}")
        entities = {name: "B-PER", place: "B-LOC"}
        tags += [f"{word} {entities.get(word, 'O')}" for word in text.split()] + [""]
        question = {
            "id": str(number),
            "question": f"Where was {name} ?",
            "answers": [{"text": place, "answer_start": text.index(place)}],
        }
        paragraphs.append({"context": text, "qas": [question]})
        wrong_place = generator.choice([option for option in PLACES if option != place])
        options = [place, wrong_place] if number % 2 else [wrong_place, place]
        endings.append(f"{text},{options[0]},{options[1]},{0 if number % 2 else 1}")
    (work / "classify.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (work / "tag.conll").write_text("\n".join(tags) + "\n", encoding="utf-8")
    (work / "choose.csv").write_text("\n".join(endings) + "\n", encoding="utf-8")
    squad = {"version": "1.1", "data": [{"title": "places", "paragraphs": paragraphs}]}
    (work / "answer.json").write_text(json.dumps(squad), encoding="utf-8")


def read_train_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """Return the losses, gradient norm and learning rate of each training step."""
    lines = (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {name: record[name] for name in RECORDED_METRICS if name in record}
        for record in records
        if record["kind"] == "train"
    ]


def digest_array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the shape, the SHA-256 and the first four values of an array."""
    return {
        "shape": list(array.shape),
        "sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
        "first": [repr(float(value)) for value in array.ravel()[:4]],
    }


def digest_onnx_outputs(directory: Path) -> dict[str, Any]:
    """Run each ONNX graph in a directory on the same token ids; return digests of the outputs."""
    digests = {}
    for path in sorted(directory.rglob("*.onnx")):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        ids = np.arange(5, 21, dtype=np.int64).reshape(2, 8)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        inputs = {
            item.name: values.get(item.name, np.zeros_like(ids)) for item in session.get_inputs()
        }
        outputs = session.run(None, inputs)
        for item, array in zip(session.get_outputs(), outputs, strict=True):
            digests[f"{path.name} {item.name}"] = digest_array(array)
    return digests


def prepare_store(work: Path, store: Path) -> None:
    """Learn a vocabulary from the corpus in ``work`` and write a token store."""
    run_bertsmith(work, "vocab", "corpus.jsonl", "--size", 200, "--out", "vocab")
    run_bertsmith(work, "prepare", "corpus.jsonl", "--tokenizer", "vocab", "--held-out", 0.05,
                  "--out", store)  # fmt: skip


def compute_fingerprint(work: Path, store: Path) -> dict[str, Any]:
    """Train and use tiny models in ``work``, and return their results by name.

    Args:
        work: An empty directory.
        store: The token store to pre-train on; created if it does not exist.
    """
    write_data(work)
    if not store.exists():
        prepare_store(work, store)
    results: dict[str, Any] = {}
    # Old commits only know the name data.batch; newer ones accept it with a warning.
    shape = ["--set", "model.layers=2", "--set", "model.width=32", "--set", "model.heads=2",
             "--set", "model.feed_forward=64", "--set", "data.batch=16"]  # fmt: skip
    for recipe in ("fast", "paper"):
        out = f"run-{recipe}"
        run_bertsmith(work, "pretrain", "--data", store, "--recipe", recipe, "--steps", 10,
                      "--out", out, *shape, *FP32)  # fmt: skip
        results[f"pretrain {recipe}"] = read_train_metrics(work / out)
    families: dict[str, list[object]] = {
        "classify": ["--data", "classify.csv", "--text", "text", "--label", "label"],
        "answer": ["--data", "answer.json"],
        "choose": ["--data", "choose.csv", "--text", "prompt", "--endings", "first,second",
                   "--label", "right"],
        "tag": ["--data", "tag.conll"],
    }  # fmt: skip
    for family, options in families.items():
        run_bertsmith(work, "finetune", family, "--model", "run-fast", *options, "--out", family,
            "--set", "schedule.epochs=4", *FP32)  # fmt: skip
        results[f"finetune {family}"] = read_train_metrics(work / family)
    sentences = [
        json.loads(line)["text"].splitlines()[0]
        for line in (work / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    ]
    (work / "sentences.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    for pooling in ("mean", "first"):
        run_bertsmith(work, "embed", "run-fast", "sentences.txt", "--pooling", pooling,
                      "--device", "cpu", "--out", f"{pooling}.npy")  # fmt: skip
        results[f"embed {pooling}"] = digest_array(np.load(work / f"{pooling}.npy"))
    for model in ("run-fast", "classify"):
        run_bertsmith(work, "export", model, "--to", "onnx", "--out", f"{model}-onnx")
        results[f"onnx {model}"] = digest_onnx_outputs(work / f"{model}-onnx")
    return results


def upgrade_names(results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the current names of the training metrics."""
    # Commits that only record results may not have this module yet.
    from bertsmith.compatibility import upgrade_metrics

    return {
        name: [upgrade_metrics(record) for record in result] if isinstance(result, list) else result
        for name, result in results.items()
    }


def main() -> None:
    """Compute the results, and write them or compare them with those of another commit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, help="token store; created if it does not exist")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--compare", type=Path, help="a file written by --json earlier")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        store = options.store.resolve() if options.store else work / "store"
        results = compute_fingerprint(work, store)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.compare is None:
        print(f"{len(results)} results: {', '.join(results)}")
        return
    results = upgrade_names(results)
    expected = upgrade_names(json.loads(options.compare.read_text(encoding="utf-8")))
    has_changed = False
    for name in sorted(results.keys() | expected.keys()):
        is_identical = results.get(name) == expected.get(name)
        print(f"{'identical' if is_identical else 'DIFFERENT'}  {name}")
        has_changed = has_changed or not is_identical
    sys.exit(has_changed)


if __name__ == "__main__":
    main()
