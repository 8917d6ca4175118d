"""Loss and predictions for masked words of one model during pre-training."""

from typing import Any

from bertsmith.bundle import load
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import (
    COLORS,
    EMPTY_CELL,
    DrawFunction,
    Panel,
    Report,
    Table,
    make_line_plot,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory
from bertsmith.runtime.device import resolve_device
from bertsmith.use.fill import fill

_PREDICTIONS_KIND = "mask-predictions"
#: Number of predictions per sentence.
_TOP_K = 3
#: Number of evenly spaced snapshots of the run.
_NUM_SNAPSHOTS = 20
#: The snapshots, counted from 1, that predict masked words in addition to the initialized model.
_EVALUATED_SNAPSHOTS = (1, 5, 20)
#: Factor by which the number of steps is multiplied, by scale. A model first learns word
#: frequencies, and only much later which words fit a context.
_STEP_FACTORS = {"small": 10}
#: Color of the steps at which masked words are predicted.
_SNAPSHOT_COLOR = COLORS[1]
#: Number of evaluations per snapshot, enough to show how fast the loss falls at first.
_EVALUATIONS_PER_SNAPSHOT = 4
SENTENCES = (
    "the capital of france is [MASK] .",
    "he was born in [MASK] 1950 .",
    "the king and the [MASK] lived in the castle .",
    "she opened the [MASK] and went out .",
    "the war began in 1914 and [MASK] in 1918 .",
)


def predict_masks(job: Job) -> dict[str, Any]:
    """Return the most probable words for [MASK] in each sentence, with their probabilities."""
    settings = job.stage.settings
    model = load(job.inputs["model"], device=resolve_device("auto", "--device"))
    predictions = {}
    for sentence in settings["sentences"]:
        words = fill(model, sentence, settings["top_k"])[0].predictions
        predictions[sentence] = [[word, round(probability, 4)] for word, probability in words]
    return {"predictions": predictions}


def _create_pretraining_run(factory: StageFactory) -> Stage:
    if factory.scale.name not in _STEP_FACTORS:
        return factory.create_mlm_only_run(0)
    steps = factory.scale.num_steps * _STEP_FACTORS[factory.scale.name]
    snapshot_every = max(1, steps // _NUM_SNAPSHOTS)
    eval_every = max(1, snapshot_every // _EVALUATIONS_PER_SNAPSHOT)
    # Evaluations with the best loss so far save checkpoints too, possibly all of them.
    max_checkpoints = (_EVALUATIONS_PER_SNAPSHOT + 1) * _NUM_SNAPSHOTS
    return factory.create_mlm_only_run(
        0,
        steps=steps,
        run={"eval_every": eval_every},
        checkpoint={"steps": snapshot_every, "keep": max_checkpoints},
    )


def _create_evaluated_models(factory: StageFactory) -> dict[int, Stage]:
    """Return the models that predict masked words, by step. Step 0 is the initialized model."""
    run = _create_pretraining_run(factory)
    snapshots = list(factory.create_snapshots(run).items())
    indices = {round(index * len(snapshots) / _NUM_SNAPSHOTS) for index in _EVALUATED_SNAPSHOTS}
    evaluated = {
        step: model for index, (step, model) in enumerate(snapshots, 1) if index in indices
    }
    return {0: factory.create_initialized_model(run), **evaluated}


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {"run": _create_pretraining_run(factory)}
    settings = {"sentences": list(SENTENCES), "top_k": _TOP_K}
    for step, model in _create_evaluated_models(factory).items():
        stages["predictions", step] = Stage(_PREDICTIONS_KIND, settings, {"model": model})
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    run = results["run"]
    steps = list(_create_evaluated_models(factory))
    rows = []
    for sentence in SENTENCES:
        cells = []
        for step in steps:
            result = results["predictions", step]
            predictions = result["predictions"][sentence] if result else ((EMPTY_CELL, None),)
            cells.append(" · ".join(word for word, _ in predictions))
        rows.append([sentence, *cells])
    columns = ["sentence", *(f"after {step:,} steps" for step in steps)]
    curves: dict[str, Any] = {}
    reference_lines: dict[str, float] = {}
    if run and "heldout_metrics" in run:
        curves = {"training": run["training_curve"], "held out": run["heldout_curve"]}
        reference_lines = {"unigram_entropy": run["heldout_metrics"]["unigram_entropy"]}
    panels = [
        Panel(
            "loss; vertical lines mark the steps of the predictions below",
            _make_loss_plot(curves, reference_lines, steps),
            is_full_width=True,
        ),
        Panel(
            "predictions for [MASK], most probable first",
            _make_prediction_table(rows, steps),
            is_full_width=True,
        ),
    ]
    table = Table("Predictions for [MASK], most probable first", columns, rows)
    return Report([table], panels, {**reference_lines, **curves})


def _make_loss_plot(
    curves: dict[str, Any], reference_lines: dict[str, float], snapshot_steps: list[int]
) -> DrawFunction:
    """Return a function that plots training and held-out loss and marks the steps of snapshots."""
    heldout_curve = {"held out": curves.get("held out", ())}
    draw_heldout = make_line_plot(heldout_curve, "steps", "MLM loss, nats", **reference_lines)

    def draw(axes: Any) -> None:
        if curves:
            axes.plot(
                *zip(*curves["training"], strict=True),
                color="#bbbbbb",
                linewidth=1,
                label="training, per batch",
            )
        draw_heldout(axes)
        for step in snapshot_steps:
            axes.axvline(step, color=_SNAPSHOT_COLOR, linewidth=1, alpha=0.6)
        top = axes.get_ylim()[1]
        for step in snapshot_steps:
            axes.annotate(
                f"{step:,}",
                (step, top),
                (3, -9),
                textcoords="offset points",
                fontsize=8,
                color=_SNAPSHOT_COLOR,
            )

    return draw


def _make_prediction_table(rows: list[list[str]], steps: list[int]) -> DrawFunction:
    """Return a function that draws a table with a sentence and its predictions in each row."""

    def draw(axes: Any) -> None:
        axes.set_axis_off()
        # The sentences take 37 % of the width. The columns of predictions share the other 63 %.
        column_xs = [0.37 + 0.63 * index / len(steps) for index in range(len(steps))]
        row_height = 1 / (len(rows) + 1)
        for x, step in zip(column_xs, steps, strict=True):
            axes.text(
                x,
                1 - row_height / 2,
                f"after {step:,} steps",
                va="center",
                fontsize=10,
                color=_SNAPSHOT_COLOR,
            )
        for row_number, (sentence, *cells) in enumerate(rows, 1):
            y = 1 - (row_number + 0.5) * row_height
            axes.axhline(y + row_height / 2, color="#dddddd", linewidth=0.8)
            axes.text(0, y, sentence, va="center", fontsize=10.5, weight="bold", parse_math=False)
            for x, cell in zip(column_xs, cells, strict=True):
                axes.text(x, y, cell, va="center", fontsize=10, parse_math=False)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, 1)

    return draw


EXPERIMENT = Experiment(
    name="learning",
    source="section 3.1",
    question="What does a model learn, and when, while its loss falls?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={_PREDICTIONS_KIND: predict_masks},
)
