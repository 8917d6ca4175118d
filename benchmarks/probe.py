"""Train linear probes on each layer of frozen models, for a binary classification task.

A probe is a logistic regression on the standardized vectors of a layer. A vector is the mean over
the tokens of a text or the hidden state of its [CLS] token. Five-fold cross-validation selects the
regularization strength. Scores are accuracies on the dev set.

    python benchmarks/probe.py --data DATA/glue/SST-2 --models MODEL... [--examples N] [--json FILE]
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from reporting import report
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bertsmith.use.embed import Embedder

#: Inverse regularization strengths (``C`` in scikit-learn).
REGULARIZATIONS = (0.001, 0.01, 0.1)


def read_examples(path: Path, limit: int | None = None) -> tuple[list[str], np.ndarray]:
    """Return the first ``limit`` texts and labels of a file in GLUE's format."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    return [row["sentence"] for row in rows], np.array([int(row["label"]) for row in rows])


def main() -> None:
    """Train a probe for each model, pooling and layer, and report the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    train_texts, train_labels = read_examples(options.data / "train.tsv", options.examples)
    dev_texts, dev_labels = read_examples(options.data / "dev.tsv")
    accuracies = {"majority class": max(dev_labels.mean(), 1 - dev_labels.mean())}
    for number, path in enumerate(options.models):
        embedder = Embedder.load(path)
        layers = range(-embedder.config.layers - 1, 0)
        for pooling in ("mean", "first"):
            for layer in layers:
                train_vectors, dev_vectors = (
                    embedder.encode(texts, layer=layer, pooling=pooling, normalize=False)
                    for texts in (train_texts, dev_texts)
                )
                probe = make_pipeline(
                    StandardScaler(), LogisticRegressionCV(Cs=REGULARIZATIONS, cv=5, max_iter=500)
                )
                accuracy = probe.fit(train_vectors, train_labels).score(dev_vectors, dev_labels)
                accuracies[f"model {number}, {pooling}, layer {layer}"] = float(accuracy)
    report("probe", {}, accuracies, options.json)


if __name__ == "__main__":
    main()
