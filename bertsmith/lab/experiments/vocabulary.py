"""Vocabulary size against loss a character, and what the full output softmax costs.

It never knows how a run is made.
"""

import time
from statistics import median
from typing import Any

import torch

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.kit import Kit, heldout
from bertsmith.lab.making import Job
from bertsmith.lab.report import NOTHING, Panel, Report, Table, average, lines, spread
from bertsmith.lab.stages import Stage
from bertsmith.model.loss import linear_cross_entropy

#: Words of a vocabulary, by scale.
_SIZES = {"smoke": (300, 400), "small": (8000, 16000, 32000), "full": (8000, 16000, 32000)}
#: Words of the softmax whose cost is measured, and how often.
_OUTPUTS, _TIMES = (8000, 16000, 32000, 64000, 128000), 5
_SOFTMAX = "softmax"
_LANGUAGES = {("en", None): "English", ("ko", None): "Korean", ("ko", "kiwi"): "Korean, morphemes"}


def measure_softmax(job: Job) -> dict[str, Any]:
    """Time the output softmax of a batch's predictions, forward and backward, by its words V."""
    width, predictions = job.stage.settings["width"], job.stage.settings["predictions"]
    rows = []
    for words in job.stage.settings["words"]:
        weight = torch.randn(words, width).mul_(0.02).requires_grad_()
        bias = torch.zeros(words, requires_grad=True)
        hidden = torch.randn(predictions, width, requires_grad=True)
        labels = torch.randint(words, (predictions,))
        seconds = []
        for _ in range(job.stage.settings["times"]):
            began = time.perf_counter()
            linear_cross_entropy(hidden, weight, bias, labels).backward()  # type: ignore[no-untyped-call]
            seconds.append(time.perf_counter() - began)
        # Weights, their gradient and Adam's two moments; and the logits, were they held at once.
        rows.append({"words": words, "seconds": median(seconds),
                     "weights_bytes": 4 * 4 * words * (width + 1),
                     "logits_bytes": 4 * words * predictions})  # fmt: skip
    return {"rows": rows}


def _languages(kit: Kit) -> list[tuple[str, str | None]]:
    return [own for own in _LANGUAGES if own[0] == "en" or kit.sources.korean is not None]


def _stages(kit: Kit) -> Stages:
    scale = kit.scale
    predictions = round(0.15 * scale.batch * scale.length)
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
            store = kit.store(language, size, segment)
            stages[*place, "words"] = store.needs["words"]
            stages[*place, "store"] = store
            for seed in range(scale.seeds):
                # Of a word's pieces masked alone, the others would tell: small vocabularies would
                # have it easy.
                stages[*place, seed] = kit.pretrained(seed, store=store, data={"whole_words": True})
    return stages


def _report(kit: Kit, found: Results) -> Report:
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for language, segment in _languages(kit):
        name = _LANGUAGES[language, segment]
        for size in _SIZES[kit.scale.name]:
            told = _row(kit, found, (language, segment, size))
            figures[f"{name}, {size}"] = told
            middle = average(told["nats a character"])
            if middle is not None:
                curves.setdefault(name, []).append((size, middle))
            rows.append([
                name, f"{size:,}", *(_told(told[key], form) for key, form in (
                    ("words learnt", ",.0f"), ("tokens a sentence", ".1f"), ("unknown", ".3%"),
                    ("characters a token", ".2f"))),
                spread(told["nats a token"]), spread(told["nats a character"], ".4f"),
            ])  # fmt: skip
    columns = ["text", "words asked", "words learnt", "tokens a sentence", "[UNK]",
               "characters a token", "nats a token", "nats a character"]  # fmt: skip
    softmax = found["softmax"]
    costs = softmax["rows"] if softmax else []
    figures["softmax"] = costs
    cost_rows = [[f"{own['words']:,}", f"{1000 * own['seconds']:.1f}",
                  f"{own['weights_bytes'] / 2**20:,.0f}", f"{own['logits_bytes'] / 2**20:,.0f}"]
                 for own in costs]  # fmt: skip
    tables = [
        Table("Vocabularies, whole words masked (the paper's has 30,000 words)", columns, rows),
        Table("The output softmax, by its words (memory by arithmetic)",
              ["words", "ms a step, forward and backward", "weights, gradient, Adam: MiB",
               "logits: MiB"], cost_rows),
    ]  # fmt: skip
    series = {"softmax": [(own["words"] / 1000, 1000 * own["seconds"]) for own in costs]}
    panels = [
        Panel("loss by vocabulary", lines(curves, "words", "nats a character, held out")),
        Panel("cost of the softmax", lines(series, "thousand words", "ms a step")),
    ]
    return Report(tables, panels, figures)


def _row(kit: Kit, found: Results, place: tuple[str, str | None, int]) -> dict[str, Any]:
    """Return the figures of a vocabulary. A token's loss is that of one masked in its text."""
    words, store = found[*place, "words"], found[*place, "store"]
    losses = [heldout(found[*place, seed]) for seed in range(kit.scale.seeds)]
    row: dict[str, Any] = dict.fromkeys(
        ("words learnt", "tokens a sentence", "unknown", "characters a token")
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
        "nats a character": [None if loss is None else loss / a_token for loss in losses],
    }
    return row


def _told(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


EXPERIMENT = Experiment(
    name="vocabulary",
    source="section 3 (WordPiece of 30,000 words)",
    question="How many words, of raw text or morphemes, and what does the softmax over them cost?",
    stages=_stages,
    report=_report,
    makers={_SOFTMAX: measure_softmax},
)
