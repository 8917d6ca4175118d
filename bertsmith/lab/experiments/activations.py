"""GELU in both forms, ReLU and ELU: masked-LM loss curves.

It never knows how a stage is made.
"""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, line_plot
from bertsmith.lab.stages import StageFactory, validation_metric

NAMES = {"gelu": "GELU, erf", "gelu_tanh": "GELU, tanh", "relu": "ReLU", "elu": "ELU"}
_TOLD = {"masked_lm": "held-out masked-LM loss, nats", "masked_accuracy": "words right"}


def _stages(kit: StageFactory) -> Stages:
    # The recipe's own form is a run that others ask for as well.
    usual = "gelu_tanh" if kit.scale.recipe == "paper" else "gelu"
    return {
        (name, seed): kit.mlm_only_run(seed, model={} if name == usual else {"activation": name})
        for seed in range(kit.scale.num_seeds)
        for name in NAMES
    }


def _report(kit: StageFactory, found: Results) -> Report:
    seeds = range(kit.scale.num_seeds)
    told = {name: {what: [validation_metric(found[name, seed], what) for seed in seeds] for what in _TOLD}
            for name in NAMES}  # fmt: skip
    rows = [[NAMES[name], *(format_mean_std(values, ".4f") for values in own.values())]
            for name, own in told.items()]  # fmt: skip
    table = Table("Activations, no next sentence (the paper: GELU, after OpenAI GPT, section A.2)",
                  ["activation", *_TOLD.values()], rows)  # fmt: skip
    curves = {}
    for name, words in NAMES.items():
        own = found[name, 0]
        curves[words] = own["heldout_curve"] if own else []
    panel = Panel("held out, seed 0", line_plot(curves, "steps", "masked-LM loss, nats"))
    return Report([table], [panel], {NAMES[name]: own for name, own in told.items()})


EXPERIMENT = Experiment(
    name="activations",
    source="appendix A.2",
    question="Is GELU better than ReLU and ELU, and do its two forms differ?",
    build_stages=_stages,
    build_report=_report,
)
