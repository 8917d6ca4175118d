"""Vocabulary size: loss per character, and time and memory of the output softmax."""

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
    make_line_plot,
    make_mean_plot,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory, get_heldout_metric
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings, build_phases

#: Vocabulary sizes by scale.
_LARGE_SIZES = (8000, 16000, 32000)
_SIZES = {"smoke": (300, 400), "small": _LARGE_SIZES, "medium": _LARGE_SIZES, "full": _LARGE_SIZES}
#: Vocabulary sizes for the measurements of the softmax.
_SOFTMAX_SIZES = (8000, 16000, 32000, 64000, 128000)
#: Number of timed passes per measurement.
_SOFTMAX_REPEATS = 5
_SOFTMAX_KIND = "softmax"
#: The number of steps of other experiments is divided by this number, because it is slow to predict
#: every token with a large vocabulary.
_STEPS_DIVISOR = 2
#: Names of the combinations of language and morpheme segmenter.
_TEXT_NAMES = {("en", None): "English", ("ko", None): "Korean", ("ko", "kiwi"): "Korean, morphemes"}
#: Measures of a vocabulary with their cell formats, in the order of the columns.
_CELL_FORMATS = {"vocab_size": ",.0f", "tokens_per_sentence": ".1f", "unk_rate": ".3%",
                 "characters_per_token": ".2f", "max_training_kilocharacters": ",.0f"}  # fmt: skip


def measure_softmax(job: Job) -> dict[str, Any]:
    """Measure time and memory of the output softmax; see ``lab.softmax``.

    Returns:
        ``rows``, with the vocabulary size, the bytes of weights with optimizer state, and the cost
        of each implementation.
    """
    settings = job.stage.settings
    rows = []
    for vocab_size in settings["vocab_sizes"]:
        costs = {
            name: softmax.measure_in_subprocess(
                name,
                vocab_size,
                width=settings["width"],
                num_predictions=settings["num_predictions"],
                num_repeats=settings["num_repeats"],
            )
            for name in softmax.IMPLEMENTATIONS
        }
        # Weights, biases and the two moments of Adam, with 4 bytes per number.
        weights_bytes = 3 * 4 * vocab_size * (settings["width"] + 1)
        rows.append({"vocab_size": vocab_size, "weights_bytes": weights_bytes, **costs})
    return {"rows": rows}


def _count_steps(factory: StageFactory) -> int:
    """Return the number of training steps of each model."""
    return max(1, factory.scale.num_steps // _STEPS_DIVISOR)


def _list_texts(factory: StageFactory) -> list[tuple[str, str | None]]:
    """Return the combinations of language and segmenter that have text."""
    return [text for text in _TEXT_NAMES if text[0] == "en" or factory.sources.korean is not None]


def _build_stages(factory: StageFactory) -> Stages:
    scale = factory.scale
    softmax_settings = {
        "width": scale.width,
        "num_predictions": round(0.15 * scale.batch_size * scale.max_length),
        "vocab_sizes": list(_SOFTMAX_SIZES if scale.name != "smoke" else _SOFTMAX_SIZES[:2]),
        "num_repeats": _SOFTMAX_REPEATS,
    }
    stages: Stages = {"softmax": Stage(_SOFTMAX_KIND, softmax_settings)}
    for language, segment in _list_texts(factory):
        for size in _SIZES[scale.name]:
            store = factory.create_store_stage(language, size, segment)
            stages[language, segment, size, "vocabulary"] = store.dependencies["vocabulary"]
            stages[language, segment, size, "store"] = store
            for seed in range(scale.num_seeds):
                # MLM losses of different vocabularies are not comparable, because the other tokens
                # of a word help to predict a masked token. Losses per character of left-to-right
                # models are comparable, except that spaces between morphemes are not predicted.
                stages[language, segment, size, seed] = factory.create_left_to_right_run(
                    seed, store=store, steps=_count_steps(factory)
                )
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    losses: dict[str, dict[int, list[float | None]]] = {}
    for language, segment in _list_texts(factory):
        name = _TEXT_NAMES[language, segment]
        for size in _SIZES[factory.scale.name]:
            values = _measure_vocabulary(factory, results, (language, segment, size))
            data[f"{name}, {size}"] = values
            losses.setdefault(name, {})[size] = values["nats_per_character"]
            cells = (
                _format_cell(values[key], format_spec) for key, format_spec in _CELL_FORMATS.items()
            )
            token_loss = format_mean_std(values["nats_per_token"])
            character_loss = format_mean_std(values["nats_per_character"], ".4f")
            rows.append([name, f"{size:,}", *cells, token_loss, character_loss])
    columns = ["text", "requested size", "vocabulary size", "tokens per sentence",
               "share of [UNK] words", "characters per token",
               "maximum characters seen, thousands", "nats per token",
               "nats per character"]  # fmt: skip
    softmax_result = results["softmax"]
    data["softmax"] = softmax_result["rows"] if softmax_result else []
    title = (
        f"Vocabularies, left to right, after {_count_steps(factory):,} steps (the paper's "
        "vocabulary has 30,000 entries; [UNK] and spaces before morphemes are not predicted)"
    )
    softmax_table, softmax_panels = _build_softmax_report(data["softmax"])
    tables = [Table(title, columns, rows), softmax_table]
    return Report(tables, [*_build_loss_panels(losses), *softmax_panels], data)


def _build_loss_panels(
    losses: Mapping[str, Mapping[int, Sequence[float | None]]],
) -> Iterator[Panel]:
    """Yield one plot per language, because losses of different languages are not comparable."""
    for language in ("English", "Korean"):
        curves = {name: curve for name, curve in losses.items() if name.startswith(language)}
        if curves:
            plot = make_mean_plot(curves, "vocabulary size", "nats per character")
            sizes = next(iter(curves.values()))
            yield Panel(f"loss by vocabulary size, {language}", _with_size_axis(plot, sizes))


def _with_size_axis(draw: DrawFunction, sizes: Iterable[int]) -> DrawFunction:
    """Return a function that draws a plot with the vocabulary sizes as ticks of the x axis."""

    def draw_by_size(axes: Any) -> None:
        draw(axes)
        axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])

    return draw_by_size


