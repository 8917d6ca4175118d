"""Vocabulary size against loss a character, and what the full output softmax costs.

It never knows how a run is made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bertsmith.lab import softmax
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import (
    EMPTY_CELL,
    DrawFunction,
    Panel,
    Report,
    Table,
    format_mean_std,
    line_plot,
    mean_plot,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory, validation_metric
from bertsmith.train.engine.schedule import ScheduleSettings, build_phases

#: Words of a vocabulary, by scale.
_SIZES = {"smoke": (300, 400), "small": (8000, 16000, 32000), "full": (8000, 16000, 32000)}
#: Words of the softmax whose cost is measured, and how often.
_OUTPUTS, _TIMES = (8000, 16000, 32000, 64000, 128000), 5
_SOFTMAX = "softmax"
#: Of the usual steps, how many: each word is predicted here, by outputs of up to 32,000 words.
_STEPS = 2
_LANGUAGES = {("en", None): "English", ("ko", None): "Korean", ("ko", "kiwi"): "Korean, morphemes"}


def measure_softmax(job: Job) -> dict[str, Any]:
    """Measure the output softmax of a batch's predictions by its words; see ``lab.softmax``."""
    settings = job.stage.settings
    rows = []
    for words in settings["words"]:
        shape = words, settings["width"], settings["predictions"], settings["times"]
        costs = {
            form: softmax.measure_in_subprocess(form, *shape) for form in softmax.IMPLEMENTATIONS
        }
        # Weights and biases, and Adam's two moments of them.
        held = 3 * 4 * words * (settings["width"] + 1)
        rows.append({"words": words, "weights_bytes": held, **costs})
    return {"rows": rows}


def _steps(kit: StageFactory) -> int:
    return max(1, kit.scale.num_steps // _STEPS)


def _languages(kit: StageFactory) -> list[tuple[str, str | None]]:
    return [own for own in _LANGUAGES if own[0] == "en" or kit.sources.korean is not None]


def _stages(kit: StageFactory) -> Stages:
    scale = kit.scale
    predictions = round(0.15 * scale.batch_size * scale.max_length)
    words = _OUTPUTS if scale.name != "smoke" else _OUTPUTS[:2]
    settings = {
        "width": scale.width,
        "predictions": predictions,
        "words": list(words),
        "times": _TIMES,
    }
    stages: Stages = {"softmax": Stage(_SOFTMAX, settings)}
    for language, segment in _languages(kit):
        for size in _SIZES[scale.name]:
            place = (language, segment, size)
            store = kit.store_stage(language, size, segment)
            stages[*place, "words"] = store.dependencies["words"]
            stages[*place, "store"] = store
            for seed in range(scale.num_seeds):
                # A masked piece is told by the other pieces of its word, a morpheme by those beside
                # it: masked losses of texts that are cut otherwise are no measure of each other.
                # Left to right, all words of a text together are as probable as the text itself;
                # of morphemes, as the text with spaces between all of them.
                stages[*place, seed] = kit.left_to_right_run(seed, store=store, steps=_steps(kit))
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    losses: dict[str, dict[int, list[float | None]]] = {}
    for language, segment in _languages(kit):
        name = _LANGUAGES[language, segment]
        for size in _SIZES[kit.scale.name]:
            told = _row(kit, found, (language, segment, size))
            figures[f"{name}, {size}"] = told
            losses.setdefault(name, {})[size] = told["nats a character"]
            rows.append([
                name, f"{size:,}", *(_told(told[key], form) for key, form in (
                    ("words learnt", ",.0f"), ("tokens a sentence", ".1f"), ("unknown", ".3%"),
                    ("characters a token", ".2f"), ("characters read", ",.0f"))),
                format_mean_std(told["nats a token"]), format_mean_std(told["nats a character"], ".4f"),
            ])  # fmt: skip
    columns = ["text", "words asked", "words learnt", "tokens a sentence", "[UNK], of words",
               "characters a token", "characters read at most, thousands", "nats a token",
               "nats a character"]  # fmt: skip
    measured = found["softmax"]
    figures["softmax"] = measured["rows"] if measured else []
    title = (
        f"Vocabularies, left to right, after {_steps(kit):,} steps (the paper's has 30,000 words; "
        "[UNK] is not predicted, nor whether a space stands before a morpheme)"
    )
    costs, panels = _softmax(figures["softmax"])
    return Report([Table(title, columns, rows), costs], [*_panels(losses), *panels], figures)


def _panels(losses: Mapping[str, Mapping[int, Sequence[float | None]]]) -> Iterator[Panel]:
    """Draw the losses of each language: between languages, characters are no common measure."""
    for language in ("English", "Korean"):
        own = {name: course for name, course in losses.items() if name.startswith(language)}
        if own:
            drawn = mean_plot(own, "words asked", "nats a character")
            sizes = next(iter(own.values()))
            yield Panel(f"loss by vocabulary, {language}", _at_sizes(drawn, sizes))


def _at_sizes(draw: DrawFunction, sizes: Iterable[int]) -> DrawFunction:
    def drawn(axes: Any) -> None:
        draw(axes)
        axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])

    return drawn


