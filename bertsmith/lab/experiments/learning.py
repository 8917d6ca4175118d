"""One model's loss falling past the unigram entropy, and the words it fills in on the way.

It never knows how a run is made.
"""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import COLORS, EMPTY_CELL, DrawFunction, Panel, Report, Table, line_plot
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory
from bertsmith.use.fill import fill

_FILLED = "filled"
#: Words that a table shows of each moment.
_TOP = 3
#: The moments of a run that are asked beside its beginning, in twentieths.
_MOMENTS, _TWENTIETHS = (1, 5, 20), 20
#: How many times as long as usual the run is at "small": words come long after their frequencies.
_LONGER = {"small": 10}
#: The colour of what is asked at a moment.
_ASKED = COLORS[1]
#: Points of the held-out curve for each twentieth: at first it falls fast.
_FINER = 4
SENTENCES = (
    "the capital of france is [MASK] .",
    "he was born in [MASK] 1950 .",
    "the king and the [MASK] lived in the castle .",
    "she opened the [MASK] and went out .",
    "the war began in 1914 and [MASK] in 1918 .",
)


def measure_filled(job: Job) -> dict[str, Any]:
    """Return the most probable words of each sentence's mask, with their probabilities."""
    told = {}
    for sentence in job.stage.settings["sentences"]:
        words = fill(job.inputs["model"], sentence, job.stage.settings["top"])[0].words
        told[sentence] = [[word, round(share, 4)] for word, share in words]
    return {"filled": told}


def _run(kit: StageFactory) -> Stage:
    if kit.scale.name not in _LONGER:
        return kit.mlm_only_run(0)
    steps = kit.scale.num_steps * _LONGER[kit.scale.name]
    every = max(1, steps // _TWENTIETHS)
    return kit.mlm_only_run(
        0, steps=steps, run={"eval_every": max(1, every // _FINER)},
        # Each of its evaluations may be the best one, and is a checkpoint then.
        checkpoint={"every": every, "keep": (_FINER + 1) * _TWENTIETHS},
    )  # fmt: skip


def _moments(kit: StageFactory) -> dict[int, Stage]:
    """Return the models that are asked, by their steps, from the first to the last one."""
    run = _run(kit)
    found = list(kit.snapshots(run).items())
    chosen = {round(moment * len(found) / _TWENTIETHS) for moment in _MOMENTS}
    later = {step: model for number, (step, model) in enumerate(found, 1) if number in chosen}
    return {0: kit.initialized_model(run), **later}


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {"run": _run(kit)}
    settings = {"sentences": list(SENTENCES), "top": _TOP}
    for moment, model in _moments(kit).items():
        stages["filled", moment] = Stage(_FILLED, settings, {"model": model})
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    run, moments = found["run"], list(_moments(kit))
    rows = []
    for sentence in SENTENCES:
        cells = []
        for moment in moments:
            own = found["filled", moment]
            words = (word for word, _ in own["filled"][sentence]) if own else (EMPTY_CELL,)
            cells.append(" · ".join(words))
        rows.append([sentence, *cells])
    columns = ["sentence", *(f"after {moment:,} steps" for moment in moments)]
    curves: dict[str, Any] = {}
    marks: dict[str, float] = {}
    if run and "heldout" in run:
        curves = {"training": run["training"], "held out": run["heldout_curve"]}
        marks = {"unigram_entropy": run["heldout"]["unigram_entropy"]}
    panels = [Panel("loss", _losses(curves, marks, moments), full_width=True),
              Panel("the words it fills in, the most probable first", _words(rows, moments),
                    full_width=True)]  # fmt: skip
    table = Table("What it fills in, the most probable first", columns, rows)
    return Report([table], panels, {**marks, **curves})


def _losses(curves: dict[str, Any], marks: dict[str, float], moments: list[int]) -> DrawFunction:
    """Draw the held-out loss over that of the batches, and the moments that are asked."""
    held = line_plot(
        {"held out": curves.get("held out", ())}, "steps", "masked-LM loss, nats", **marks
    )

    def drawn(axes: Any) -> None:
        if curves:
            axes.plot(*zip(*curves["training"], strict=True), color="#bbbbbb", linewidth=1,
                      label="training, a batch")  # fmt: skip
        held(axes)
        for moment in moments:
            axes.axvline(moment, color=_ASKED, linewidth=1, alpha=0.6)
        top = axes.get_ylim()[1]
        for moment in moments:
            axes.annotate(f"{moment:,}", (moment, top), (3, -9), textcoords="offset points",
                          fontsize=8, color=_ASKED)  # fmt: skip

    return drawn


def _words(rows: list[list[str]], moments: list[int]) -> DrawFunction:
    """Write a sentence a line, and under each moment the words."""

    def drawn(axes: Any) -> None:
        axes.set_axis_off()
        places = [0.37 + 0.63 * number / len(moments) for number in range(len(moments))]
        step = 1 / (len(rows) + 1)
        for place, moment in zip(places, moments, strict=True):
            axes.text(place, 1 - step / 2, f"after {moment:,} steps", va="center", fontsize=10,
                      color=_ASKED)  # fmt: skip
        for line, (sentence, *cells) in enumerate(rows, 1):
            height = 1 - (line + 0.5) * step
            axes.axhline(height + step / 2, color="#dddddd", linewidth=0.8)
            axes.text(0, height, sentence, va="center", fontsize=10.5, weight="bold",
                      parse_math=False)  # fmt: skip
            for place, cell in zip(places, cells, strict=True):
                axes.text(place, height, cell, va="center", fontsize=10, parse_math=False)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, 1)

    return drawn


EXPERIMENT = Experiment(
    name="learning",
    source="section 3.1",
    question="What does a model learn, and when, while its loss falls?",
    build_stages=_stages,
    build_report=_report,
    stage_functions={_FILLED: measure_filled},
)
