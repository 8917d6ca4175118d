"""One model's loss falling past the unigram entropy, and the words it fills in on the way.

It never knows how a run is made.
"""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.kit import Kit
from bertsmith.lab.making import Job
from bertsmith.lab.report import NOTHING, Panel, Report, Table, lines
from bertsmith.lab.stages import Stage
from bertsmith.use.fill import fill

_FILLED = "filled"
#: Words that a table shows of each moment.
_TOP = 3
#: The moments of a run that are asked, in twentieths: one before words are more than frequent.
_MOMENTS, _TWENTIETHS = (1, 4, 10, 20), 20
#: How many times as long as usual the run is at "small": words come long after their frequencies.
_LONGER = {"small": 2}
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
        words = fill(job.needs["model"], sentence, job.stage.settings["top"])[0].words
        told[sentence] = [[word, round(share, 4)] for word, share in words]
    return {"filled": told}


def _run(kit: Kit) -> Stage:
    if kit.scale.name not in _LONGER:
        return kit.masked_only(0)
    steps = kit.scale.steps * _LONGER[kit.scale.name]
    every = max(1, steps // _TWENTIETHS)
    return kit.masked_only(0, steps=steps, checkpoint={"every": every, "keep": 2 * _TWENTIETHS})


def _moments(kit: Kit) -> dict[int, Stage]:
    """Return the models that are asked, by their steps, the last one among them."""
    found = list(kit.moments(_run(kit)).items())
    chosen = {round(moment * len(found) / _TWENTIETHS) for moment in _MOMENTS}
    return {step: model for number, (step, model) in enumerate(found, 1)
            if number in chosen or number == 1}  # fmt: skip


def _stages(kit: Kit) -> Stages:
    stages: Stages = {"run": _run(kit)}
    settings = {"sentences": list(SENTENCES), "top": _TOP}
    for moment, model in _moments(kit).items():
        stages["filled", moment] = Stage(_FILLED, settings, {"model": model})
    return stages


def _report(kit: Kit, found: Results) -> Report:
    run, moments = found["run"], list(_moments(kit))
    rows = []
    for sentence in SENTENCES:
        cells = []
        for moment in moments:
            own = found["filled", moment]
            words = (word for word, _ in own["filled"][sentence]) if own else (NOTHING,)
            cells.append(" · ".join(words))
        rows.append([sentence, *cells])
    columns = ["sentence", *(f"after {moment:,} steps" for moment in moments)]
    curves: dict[str, Any] = {}
    marks: dict[str, float] = {}
    if run and "heldout" in run:
        curves = {"training": run["training"], "held out": run["heldout_curve"]}
        marks = {"unigram_entropy": run["heldout"]["unigram_entropy"]}
    words = _words(rows, moments)
    drawn = lines(curves, "steps", "masked-LM loss, nats", **marks)
    panels = [Panel("loss", drawn), Panel("words filled in", words)]
    table = Table("What it fills in, the most probable first", columns, rows)
    return Report([table], panels, {**marks, **curves})


def _words(rows: list[list[str]], moments: list[int]) -> Any:
    def drawn(axes: Any) -> None:
        axes.set_axis_off()
        for line, (sentence, *cells) in enumerate(rows):
            top = 1 - line / len(rows)
            axes.text(0, top, sentence, va="top", fontsize=10.5, weight="bold", parse_math=False)
            for number, (moment, cell) in enumerate(zip(moments, cells, strict=True), 1):
                where = top - number * 0.037
                axes.text(0.02, where, f"{moment:,}", va="top", fontsize=9.5, color="#666666")
                axes.text(0.16, where, cell, va="top", fontsize=9.5, parse_math=False)

    return drawn


EXPERIMENT = Experiment(
    name="learning",
    source="section 3.1",
    question="What does a model learn, and when, while its loss falls?",
    stages=_stages,
    report=_report,
    makers={_FILLED: measure_filled},
)
