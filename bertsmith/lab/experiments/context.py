"""Contextual word vectors: do they separate the senses of ambiguous words?"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import ModelError
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import DrawFunction, Panel, Report, Table, format_mean_std, make_mean_plot
from bertsmith.lab.senses import SENSES
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory
from bertsmith.use.embed import Embedder
from bertsmith.use.similar import cosine_distances

#: The kind of the stages that measure word senses.
SENSES_KIND = "word-senses"
_LANGUAGE_NAMES = {"en": "English", "ko": "Korean"}
#: Values of all seeds, by measure and by layer; layer -1 has the static word embeddings.
_ValuesByLayer = dict[str, dict[int, list[float | None]]]


def measure_senses(job: Job) -> dict[str, Any]:
    """Compare the vectors of a word within one sense and between senses, by layer.

    Words that the tokenizer maps to [UNK] are excluded. Static vectors of a word differ only where
    a Korean noun and its particle are one token.

    Returns:
        ``measured_words``, the words in the vocabulary; ``static``, the measures of the static word
        embeddings (the mean over a word's tokens); and ``layers``, the same measures for each
        layer. See ``_measure_layer`` for the measures.
    """
    embedder = Embedder.load(job.model)
    all_words: dict[str, dict[str, list[str]]] = job.stage.settings["words"]
    words = {word: senses for word, senses in all_words.items()
             if _is_in_vocabulary(embedder, word, senses)}  # fmt: skip
    if not words:
        language = _LANGUAGE_NAMES[job.stage.settings["language"]]
        raise ModelError(
            f"{job.model}: its vocabulary has none of the {language} words {', '.join(all_words)}; "
            "use a model of that language"
        )
    layers = range(embedder.config.layers + 1)
    return {"measured_words": list(words), "static": _measure_layer(embedder, words, None),
            "layers": [_measure_layer(embedder, words, layer) for layer in layers]}  # fmt: skip


def _is_in_vocabulary(embedder: Embedder, word: str, senses: Mapping[str, list[str]]) -> bool:
    """Return whether the word has no [UNK] piece in its sentences.

    The word's pieces can depend on the sentence, because Korean particles are attached to it.
    """
    texts = [text for sense_texts in senses.values() for text in sense_texts]
    unk_id = embedder.tokenizer.unk_id
    unk_marks = [
        replace(tokens, vectors=np.array([[token_id == unk_id] for token_id in tokens.ids],
                                         np.float32))
        for tokens in embedder.encode_tokens(texts, layer=0)
    ]  # fmt: skip
    occurrences = embedder.word_vectors(texts, word, unk_marks)
    return not any(occurrence.vector.any() for occurrence in occurrences)


def _measure_layer(
    embedder: Embedder, words: Mapping[str, Mapping[str, list[str]]], layer: int | None
) -> dict[str, float]:
    """Return how well a layer separates senses; ``layer`` None means the static embeddings.

    Returns:
        ``same_sense`` and ``different_senses``, the mean cosine distances of two occurrences of a
        word; and ``auc``, the share of comparisons in which a pair with the same sense is closer
        than a pair of the same word with different senses. It is the area under the ROC curve;
        ties count half.
    """
    all_same: list[float] = []
    all_other: list[float] = []
    wins: list[float] = []
    for word, senses in words.items():
        same, other = _measure_sense_distances(embedder, word, senses, layer)
        all_same, all_other = all_same + same, all_other + other
        wins += [(a < b) + 0.5 * (a == b) for a in same for b in other]
    return {"same_sense": float(np.mean(all_same)), "different_senses": float(np.mean(all_other)),
            "auc": float(np.mean(wins))}  # fmt: skip


def _measure_sense_distances(
    embedder: Embedder, word: str, senses: Mapping[str, list[str]], layer: int | None
) -> tuple[list[float], list[float]]:
    """Return the cosine distances of a word's occurrences within senses and between senses."""
    texts = [text for sense_texts in senses.values() for text in sense_texts]
    sense_of_text = [name for name, sense_texts in senses.items() for _ in sense_texts]
    vectors = embedder.encode_tokens(texts, layer=layer or 0)
    if layer is None:
        table = embedder.encoder.embeddings.words.weight.numpy(force=True)
        vectors = [replace(tokens, vectors=table[tokens.ids]) for tokens in vectors]
    occurrences = embedder.word_vectors(texts, word, vectors)
    stacked = np.stack([occurrence.vector for occurrence in occurrences])
    # Rounding makes the distance of equal vectors exactly 0.
    distances = cosine_distances(stacked).round(6)
    same: list[float] = []
    other: list[float] = []
    for a, b in combinations(range(len(occurrences)), 2):
        first_index, second_index = occurrences[a].text_index, occurrences[b].text_index
        if first_index == second_index:
            continue  # The shared sentence makes these similar, whatever the sense.
        is_same_sense = sense_of_text[first_index] == sense_of_text[second_index]
        (same if is_same_sense else other).append(float(distances[a, b]))
    return same, other


def create_senses_stage(factory: StageFactory, language: str, seed: int) -> Stage:
    """Return the stage that measures the user's model, or the baseline model of a language."""
    words = {word: {name: list(texts) for name, texts in senses.items()}
             for word, senses in SENSES[language].items()}  # fmt: skip
    settings = {"language": language, "words": words}
    if factory.sources.model:
        return Stage(SENSES_KIND, settings, {}, {"model": Path(factory.sources.model)})
    run = factory.create_baseline_run(seed, store=factory.create_store_stage(language))
    return Stage(SENSES_KIND, settings, {"model": run})


def _build_stages(factory: StageFactory) -> Stages:
    languages = ["en"] + (["ko"] if factory.sources.korean else [])
    seeds = range(1 if factory.sources.model else factory.scale.num_seeds)
    return {(language, seed): create_senses_stage(factory, language, seed)
            for language in languages for seed in seeds}  # fmt: skip


def _build_report(factory: StageFactory, results: Results) -> Report:  # noqa: ARG001 - same signature in all experiments
    tables, panels, data = [], [], {}
    for language in dict.fromkeys(key[0] for key in results):  # type: ignore[index]
        # Static embeddings first, then layer by layer.
        runs = [[result["static"], *result["layers"]] if result else None
                for key, result in results.items() if key[0] == language]  # type: ignore[index] # fmt: skip
        first_run = next((run for run in runs if run), None)
        if first_run is None:
            continue
        name, rows = _LANGUAGE_NAMES[language], []
        values_by_layer: _ValuesByLayer = {measure: {} for measure in first_run[0]}
        vectors = ["static word embedding", "embeddings, with position",
                   *(f"layer {layer}" for layer in range(1, len(first_run) - 1))]  # fmt: skip
        for index, vector in enumerate(vectors):
            values = {measure: [run[index][measure] if run else None for run in runs]
                      for measure in values_by_layer}  # fmt: skip
            cells = (
                format_mean_std(values[measure])
                for measure in ("same_sense", "different_senses", "auc")
            )
            rows.append([vector, *cells])
            data[f"{name}, {vector}"] = values
            for measure, seed_values in values.items():
                values_by_layer[measure][index - 1] = seed_values
        tables.append(Table(
            f"{name}: cosine distance between two occurrences of a word",
            ["vector", "same sense", "different senses", "same sense is closer (AUC)"], rows,
        ))  # fmt: skip
        panels += _build_panels(name, values_by_layer)
    return Report(tables, panels, data)


def _build_panels(name: str, values_by_layer: _ValuesByLayer) -> list[Panel]:
    """Return plots of sense separation and distance by layer."""
    separation = make_mean_plot({"layers": values_by_layer["auc"]}, "",
                           "share of pairs with the same sense closer", chance=0.5)  # fmt: skip
    curves = {"same sense": values_by_layer["same_sense"],
              "different senses": values_by_layer["different_senses"]}  # fmt: skip
    distances = make_mean_plot(curves, "", "cosine distance")
    num_layers = max(values_by_layer["auc"])
    # Fixed limits make plots of different models and languages comparable.
    return [
        Panel(
            f"{name}: separation of senses", _with_layer_axis(separation, num_layers, (0.0, 1.0))
        ),
        Panel(f"{name}: distance", _with_layer_axis(distances, num_layers, (0.0, None))),
    ]


def _with_layer_axis(
    draw: DrawFunction, num_layers: int, limits: tuple[float, float | None]
) -> DrawFunction:
    """Return ``draw`` with layer names on the x axis and fixed limits of the y axis."""

    def draw_by_layer(axes: Any) -> None:
        draw(axes)
        labels = ["static", "embed-\ndings", *map(str, range(1, num_layers + 1))]
        axes.set_xticks(range(-1, num_layers + 1), labels, fontsize=8)
        axes.set_ylim(*limits)

    return draw_by_layer


EXPERIMENT = Experiment(
    name="context",
    source="section 2.1 and 5.3 (contextual against static vectors)",
    question="Do word vectors separate the senses of a word, and from which layer on?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={SENSES_KIND: measure_senses},
)