def _softmax(costs: list[dict[str, Any]]) -> tuple[Table, list[Panel]]:
    """Return the table and the panels of what the output softmax costs."""
    forms = softmax.IMPLEMENTATIONS
    rows = [
        [f"{own['words']:,}", f"{own['weights_bytes'] / 2**20:,.0f}",
         *(f"{1000 * own[form]['seconds']:,.1f}" for form in forms),
         *(f"{own[form]['bytes'] / 2**20:,.0f}" for form in forms)]
        for own in costs
    ]  # fmt: skip
    columns = [
        "words", "weights, Adam's moments: MiB", *(f"ms a step, {own}" for own in forms.values()),
        *(f"MiB on top, gradient included, {own}" for own in forms.values()),
    ]  # fmt: skip
    panels = []
    for what, unit, scale in (("seconds", "ms a step", 1000), ("bytes", "MiB", 2**-20)):
        series = {words: [(own["words"] / 1000, scale * own[form][what]) for own in costs]
                  for form, words in forms.items()}  # fmt: skip
        panels.append(Panel(f"the output softmax alone: {unit}",
                            line_plot(series, "thousand words", unit)))  # fmt: skip
    title = "The output softmax by its words, forward and backward"
    return Table(title, columns, rows), panels


def _row(kit: StageFactory, found: Results, place: tuple[str, str | None, int]) -> dict[str, Any]:
    """Return the figures of a vocabulary; characters are those of the text as it was given."""
    words, store = found[*place, "words"], found[*place, "store"]
    losses = [validation_metric(found[*place, seed]) for seed in range(kit.scale.num_seeds)]
    row: dict[str, Any] = dict.fromkeys(
        ("words learnt", "tokens a sentence", "unknown", "characters a token", "characters read")
    )
    row |= {"nats a token": losses, "nats a character": []}
    if words is None or store is None:
        return row
    counts = store["splits"].values()
    tokens = sum(own["tokens"] for own in counts)
    a_token = store["characters"] / tokens
    row |= {
        "words learnt": words["words"],
        "tokens a sentence": tokens / sum(own["sentences"] for own in counts),
        "unknown": words["unknown_share"],
        "characters a token": a_token,
        "characters read": _tokens_read(kit) * a_token / 1000,
        "nats a character": [None if loss is None else loss / a_token for loss in losses],
    }
    return row


def _tokens_read(kit: StageFactory) -> int:
    """Return the tokens of a run if each sequence is full: of both phases, where it has two."""
    settings = kit.left_to_right_run(0, steps=_steps(kit)).settings
    schedule = ScheduleSettings.parse({**settings["schedule"], "steps": settings["steps"]}, "a run")
    parts = build_phases(schedule, kit.scale.max_length)
    return kit.scale.batch_size * sum((own.end_step - own.start_step) * own.length for own in parts)


def _told(value: float | None, form: str) -> str:
    return EMPTY_CELL if value is None else format(value, form)


EXPERIMENT = Experiment(
    name="vocabulary",
    source="section 3 (WordPiece of 30,000 words)",
    question="How many words, of raw text or morphemes, and what does the softmax over them cost?",
    build_stages=_stages,
    build_report=_report,
    stage_functions={_SOFTMAX: measure_softmax},
)
