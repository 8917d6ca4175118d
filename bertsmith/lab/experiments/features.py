"""Table 7: fine-tuning and a BiLSTM on frozen features, for named entities."""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, make_dot_plot
from bertsmith.lab.stages import StageFactory, get_task_score
from bertsmith.lab.verdict import (
    MIN_SCORE_DIFFERENCE,
    MIN_SMALL_SCORE_DIFFERENCE,
    Claim,
    subtract,
)

#: The rows of the table, with the paper's F1 on the CoNLL-2003 validation set (BERT-base).
PAPER = {
    "fine-tuned": 96.4, "embeddings": 91.0, "second-to-last": 95.6, "last": 94.9,
    "weighted-sum-last-four": 95.9, "concat-last-four": 96.1, "weighted-sum-all": 95.5,
}  # fmt: skip
#: Pairs of rows of which the first one is better in the paper, with the minimum difference.
_CLAIMS = (
    ("fine-tuned", "concat-last-four", MIN_SMALL_SCORE_DIFFERENCE),
    ("concat-last-four", "last", MIN_SCORE_DIFFERENCE),
    ("second-to-last", "last", MIN_SCORE_DIFFERENCE),
    ("last", "embeddings", MIN_SCORE_DIFFERENCE),
)
#: Learning rate of the BiLSTM. It is higher than for fine-tuning, because all its weights are new.
_BILSTM_LR = 1e-3
#: Width of the BiLSTM on a user's model. On other models it is the width of the model.
_EXTERNAL_BILSTM_WIDTH = 256


def build_bilstm_settings(factory: StageFactory, layers: str) -> dict[str, Any]:
    """Return the fine-tuning settings of a BiLSTM on frozen features.

    Args:
        factory: The factory with scale and sources.
        layers: The layers that the features come from, such as "concat-last-four".
    """
    width = _EXTERNAL_BILSTM_WIDTH if factory.sources.model else factory.scale.width
    return {
        "features": {"layers": layers, "width": width},
        "optim": {"lr": _BILSTM_LR},
        "schedule": {"epochs": factory.scale.epochs + 1},
    }


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        model = None if factory.sources.model else factory.create_baseline_run(seed)
        for row in PAPER:
            overrides = {} if row == "fine-tuned" else build_bilstm_settings(factory, row)
            stages[row, seed] = factory.create_finetuning_run(model, "conll2003", seed, **overrides)
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    scores = {
        row: [
            get_task_score(results[row, seed], "conll2003")
            for seed in range(factory.scale.num_seeds)
        ]
        for row in PAPER
    }
    rows = [[row, format_mean_std(scores[row]), f"{paper:.1f}"] for row, paper in PAPER.items()]
    title = (
        "Table 7: entity F1 on the CoNLL-2003 validation set, single sentences (the paper: "
        "with document context)"
    )
    table = Table(title, ["input of the tagger", "F1", "paper, %"], rows)
    plot = make_dot_plot(
        {row: {"F1": values} for row, values in scores.items()}, "entity F1, held out"
    )
    panel = Panel("fine-tuning, and a BiLSTM on frozen features", plot)
    claims = [
        Claim(
            f"{better} is better than {worse}",
            subtract(scores[better], scores[worse]),
            min_difference,
        )
        for better, worse, min_difference in _CLAIMS
    ]
    return Report([table], [panel], dict(scores), claims)


EXPERIMENT = Experiment(
    name="features",
    source="section 5.3, table 7",
    question="How close do features of a frozen encoder come to fine-tuning?",
    build_stages=_build_stages,
    build_report=_build_report,
)
