"""Functions that run the panel's own kinds of stages; fine-tuning uses that of the experiments."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import load, save
from bertsmith.errors import MissingExtraError
from bertsmith.lab.panel.held_out import measure_held_out
from bertsmith.lab.stage_runners import (
    Job,
    StageFunction,
    explain_skip_invalid,
    read_public_examples,
)
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.init.named import apply_initialization
from bertsmith.runtime.device import resolve_device
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import Embedder
from bertsmith.use.minimal_pairs import evaluate_minimal_pairs, to_field_name

UNTRAINED_KIND, HELD_OUT_KIND = "untrained-model", "held-out-text"
MINIMAL_PAIRS_KIND, PROBE_KIND = "minimal-pairs", "frozen-probe"
#: The pooling of each measure of the frozen probe.
_PROBE_POOLINGS = {"cls": "first", "mean": "mean"}
#: Inverse regularization strengths of the frozen probe (``C`` in scikit-learn), chosen by
#: cross-validation.
_PROBE_REGULARIZATIONS = (0.001, 0.01, 0.1)
_PROBE_FOLDS, _PROBE_MAX_ITERATIONS = 5, 500


def initialize_untrained_model(job: Job) -> dict[str, Any]:
    """Write an untrained model with the config, initialization and tokenizer of the stage.

    The output bias does not depend on token frequencies, because the text is not known.
    """
    settings = job.stage.settings
    config = ModelConfig.parse(settings["model"], "the settings of a stage")
    tokenizer = Tokenizer.load(job.stage.files["tokenizer"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = BertForPreTraining(config)
        equal_counts = torch.ones(config.vocab_size, dtype=torch.int64)
        initialization = settings.get("initialization", "random")
        apply_initialization(model, initialization, equal_counts, tokenizer.cls_id)
    save(job.output, model, tokenizer, {})
    return {}


def measure_minimal_pairs(job: Job) -> dict[str, Any]:
    """Compute the accuracy on minimal pairs: the mean over the files, by PLL variant.

    Raises:
        InputError: A pair is invalid, such as one that is too long for the model.
    """
    with explain_skip_invalid("evaluate"):
        results = evaluate_minimal_pairs(
            load(job.model, device=resolve_device("auto", "--device")),
            [path for role, path in job.stage.files.items() if role != "model"],
            max_pairs=job.stage.settings["max_pairs"],
            progress=job.progress,
        )
    means = results.mean_accuracy.items()
    return {
        "metrics": {to_field_name(variant): accuracy for variant, accuracy in means},
        "num_pairs": results.overall.num_pairs,
        "files": [
            {"file": path.name, **accuracy.as_dict()} for path, accuracy in results.files.items()
        ],
    }


def check_scikit_learn() -> None:
    """Check that scikit-learn, which the frozen probe needs, is installed.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("sklearn") is None:
        raise MissingExtraError("scikit-learn", "lab", "the task probe")


def measure_probe(job: Job) -> dict[str, Any]:
    """Train logistic regressions on frozen features, and compute their accuracies.

    The features are the standardized hidden state of [CLS], or the mean over all tokens, in the
    last layer.
    """
    settings, files = job.stage.settings, job.stage.files
    train_texts, train_labels = _read_classification(files["train"], settings["task"])
    dev_texts, dev_labels = _read_classification(files["dev"], settings["task"])
    order = np.random.default_rng(settings["seed"]).permutation(len(train_texts))
    subset = sorted(order[: settings["max_train_examples"]].tolist())
    train_texts, train_labels = [train_texts[index] for index in subset], train_labels[subset]
    embedder = Embedder.load(job.model, device=resolve_device("auto", "--device"))
    accuracies = {}
    for name, pooling in _PROBE_POOLINGS.items():
        train_vectors, dev_vectors = (
            embedder.encode(texts, layer=-1, pooling=pooling, normalize=False)
            for texts in (train_texts, dev_texts)
        )
        predicted = _predict_with_logistic_regression(train_vectors, train_labels, dev_vectors)
        accuracies[name] = float((predicted == dev_labels).mean())
    return {"metrics": accuracies}


def _read_classification(path: Path, task: str) -> tuple[list[str], NDArray[np.str_]]:
    """Return the texts and labels of a file of a public task with single texts."""
    examples = read_public_examples(path, task)
    return [example.texts[0] for example in examples], np.array(
        [str(example.label) for example in examples]
    )


def _predict_with_logistic_regression(
    train_vectors: NDArray[np.float32],
    train_labels: NDArray[np.str_],
    dev_vectors: NDArray[np.float32],
) -> NDArray[np.str_]:
    """Return the predicted labels of the validation vectors."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_PROBE_MAX_ITERATIONS))
    probe = GridSearchCV(
        pipeline, {"logisticregression__C": _PROBE_REGULARIZATIONS}, cv=_PROBE_FOLDS
    )
    predicted: NDArray[np.str_] = probe.fit(train_vectors, train_labels).predict(dev_vectors)
    return predicted


#: The functions of the kinds of stages that only the panel has.
PANEL_STAGE_FUNCTIONS: dict[str, StageFunction] = {
    UNTRAINED_KIND: initialize_untrained_model,
    HELD_OUT_KIND: measure_held_out,
    MINIMAL_PAIRS_KIND: measure_minimal_pairs,
    PROBE_KIND: measure_probe,
}
