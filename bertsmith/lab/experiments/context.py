"""The same word in different sentences: contextual vectors against static ones.

It never knows how a model was trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import ModelError
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import DrawFunction, Panel, Report, Table, format_mean_std, mean_plot
from bertsmith.lab.senses import SENSES
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory
from bertsmith.use.embed import Embedder
from bertsmith.use.similar import cosine_distances

#: The kind of its stages.
SENSES_KIND = "senses"
_NAMES = {"en": "English", "ko": "Korean"}
#: Values of each seed, by what they are and by layer.
_Courses = dict[str, dict[int, list[float | None]]]


def measure_senses(job: Job) -> dict[str, Any]:
    """Return, by layer, the distances of one word in one sense and in two, and how well they part.

    parted: how often two of one sense are nearer than two of different ones (the area under the
    ROC curve; ties count half). static: of the word's own embedding, the mean of its pieces'. It
    is the same everywhere, unless a Korean noun has become one piece with its particle. Words that
    the model does not know are left out.
    """
    embedder = Embedder.load(job.model)
    asked: dict[str, dict[str, list[str]]] = job.stage.settings["words"]
    words = {word: senses for word, senses in asked.items() if _knows(embedder, word, senses)}
    if not words:
        language = _NAMES[job.stage.settings["language"]]
        raise ModelError(
            f"{job.model}: its vocabulary has none of the {language} words {', '.join(asked)}; "
            "ask a model of that language"
        )
    layers = range(embedder.config.layers + 1)
    return {"words": list(words), "static": _apart(embedder, words, None),
            "layers": [_apart(embedder, words, layer) for layer in layers]}  # fmt: skip


def _knows(embedder: Embedder, word: str, senses: Mapping[str, list[str]]) -> bool:
    """Tell whether no piece of the word is [UNK] where it stands; alone it may have others."""
    texts = [text for own in senses.values() for text in own]
    unknown = embedder.tokenizer.unk_id
    marks = [replace(one, vectors=np.array([[own == unknown] for own in one.ids], np.float32))
             for one in embedder.encode_tokens(texts, layer=0)]  # fmt: skip
    return not any(own.vector.any() for own in embedder.word_vectors(texts, word, marks))


def _apart(
    embedder: Embedder, words: Mapping[str, Mapping[str, list[str]]], layer: int | None
) -> dict[str, float]:
    same: list[float] = []
    other: list[float] = []
    wins: list[float] = []
    for word, senses in words.items():
        own, far = _distances(embedder, word, senses, layer)
        same, other = same + own, other + far
        wins += [(a < b) + 0.5 * (a == b) for a in own for b in far]
    return {"same": float(np.mean(same)), "other": float(np.mean(other)),
            "parted": float(np.mean(wins))}  # fmt: skip


def _distances(
    embedder: Embedder, word: str, senses: Mapping[str, list[str]], layer: int | None
) -> tuple[list[float], list[float]]:
    """Return the distances of a word's vectors within its senses, and between them."""
    texts = [text for own in senses.values() for text in own]
    sense = [name for name, own in senses.items() for _ in own]
    vectors = embedder.encode_tokens(texts, layer=layer or 0)
    if layer is None:
        table = embedder.encoder.embeddings.words.weight.numpy(force=True)
        vectors = [replace(one, vectors=table[one.ids]) for one in vectors]
    found = embedder.word_vectors(texts, word, vectors)
    # Equal vectors are no distance apart, whatever rounding says.
    distances = cosine_distances(np.stack([own.vector for own in found])).round(6)
    pairs = list(combinations(range(len(found)), 2))
    same: list[float] = []
    other: list[float] = []
    for a, b in pairs:
        if found[a].text == found[b].text:
            continue  # Two places of one sentence are near for another reason.
        alike = sense[found[a].text] == sense[found[b].text]
        (same if alike else other).append(float(distances[a, b]))
    return same, other


def senses_stage(kit: StageFactory, language: str, seed: int) -> Stage:
    """Return the stage that measures the usual model of a language, or the one that was given."""
    words = {word: {name: list(texts) for name, texts in senses.items()}
             for word, senses in SENSES[language].items()}  # fmt: skip
    settings = {"language": language, "words": words}
    if kit.sources.model:
        return Stage(SENSES_KIND, settings, {}, {"model": Path(kit.sources.model)})
    return Stage(
        SENSES_KIND, settings, {"model": kit.baseline_run(seed, store=kit.store_stage(language))}
    )


def _stages(kit: StageFactory) -> Stages:
    languages = ["en"] + (["ko"] if kit.sources.korean else [])
    seeds = range(1 if kit.sources.model else kit.scale.num_seeds)
    return {(language, seed): senses_stage(kit, language, seed)
            for language in languages for seed in seeds}  # fmt: skip


def _report(kit: StageFactory, found: Results) -> Report:  # noqa: ARG001 - all reports are asked alike
    tables, panels, figures = [], [], {}
    for language in dict.fromkeys(key[0] for key in found):  # type: ignore[index]
        runs = [[own["static"], *own["layers"]] if own else None for key, own in found.items()
                if key[0] == language]  # type: ignore[index] # fmt: skip
        known = next((own for own in runs if own), None)
        if known is None:
            continue
        name, rows = _NAMES[language], []
        courses: _Courses = {what: {} for what in known[0]}
        vectors = ["the word's own (static)", "embeddings, with position",
                   *(f"layer {layer}" for layer in range(1, len(known) - 1))]  # fmt: skip
        for place, vector in enumerate(vectors):
            told = {what: [own[place][what] if own else None for own in runs] for what in courses}
            rows.append(
                [vector, *(format_mean_std(told[what]) for what in ("same", "other", "parted"))]
            )
            figures[f"{name}, {vector}"] = told
            for what, values in told.items():
                courses[what][place - 1] = values
        tables.append(Table(
            f"{name}: cosine distance of a word in two sentences",
            ["vector", "same sense", "different senses", "same is nearer than different"], rows,
        ))  # fmt: skip
        panels += _panels(name, courses)
    return Report(tables, panels, figures)


def _panels(name: str, courses: _Courses) -> list[Panel]:
    """Return how well senses are parted and how far apart they are, by layer; -1 is static."""
    parted = mean_plot(
        {"layers": courses["parted"]}, "", "same sense is nearer, share", by_chance=0.5
    )
    apart = {"same sense": courses["same"], "different senses": courses["other"]}
    distances = mean_plot(apart, "", "cosine distance")
    layers = max(courses["parted"])
    # One scale for all models and languages; chance is in its middle.
    return [
        Panel(f"{name}: are senses told apart?", _by_layer(parted, layers, (0.0, 1.0))),
        Panel(f"{name}: how far apart?", _by_layer(distances, layers, (0.0, None))),
    ]


def _by_layer(draw: DrawFunction, layers: int, limits: tuple[float, float | None]) -> DrawFunction:
    def drawn(axes: Any) -> None:
        draw(axes)
        names = ["static", "embed-\ndings", *map(str, range(1, layers + 1))]
        axes.set_xticks(range(-1, layers + 1), names, fontsize=8)
        axes.set_ylim(*limits)

    return drawn


EXPERIMENT = Experiment(
    name="context",
    source="section 2.1 and 5.3 (contextual against static vectors)",
    question="Does a word's vector tell its senses apart, and from which layer on?",
    build_stages=_stages,
    build_report=_report,
    stage_functions={SENSES_KIND: measure_senses},
)
