"""The model card, README.md: what is known of a model, for those who meet it on a hub.

It never knows more than the model directory says, and names no folder of the machine it came from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle.directory import hub_id_of
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer

MODEL_CARD_FILE: Final = "README.md"
#: The hub's name for what a model does, by its kind; none for what the hub has no name for.
_PIPELINES: Final = {
    "single": "text-classification", "multi": "text-classification",
    "regression": "text-classification", "entities": "token-classification",
    "tags": "token-classification", "span": "question-answering", "choice": "multiple-choice",
}  # fmt: skip
_CLASSES: Final = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
}
#: Labels that a card shows; all of them stand in config.json.
_LABELS: Final = 30


def build_model_card(
    config: ModelConfig,
    tokenizer: Tokenizer,
    info: Mapping[str, Any],
    kind: str | None = None,
    labels: Sequence[str] = (),
) -> str:
    """Return the card: front matter that the hub reads, and a text for people.

    ``kind`` and ``labels``: those of a fine-tuned model, None and none of a pre-trained one.
    The licence is left to fill in: only those who trained the model can say it.
    """
    pipeline = _PIPELINES[kind] if kind else "fill-mask"
    task = _text(info.get("task")) if kind else ""
    title = f"BERT fine-tuned on {task}" if task else "BERT"
    lines = [
        *_front(info, pipeline),
        f"# {title}",
        "",
        "Made with Bertsmith: a plain BERT in the layout of Hugging Face.",
        "",
        *_section("Model", _shape(config, tokenizer, info)),
        *_section("Labels", [f"- {_text(label)}" for label in labels[:_LABELS]]
                  + [f"- and {len(labels) - _LABELS:,} more"] * (len(labels) > _LABELS)),
        *_section("Data", _data(info)),
        *_section("Training", _training(info)),
        *_section("Results on held-out data", _results(info)),
        *_section("Use", _use(pipeline, config)),
        *_section("Licence", ["To be filled in by whoever trained this model, here and above."]),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _front(info: Mapping[str, Any], pipeline: str) -> Iterator[str]:
    """Yield the front matter; values are JSON, which YAML reads as it is."""
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["bert", "bertsmith"],
    }
    language = _at(info, "provenance", "language")
    if isinstance(language, str) and language.isalpha():
        values["language"] = language
    base = _base(info)
    if "/" in base:
        values["base_model"] = base
    yield "---"
    yield from (f"{name}: {json.dumps(value)}" for name, value in values.items())
    yield "# license: fill this in, such as apache-2.0"
    yield "---"
    yield ""


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []


def _shape(config: ModelConfig, tokenizer: Tokenizer, info: Mapping[str, Any]) -> list[str]:
    base = _base(info)
    case = "lower case" if tokenizer.lowercase else "case kept"
    lines = [
        f"- {config.layers} layers, width {config.width}, {config.heads} attention heads",
        f"- feed-forward width {config.feed_forward}, {config.activation}",
        f"- up to {config.max_positions:,} tokens",
        f"- WordPiece of {tokenizer.vocab_size:,} words, {case}",
    ]
    return [*lines, f"- started from `{base}`"] if base else lines


def _data(info: Mapping[str, Any]) -> list[str]:
    """Say what it was trained on: the names of files, never their folders."""
    made, task = _at(info, "provenance"), _at(info, "provenance", "task")
    sources = _at(made, "sources")
    if not isinstance(sources, list):
        sources = [_at(task, "train")]
    names = [Path(name).name for name in sources if isinstance(name, str) and name]
    counts = {unit: _at(made, unit) for unit in ("documents", "tokens")}
    lines = [f"- `{_text(name)}`" for name in names]
    return lines + [f"- {own:,} {unit}" for unit, own in counts.items() if isinstance(own, int)]


def _training(info: Mapping[str, Any]) -> list[str]:
    made = _at(info, "provenance")
    settings = _at(made, "settings") if _at(made, "settings") is not None else made
    known = {
        "recipe": info.get("recipe"),
        "steps": _at(settings, "schedule", "steps"),
        "learning rate": _at(settings, "optim", "lr"),
        "batch": _at(settings, "data", "batch") or _at(settings, "task", "batch"),
        "seed": _at(settings, "run", "seed"),
        "precision": _at(settings, "run", "precision"),
        "PyTorch": _at(made, "torch"),
    }
    return [f"- {name}: {_text(value)}" for name, value in known.items()
            if isinstance(value, str | int | float)]  # fmt: skip


def _results(info: Mapping[str, Any]) -> list[str]:
    figures = info.get("heldout")
    rows = [f"| {_text(name)} | {value:,.6g} |" for name, value in figures.items()
            if isinstance(value, int | float)] if isinstance(figures, Mapping) else []  # fmt: skip
    return ["| measure | value |", "| --- | ---: |", *rows] if rows else []


def _use(pipeline: str, config: ModelConfig) -> list[str]:
    plain = "AutoModelForPreTraining" if config.nsp else "AutoModelForMaskedLM"
    name = _CLASSES.get(pipeline, plain)
    return [
        "```python",
        f"from transformers import {name}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("path or hub id")',
        f'model = {name}.from_pretrained("path or hub id")',
        "```",
    ]


def _base(info: Mapping[str, Any]) -> str:
    """Return the model that training began with: its hub id, or its name without folders."""
    for places in (("provenance", "settings", "run"), ("provenance", "run")):
        said = _at(info, *places, "start_from")
        if isinstance(said, str) and said:
            path = Path(said)
            named = path.parent if path.name == "model" else path
            return hub_id_of(path) or _text(named.name)
    return ""


def _at(values: Any, *keys: str) -> Any:
    """Return what stands in nested tables at ``keys``, None where one of them is not there."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _text(value: object) -> str:
    """Return a value on one line, with nothing that would end a cell or a span of code."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
