"""Table 8: mixtures of [MASK], random tokens and unchanged tokens in masked LM."""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.features import build_bilstm_settings
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, make_dot_plot
from bertsmith.lab.stages import TASK_METRICS, StageFactory, get_heldout_metric, get_task_score
from bertsmith.lab.verdict import Claim, subtract

#: Percentages of [MASK], unchanged token and random token, with the paper's results: accuracy on
#: MNLI, and F1 on named entities with fine-tuning and with a BiLSTM on features.
PAPER = {
    (80, 10, 10): (84.2, 95.4, 94.9), (100, 0, 0): (84.3, 94.9, 94.0),
    (80, 0, 20): (84.1, 95.2, 94.6), (80, 20, 0): (84.4, 95.2, 94.7),
    (0, 20, 80): (83.7, 94.8, 94.6), (0, 0, 100): (83.6, 94.9, 94.6),
}  # fmt: skip
#: The task of each evaluation, its title, and the unit of the paper's results (with the paper's
#: task, if it differs).
_EVALUATIONS = {
    "sst-2": ("sst-2", "SST-2", "MNLI, %"),
    "ner": ("conll2003", "NER, fine-tuned", "%"),
    "ner-features": ("conll2003", "NER, features", "%"),
}


def _build_mixture_settings(mask: int, random: int) -> dict[str, Any]:
    """Return the settings for percentages of [MASK] and random tokens."""
    if (mask, random) == (80, 10):
        # Without overrides, this is the baseline run that other experiments share.
        return {}
    return {"data": {"mask_replace_prob": mask / 100, "random_replace_prob": random / 100}}


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        for mixture in PAPER:
            mask, _, random = mixture
            model = factory.create_baseline_run(seed, **_build_mixture_settings(mask, random))
            stages[mixture, "model", seed] = model
            stages[mixture, "sst-2", seed] = factory.create_finetuning_run(model, "sst-2", seed)
            stages[mixture, "ner", seed] = factory.create_finetuning_run(model, "conll2003", seed)
            stages[mixture, "ner-features", seed] = factory.create_finetuning_run(
                model, "conll2003", seed, **build_bilstm_settings(factory, "concat-last-four")
            )
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    rows = []
    data: dict[str, Any] = {}
    for mixture, paper in PAPER.items():
        scores = {
            evaluation: [get_task_score(results[mixture, evaluation, seed], task) for seed in seeds]
            for evaluation, (task, *_) in _EVALUATIONS.items()
        }
        losses = [get_heldout_metric(results[mixture, "model", seed]) for seed in seeds]
        data["/".join(map(str, mixture))] = {**scores, "held-out loss": losses}
        cells = [
            f"{format_mean_std(scores[evaluation])} ({paper_score})"
            for evaluation, paper_score in zip(_EVALUATIONS, paper, strict=True)
        ]
        percentages = [f"{percentage} %" for percentage in mixture]
        rows.append([*percentages, format_mean_std(losses), *cells])
    columns = [
        "[MASK]",
        "unchanged",
        "random",
        "held-out MLM loss (same mixture)",
        *(f"{name} (paper: {paper_unit})" for _, name, paper_unit in _EVALUATIONS.values()),
    ]
    title = "Table 8: mixtures of [MASK], unchanged tokens and random tokens"
    return Report([Table(title, columns, rows)], _build_panels(data), data, _build_claims(data))


def _build_claims(data: dict[str, Any]) -> list[Claim]:
    """Return the claim that features from 100 % [MASK] are worse.

    The other claim of the paper, that fine-tuning depends less on the mixture, is not tested: the
    range over six mixtures mostly measures the noise of the scores.
    """
    features = "ner-features"
    differences = subtract(data["80/10/10"][features], data["100/0/0"][features])
    return [Claim("NER, features: 80/10/10 is better than 100 % [MASK]", differences)]


def _build_panels(data: dict[str, Any]) -> list[Panel]:
    """Return a plot of each evaluation by mixture."""
    panels = []
    for evaluation, (task, name, _) in _EVALUATIONS.items():
        groups = {mixture: {evaluation: values[evaluation]} for mixture, values in data.items()}
        title = f"{name}, held out, by % [MASK]/unchanged/random"
        panels.append(Panel(title, make_dot_plot(groups, TASK_METRICS[task].metric_label)))
    return panels


EXPERIMENT = Experiment(
    name="masking",
    source="appendix C.2, table 8",
    question="Does the masking mixture matter for fine-tuning and for features?",
    build_stages=_build_stages,
    build_report=_build_report,
)
