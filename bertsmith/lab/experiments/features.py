"""Table 7: fine-tuning against features of a frozen encoder, for named entities.

It never knows how a stage is made.
"""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, dot_plot, format_mean_std
from bertsmith.lab.stages import StageFactory, task_score

#: Each row, and the paper's F1 on the dev set of CoNLL-2003 (BERT-base).
PAPER = {
    "fine-tuned": 96.4, "embeddings": 91.0, "second-to-last": 95.6, "last": 94.9,
    "weighted-sum-last-four": 95.9, "concat-last-four": 96.1, "weighted-sum-all": 95.5,
}  # fmt: skip
#: A BiLSTM begins with random weights: a higher rate, and more epochs than fine-tuning has.
RATE = 1e-3
#: The BiLSTM's width on a model that was given; on those made here it has the model's own.
_GIVEN = 256


def bilstm_settings(kit: StageFactory, layers: str) -> dict[str, Any]:
    """Return the settings of the feature-based way with these layers."""
    return {
        "features": {"layers": layers, "width": _GIVEN if kit.sources.model else kit.scale.width},
        "optim": {"lr": RATE},
        "schedule": {"epochs": kit.scale.epochs + 1},
    }


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        model = None if kit.sources.model else kit.baseline_run(seed)
        for row in PAPER:
            more = {} if row == "fine-tuned" else bilstm_settings(kit, row)
            stages[row, seed] = kit.finetuning_run(model, "conll2003", seed, **more)
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    scores = {
        row: [task_score(found[row, seed], "conll2003") for seed in range(kit.scale.num_seeds)]
        for row in PAPER
    }
    rows = [[row, format_mean_std(scores[row]), f"{paper:.1f}"] for row, paper in PAPER.items()]
    table = Table("Table 7: entity F1, CoNLL-2003 dev, sentences alone (the paper: in documents)",
                  ["what the tagger reads", "F1", "the paper's, %"], rows)  # fmt: skip
    drawn = dot_plot({row: {"F1": own} for row, own in scores.items()}, "entity F1, held out")
    return Report([table], [Panel("fine-tuned and frozen", drawn)], dict(scores))


EXPERIMENT = Experiment(
    name="features",
    source="section 5.3, table 7",
    question="How near do features of a frozen encoder come to fine-tuning it?",
    build_stages=_stages,
    build_report=_report,
)
