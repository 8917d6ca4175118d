"""Table 5: effect of next-sentence prediction and of bidirectional attention."""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, format_mean_std, make_dot_plot
from bertsmith.lab.stages import TASK_METRICS, StageFactory, get_heldout_metric, get_task_score

#: Tasks: paraphrases, sentence similarity, sentiment and question answering.
TASKS = ("mrpc", "sts-b", "sst-2", "squad")
#: Row labels of the models without pre-training. With structured initialization, the default of
#: the recipe "fast", some attention heads initially attend to neighboring tokens, and some to equal
#: words in the other segment.
_RANDOM = "not pre-trained, random initialization"
_STRUCTURED = "not pre-trained, structured initialization"
#: The rows of the table, with the results of the paper in percent by task.
PAPER: dict[str, dict[str, float]] = {
    _RANDOM: {},
    _STRUCTURED: {},
    "MLM + NSP": {"mrpc": 86.7, "sst-2": 92.7, "squad": 88.5},
    "MLM, no NSP": {"mrpc": 86.5, "sst-2": 92.6, "squad": 87.9},
    "left to right, no NSP": {"mrpc": 77.5, "sst-2": 92.1, "squad": 77.8},
    "left to right + BiLSTM": {"mrpc": 75.7, "sst-2": 91.6, "squad": 84.9},
}


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        masked = factory.create_mlm_only_run(seed)
        causal = factory.create_left_to_right_run(seed)
        # The initialization of the paper's recipe is random by default.
        is_paper = factory.scale.recipe == "paper"
        random_init = {} if is_paper else {"run": {"initialization": "random"}}
        models = {
            _RANDOM: factory.create_initialized_model(
                factory.create_mlm_only_run(seed, **random_init)
            ),
            _STRUCTURED: factory.create_initialized_model(masked),
            "MLM + NSP": factory.create_pretraining_run(seed),
            "MLM, no NSP": masked,
            "left to right, no NSP": causal,
            "left to right + BiLSTM": causal,
        }
        bilstm = {"features": {"layers": "last", "width": factory.scale.width, "frozen": False}}
        for name, model in models.items():
            stages[name, "model", seed] = model
            for task in TASKS:
                overrides = bilstm if name.endswith("BiLSTM") else {}
                stages[name, task, seed] = factory.create_finetuning_run(
                    model, task, seed, **overrides
                )
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    rows = []
    data = {}
    for name, paper in PAPER.items():
        scores = {
            task: [get_task_score(results[name, task, seed], task) for seed in seeds]
            for task in TASKS
        }
        models = [results[name, "model", seed] for seed in seeds]
        is_untrained = name in (_RANDOM, _STRUCTURED)
        losses = [None if is_untrained else get_heldout_metric(model) for model in models]
        data[name] = {**scores, "held-out loss": losses}
        cells = [
            f"{format_mean_std(scores[task])} ({_format_percentage(paper.get(task))})"
            for task in TASKS
        ]
        rows.append([name, format_mean_std(losses), *cells])
    columns = [
        "model",
        "held-out loss of the model's objective",
        *(f"{TASK_METRICS[task].label} (paper, %)" for task in TASKS),
    ]
    title = "Table 5: pre-training tasks, scores on held-out examples"
    panels = []
    for task in TASKS:
        metric = TASK_METRICS[task]
        groups = {name: {task: data[name][task]} for name in PAPER}
        plot = make_dot_plot(groups, metric.metric_label)
        panels.append(Panel(f"{metric.label}, held out", plot))
    return Report([Table(title, columns, rows)], panels, data)


def _format_percentage(value: float | None) -> str:
    return EMPTY_CELL if value is None else f"{value:.1f}"


EXPERIMENT = Experiment(
    name="pretraining-tasks",
    source="section 5.1, table 5",
    question="How much do next-sentence prediction and bidirectional attention help fine-tuning?",
    build_stages=_build_stages,
    build_report=_build_report,
)