def _build_softmax_report(costs: list[dict[str, Any]]) -> tuple[Table, list[Panel]]:
    """Return the table and the plots with time and memory of the softmax."""
    labels = softmax.IMPLEMENTATIONS
    rows = [
        [
            f"{cost['vocab_size']:,}",
            f"{cost['weights_bytes'] / 2**20:,.0f}",
            *(f"{1000 * cost[name]['seconds']:,.1f}" for name in labels),
            *(f"{cost[name]['bytes'] / 2**20:,.0f}" for name in labels),
        ]
        for cost in costs
    ]
    columns = [
        "vocabulary size",
        "MiB of weights and Adam's moments",
        *(f"ms per step, {label}" for label in labels.values()),
        *(f"additional MiB with gradients, {label}" for label in labels.values()),
    ]
    panels = []
    for field, title, unit, factor in (
        ("seconds", "time", "ms per step", 1000),
        ("bytes", "additional memory", "MiB", 1 / 2**20),
    ):
        series = {
            label: [(cost["vocab_size"] / 1000, factor * cost[name][field]) for cost in costs]
            for name, label in labels.items()
        }
        plot = make_line_plot(series, "vocabulary size, thousands", unit)
        panels.append(Panel(f"output softmax: {title}", plot))
    table_title = "Output softmax by vocabulary size, forward and backward"
    return Table(table_title, columns, rows), panels


def _measure_vocabulary(
    factory: StageFactory, results: Results, key: tuple[str, str | None, int]
) -> dict[str, Any]:
    """Return the measures of a vocabulary. Measures whose results are missing are None.

    Characters are counted before the text is segmented into morphemes.

    Args:
        factory: The factory with the scale.
        results: The results of the experiment.
        key: Language, segmenter and requested vocabulary size.
    """
    vocabulary, store = results[*key, "vocabulary"], results[*key, "store"]
    losses = [get_heldout_metric(results[*key, seed]) for seed in range(factory.scale.num_seeds)]
    values: dict[str, Any] = dict.fromkeys(_CELL_FORMATS)
    values |= {"nats_per_token": losses, "nats_per_character": []}
    if vocabulary is None or store is None:
        return values
    splits = store["splits"].values()
    num_tokens = sum(split["tokens"] for split in splits)
    characters_per_token = store["characters"] / num_tokens
    num_training_tokens = _count_max_training_tokens(factory)
    values |= {
        "vocab_size": vocabulary["vocab_size"],
        "tokens_per_sentence": num_tokens / sum(split["sentences"] for split in splits),
        "unk_rate": vocabulary["unk_rate"],
        "characters_per_token": characters_per_token,
        "max_training_kilocharacters": num_training_tokens * characters_per_token / 1000,
        "nats_per_character": [
            None if loss is None else loss / characters_per_token for loss in losses
        ],
    }
    return values


def _count_max_training_tokens(factory: StageFactory) -> int:
    """Return the number of training tokens if every sequence has the maximum length."""
    settings = factory.create_left_to_right_run(0, steps=_count_steps(factory)).settings
    schedule = PretrainScheduleSettings.parse(
        {**settings["schedule"], "steps": settings["steps"]}, "a run"
    )
    phases = build_phases(schedule, factory.scale.max_length)
    num_tokens = sum((phase.end_step - phase.start_step) * phase.max_seqlen for phase in phases)
    return factory.scale.batch_size * num_tokens


def _format_cell(value: float | None, format_spec: str) -> str:
    return EMPTY_CELL if value is None else format(value, format_spec)


EXPERIMENT = Experiment(
    name="vocabulary",
    source="section 3 (WordPiece of 30,000 words)",
    question="Which vocabulary size is best with and without morphemes, and what does it cost?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={_SOFTMAX_KIND: measure_softmax},
)
