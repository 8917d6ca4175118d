"""What a linear probe reads off each layer of a model about a task of one text and two labels.

The encoder is not trained: logistic regression on standardized vectors of its layers, the mean of
the tokens and [CLS], its penalty chosen by five folds of the training part; scored on the dev part.

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

PENALTIES = (0.001, 0.01, 0.1)


def read(path: Path, count: int | None = None) -> tuple[list[str], np.ndarray]:
    """Return the texts and labels of a file of GLUE's form."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[:count]
    return [row["sentence"] for row in rows], np.array([int(row["label"]) for row in rows])


def main() -> None:
    """Probe each model, layer and pooling; print the dev part's accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts, labels = read(options.data / "train.tsv", options.examples)
    others, wanted = read(options.data / "dev.tsv")
    found = {"larger class": max(wanted.mean(), 1 - wanted.mean())}
    for number, place in enumerate(options.models):
        embedder = Embedder.load(place)
        layers = range(-embedder.config.layers - 1, 0)
        for pooling in ("mean", "first"):
            for layer in layers:
                vectors, unseen = (
                    embedder.encode(own, layer=layer, pooling=pooling, normalize=False)
                    for own in (texts, others)
                )
                probe = make_pipeline(
                    StandardScaler(), LogisticRegressionCV(Cs=PENALTIES, cv=5, max_iter=500)
                )
                score = probe.fit(vectors, labels).score(unseen, wanted)
                found[f"model {number}, {pooling}, layer {layer}"] = float(score)
    report("probe", {}, found, options.json)


if __name__ == "__main__":
    main()
