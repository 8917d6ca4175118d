"""Measures whether contextual word vectors separate the senses of ambiguous words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
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
from bertsmith.lab.verdict import MIN_SEEDS, Claim
from bertsmith.model.bert import BertModel
from bertsmith.runtime.device import resolve_device
from bertsmith.use.embed import Embedder
from bertsmith.use.similar import cosine_distances
from bertsmith.use.token_vectors import average_word_tokens

#: The kind of the stages that measure word senses.
SENSES_KIND = "word-senses"
#: Minimum difference of an AUC from chance that counts. There are few pairs of occurrences.
_MIN_AUC_GAIN = 0.1
#: Measures of a layer and their column titles, see ``_measure_layer``.
_MEASURES = {
    "same_sense": "same sense",
    "different_senses": "different senses",
    "auc": "same sense is closer (AUC)",
}
_LANGUAGE_NAMES = {"en": "English", "ko": "Korean"}
#: Maps measure and layer to one value per seed. Layer -1 has the static word embeddings.
_ValuesByLayer = dict[str, dict[int, list[float | None]]]


def measure_senses(job: Job) -> dict[str, Any]:
    """Compare occurrences of a word with the same sense and with different senses, by layer.

    Words with [UNK] tokens are excluded. The static vectors of a word are equal in all sentences,
    unless a Korean noun and its particle are one token.

    Returns:
        ``measured_words``, the words in the vocabulary; ``static``, the measures of the static word
        embeddings (the mean over a word's tokens); and ``layers``, the same measures for each
        layer. See ``_measure_layer`` for the measures.
    """
    embedder = Embedder.load(job.model, device=resolve_device("auto", "--device"))
    all_words: dict[str, dict[str, list[str]]] = job.stage.settings["words"]
    words = {
        word: senses
        for word, senses in all_words.items()
        if _is_in_vocabulary(embedder, word, senses)
    }
    if not words:
        language = _LANGUAGE_NAMES[job.stage.settings["language"]]
        raise ModelError(
            f"{job.model}: its vocabulary has none of the {language} words {', '.join(all_words)}; "
            f"use a {language} model"
        )
    layers = range(embedder.config.layers + 1)
    return {
        "measured_words": list(words),
        "static": _measure_layer(embedder, words, None),
        "layers": [_measure_layer(embedder, words, layer) for layer in layers],
    }


def _is_in_vocabulary(embedder: Embedder, word: str, senses: Mapping[str, list[str]]) -> bool:
    """Return whether the word has no [UNK] token in its sentences.

    The tokens of a Korean word depend on the sentence, because particles are attached to the word.
    """
    texts, _ = _list_texts(senses)
    unk_flags = []
    for tokens in embedder.encode_tokens(texts, layer=0):
        # In place of a vector, each token has a single number that is 1 for [UNK].
        is_unk = np.array(tokens.ids) == embedder.tokenizer.unk_id
        unk_flags.append(replace(tokens, vectors=is_unk[:, np.newaxis].astype(np.float32)))
    occurrences = average_word_tokens(
        word, embedder.find_word(texts, word), unk_flags, embedder.max_seqlen
    )
    return not any(occurrence.vector.any() for occurrence in occurrences)


def _list_texts(senses: Mapping[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return the sentences of all senses, and the sense of each sentence."""
    texts: list[str] = []
    text_senses: list[str] = []
    for sense, sense_texts in senses.items():
        texts += sense_texts
        text_senses += [sense] * len(sense_texts)
    return texts, text_senses


def _measure_layer(
    embedder: Embedder, words: Mapping[str, Mapping[str, list[str]]], layer: int | None
) -> dict[str, float]:
    """Measure how well a layer separates the senses of words.

    Args:
        embedder: The model.
        words: The sentences of each sense of each word.
        layer: The layer, None for the static word embeddings.

    Returns:
        ``same_sense`` and ``different_senses``, the mean cosine distances of two occurrences of a
        word; and ``auc``, the probability that a pair of occurrences with the same sense is closer
        than a pair of the same word with different senses. It is the area under the ROC curve, in
        which ties count half.
    """
    same_distances: list[float] = []
    different_distances: list[float] = []
    comparisons: list[float] = []
    for word, senses in words.items():
        same, different = _measure_sense_distances(embedder, word, senses, layer)
        same_distances += same
        different_distances += different
        for same_distance, different_distance in product(same, different):
            is_tie = same_distance == different_distance
            comparisons.append(0.5 if is_tie else float(same_distance < different_distance))
    return {
        "same_sense": float(np.mean(same_distances)),
        "different_senses": float(np.mean(different_distances)),
        "auc": float(np.mean(comparisons)),
    }


def _measure_sense_distances(
    embedder: Embedder, word: str, senses: Mapping[str, list[str]], layer: int | None
) -> tuple[list[float], list[float]]:
    """Return cosine distances of a word's occurrences with the same and with different senses.

    The arguments are those of ``_measure_layer``, for one word.
    """
    texts, text_senses = _list_texts(senses)
    token_vectors = embedder.encode_tokens(texts, layer=layer or 0)
    if layer is None:
        assert isinstance(embedder.encoder, BertModel)
        table = embedder.encoder.embeddings.words.weight.numpy(force=True)
        token_vectors = [replace(tokens, vectors=table[tokens.ids]) for tokens in token_vectors]
    occurrences = average_word_tokens(
        word, embedder.find_word(texts, word), token_vectors, embedder.max_seqlen
    )
    vectors = np.stack([occurrence.vector for occurrence in occurrences])
    # Rounding makes the distance of equal vectors exactly 0.
    distances = cosine_distances(vectors).round(6)
    same: list[float] = []
    different: list[float] = []
    for first, second in combinations(range(len(occurrences)), 2):
        first_text, second_text = occurrences[first].text_index, occurrences[second].text_index
        if first_text == second_text:
            # Occurrences in the same sentence are similar regardless of their senses.
            continue
        distance = float(distances[first, second])
        if text_senses[first_text] == text_senses[second_text]:
            same.append(distance)
        else:
            different.append(distance)
    return same, different


def create_senses_stage(factory: StageFactory, language: str, seed: int) -> Stage:
    """Return the stage that measures word senses in the user's model or in a baseline model."""
    words = {
        word: {name: list(texts) for name, texts in senses.items()}
        for word, senses in SENSES[language].items()
    }
    settings = {"language": language, "words": words}
    if factory.sources.model:
        return Stage(SENSES_KIND, settings, {}, {"model": Path(factory.sources.model)})
    run = factory.create_baseline_run(seed, store=factory.create_store_stage(language))
    return Stage(SENSES_KIND, settings, {"model": run})


def _build_stages(factory: StageFactory) -> Stages:
    languages = ["en"] + (["ko"] if factory.sources.korean else [])
    seeds = range(1 if factory.sources.model else factory.scale.num_seeds)
    return {
        (language, seed): create_senses_stage(factory, language, seed)
        for language in languages
        for seed in seeds
    }


def _build_report(factory: StageFactory, results: Results) -> Report:
    tables: list[Table] = []
    panels: list[Panel] = []
    data: dict[str, Any] = {}
    claims = []
    for language in dict.fromkeys(key[0] for key in results):  # type: ignore[index]
        language_results = [result for key, result in results.items() if key[0] == language]  # type: ignore[index]
        if any(language_results):
            _add_language(_LANGUAGE_NAMES[language], language_results, tables, panels, data)
        differences = [
            None if result is None else result["layers"][-1]["auc"] - 0.5
            for result in language_results
        ]
        claims.append(
            Claim(
                f"{_LANGUAGE_NAMES[language]}, last layer: occurrences with the same sense are "
                "closer, with an AUC of at least 0.6",
                differences,
                _MIN_AUC_GAIN,
                benefits=[
                    None
                    if result is None
                    else result["layers"][-1]["auc"] - result["layers"][0]["auc"]
                    for result in language_results
                ],
                no_benefit="no clear gain over the embeddings, which have no context",
                min_seeds=1 if factory.sources.model else MIN_SEEDS,
            )
        )
    return Report(tables, panels, data, claims)


def _add_language(
    name: str,
    results: Sequence[dict[str, Any] | None],
    tables: list[Table],
    panels: list[Panel],
    data: dict[str, Any],
) -> None:
    """Add the table, the plots and the data of a language.

    Args:
        name: The name of the language.
        results: The result of each seed, None if it is missing.
        tables: The tables to extend.
        panels: The plots to extend.
        data: The data to extend.
    """
    # Each run has the measures of the static embeddings, followed by those of the layers.
    runs = [[result["static"], *result["layers"]] if result else None for result in results]
    num_vectors = max(len(run) for run in runs if run is not None)
    vector_names = [
        "static word embedding",
        "embeddings, with position",
        *(f"layer {layer}" for layer in range(1, num_vectors - 1)),
    ]
    values_by_layer: _ValuesByLayer = {measure: {} for measure in _MEASURES}
    rows = []
    for index, vector_name in enumerate(vector_names):
        values = {
            measure: [run[index][measure] if run else None for run in runs] for measure in _MEASURES
        }
        for measure in _MEASURES:
            # The static embeddings (index 0) have layer -1.
            values_by_layer[measure][index - 1] = values[measure]
        rows.append([vector_name, *(format_mean_std(values[measure]) for measure in _MEASURES)])
        data[f"{name}, {vector_name}"] = values
    title = f"{name}: cosine distance between two occurrences of a word"
    tables.append(Table(title, ["vector", *_MEASURES.values()], rows))
    panels += _build_panels(name, values_by_layer)


def _build_panels(name: str, values_by_layer: _ValuesByLayer) -> list[Panel]:
    """Return plots of sense separation and of distances by layer."""
    separation = make_mean_plot(
        {"word vectors": values_by_layer["auc"]}, "layer", "AUC: same sense is closer", chance=0.5
    )
    curves = {
        _MEASURES[measure]: values_by_layer[measure]
        for measure in ("same_sense", "different_senses")
    }
    distances = make_mean_plot(curves, "layer", "cosine distance")
    num_layers = max(values_by_layer["auc"])
    # Fixed limits make plots of different models and languages comparable.
    return [
        Panel(
            f"{name}: separation of senses", _with_layer_axis(separation, num_layers, (0.0, 1.0))
        ),
        Panel(
            f"{name}: distance between occurrences",
            _with_layer_axis(distances, num_layers, (0.0, None)),
        ),
    ]


def _with_layer_axis(
    draw: DrawFunction, num_layers: int, limits: tuple[float, float | None]
) -> DrawFunction:
    """Return a function that draws a plot with layer names on the x axis.

    Args:
        draw: Draws the plot.
        num_layers: The number of layers.
        limits: Lower and upper limit of the y axis. An upper limit of None depends on the data.
    """

    def draw_by_layer(axes: Any) -> None:
        draw(axes)
        labels = ["static", "embed-\ndings", *map(str, range(1, num_layers + 1))]
        axes.set_xticks(range(-1, num_layers + 1), labels, fontsize=8)
        axes.set_ylim(*limits)

    return draw_by_layer


EXPERIMENT = Experiment(
    name="context",
    source="sections 2.1 and 5.3 (contextual and static vectors)",
    question="Do word vectors separate the senses of a word, and from which layer on?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={SENSES_KIND: measure_senses},
)
