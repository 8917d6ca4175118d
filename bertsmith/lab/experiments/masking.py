"""Table 8: what the chosen tokens become: a mask, a random word, or themselves.

It never knows how a stage is made.
"""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.features import bilstm_settings
from bertsmith.lab.report import Panel, Report, Table, dot_plot, format_mean_std
from bertsmith.lab.stages import TASK_METRICS, StageFactory, task_score, validation_metric

#: Shares of mask, same and random, and the paper's figures: MNLI, and NER fine-tuned and by
#: features.
PAPER = {
    (80, 10, 10): (84.2, 95.4, 94.9), (100, 0, 0): (84.3, 94.9, 94.0),
    (80, 0, 20): (84.1, 95.2, 94.6), (80, 20, 0): (84.4, 95.2, 94.7),
    (0, 20, 80): (83.7, 94.8, 94.6), (0, 0, 100): (83.6, 94.9, 94.6),
}  # fmt: skip
#: What is scored: the task, and what the table calls it.
USES = {
    "sst-2": ("sst-2", "SST-2 (MNLI)"),
    "ner": ("conll2003", "NER, fine-tuned"),
    "ner-features": ("conll2003", "NER, features"),
}


def _mixture(mask: int, random: int) -> dict[str, Any]:
    if (mask, random) == (80, 10):
        # The usual run, which others ask for as well.
        return {}
    return {"data": {"mask_token_share": mask / 100, "random_share": random / 100}}


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        for mixture in PAPER:
            mask, _, random = mixture
            model = kit.baseline_run(seed, **_mixture(mask, random))
            stages[mixture, "model", seed] = model
            stages[mixture, "sst-2", seed] = kit.finetuning_run(model, "sst-2", seed)
            stages[mixture, "ner", seed] = kit.finetuning_run(model, "conll2003", seed)
            stages[mixture, "ner-features", seed] = kit.finetuning_run(
                model, "conll2003", seed, **bilstm_settings(kit, "concat-last-four")
            )
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    seeds = range(kit.scale.num_seeds)
    rows, figures = [], {}
    for mixture, paper in PAPER.items():
        scores = {
            use: [task_score(found[mixture, use, seed], task) for seed in seeds]
            for use, (task, _) in USES.items()
        }
        models = [found[mixture, "model", seed] for seed in seeds]
        loss = [validation_metric(own) for own in models]
        figures["/".join(map(str, mixture))] = {**scores, "held-out loss": loss}
        told = (
            f"{format_mean_std(scores[use])} ({own})" for use, own in zip(USES, paper, strict=True)
        )
        shares = (f"{share} %" for share in mixture)
        rows.append([*shares, format_mean_std(loss), *told])
    columns = ["mask", "same", "random", "held-out loss (its own mixture)",
               *(f"{name} (paper, %)" for _, name in USES.values())]  # fmt: skip
    panels = []
    for use, (task, name) in USES.items():
        groups = {mixture: {use: own[use]} for mixture, own in figures.items()}
        title = f"{name}, held out, by mask/same/random"
        panels.append(Panel(title, dot_plot(groups, TASK_METRICS[task][0])))
    title = "Table 8: mixtures of mask, same word and random word"
    return Report([Table(title, columns, rows)], panels, figures)


EXPERIMENT = Experiment(
    name="masking",
    source="appendix C.2, table 8",
    question="Does it matter what a chosen token becomes, to fine-tuning and to features?",
    build_stages=_stages,
    build_report=_report,
)
