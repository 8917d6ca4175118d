"""Activation functions: masked-LM loss with both forms of GELU, ReLU and ELU."""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, make_line_plot
from bertsmith.lab.stages import StageFactory, get_heldout_metric
from bertsmith.lab.verdict import MIN_LOSS_DIFFERENCE, Claim, subtract

#: Activation settings and their names in tables and plots.
_NAMES = {"gelu": "GELU, erf", "gelu_tanh": "GELU, tanh", "relu": "ReLU", "elu": "ELU"}
#: The reported metrics and their column titles.
_METRICS = {"mlm_loss": "held-out MLM loss, nats", "mlm_accuracy": "MLM accuracy"}


def _build_stages(factory: StageFactory) -> Stages:
    # The recipe's default activation is not overridden, so that other experiments share the run.
    default = "gelu_tanh" if factory.scale.recipe == "paper" else "gelu"
    return {
        (name, seed): factory.create_mlm_only_run(
            seed, model={} if name == default else {"activation": name}
        )
        for seed in range(factory.scale.num_seeds)
        for name in _NAMES
    }


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    data: dict[str, dict[str, list[float | None]]] = {}
    rows = []
    for name, label in _NAMES.items():
        data[label] = {
            metric: [get_heldout_metric(results[name, seed], metric) for seed in seeds]
            for metric in _METRICS
        }
        rows.append([label, *(format_mean_std(values, ".4f") for values in data[label].values())])
    title = "Activation functions, MLM only (the paper uses GELU as OpenAI GPT does, section A.2)"
    table = Table(title, ["activation", *_METRICS.values()], rows)
    curves = {}
    for name, label in _NAMES.items():
        result = results[name, 0]
        curves[label] = result["heldout_curve"] if result else []
    panel = Panel("held-out loss, seed 0", make_line_plot(curves, "steps", "MLM loss, nats"))
    losses = {name: data[label]["mlm_loss"] for name, label in _NAMES.items()}
    claims = [
        Claim(
            f"{_NAMES['gelu']} has a lower loss than {_NAMES[other]}",
            subtract(losses[other], losses["gelu"]),
            MIN_LOSS_DIFFERENCE,
        )
        for other in ("relu", "elu")
    ]
    return Report([table], [panel], data, claims)


EXPERIMENT = Experiment(
    name="activations",
    source="appendix A.2",
    question="Is GELU better than ReLU and ELU, and do its two forms differ?",
    build_stages=_build_stages,
    build_report=_build_report,
)
