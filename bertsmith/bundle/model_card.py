"""The model card (README.md) of a model directory.

The card contains only information from the model directory, and no paths of the training machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle.config import to_hf_config
from bertsmith.bundle.directory import get_model_name
from bertsmith.bundle.mlm_head import list_untrained_weights
from bertsmith.model.config import ModelConfig
from bertsmith.plurals import shorten_list
from bertsmith.text.segmenter import SEGMENTER_NOTE
from bertsmith.text.wordpiece import Tokenizer

MODEL_CARD_FILE: Final = "README.md"
#: ``pipeline_tag`` of models in the layout of sentence-transformers.
_SENTENCE_SIMILARITY: Final = "sentence-similarity"
#: ``pipeline_tag`` of encoders without a trained head.
_FEATURE_EXTRACTION: Final = "feature-extraction"
#: ``pipeline_tag`` of rerankers.
_TEXT_RANKING: Final = "text-ranking"
#: Kinds of models without a fine-tuning task in ``build_model_card``.
EMBEDDING, ENCODER, RERANKING = "embedding", "encoder", "reranking"
#: Task kind -> ``pipeline_tag`` on the hub.
_PIPELINE_TAGS: Final = {
    "single": "text-classification", "multi": "text-classification",
    "regression": "text-classification", "entities": "token-classification",
    "tags": "token-classification", "span": "question-answering", "choice": "multiple-choice",
    EMBEDDING: _SENTENCE_SIMILARITY, ENCODER: _FEATURE_EXTRACTION, RERANKING: _TEXT_RANKING,
}  # fmt: skip
#: ``pipeline_tag`` -> name of the class of transformers that loads the model.
_AUTO_CLASSES: Final = {
    _FEATURE_EXTRACTION: "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
}
#: Maximum number of labels in a card; config.json lists all of them.
_MAX_LABELS: Final = 30


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Information for the card of a published model that its directory does not contain.

    Attributes:
        name: Name of the model, the title of the card.
        license_id: License of the weights on the hub, such as "apache-2.0"; empty if it is unknown.
        notes: Markdown text after the introduction, such as the sources of the text.
        minutes: Duration of the training in minutes; None if it is unknown.
        earlier_minutes: Duration of the trainings before it, if it continues another model.
        curve: File name of the loss curve.
        panel: Markdown text with the results of the panel; empty without results.
    """

    name: str
    license_id: str = ""
    notes: str = ""
    minutes: float | None = None
    earlier_minutes: float = 0.0
    curve: str = ""
    panel: str = ""


def build_model_card(
    config: ModelConfig,
    tokenizer: Tokenizer,
    info: Mapping[str, Any],
    kind: str | None = None,
    labels: Sequence[str] = (),
    publication: Publication | None = None,
) -> str:
    """Return a model card: YAML front matter and Markdown text.

    Without ``publication``, the license is a placeholder, because only the person who trained the
    model knows it.

    Args:
        config: The model's config.
        tokenizer: The model's tokenizer.
        info: The content of bertsmith.json.
        kind: Task kind of a fine-tuned model, "embedding", "encoder" or "reranking"; None for a
            pre-trained model with its heads.
        labels: Labels of a fine-tuned model.
        publication: Further information on a published model.
    """
    pipeline_tag = _PIPELINE_TAGS[kind] if kind else "fill-mask"
    if not kind and any(name.startswith("mlm.") for name in list_untrained_weights(info)):
        pipeline_tag = _FEATURE_EXTRACTION
    task = _to_line(info.get("task")) if kind else ""
    publication = publication or Publication(name="BERT")
    title = f"BERT fine-tuned on {task}" if task else publication.name
    layout = "Hugging Face"
    if pipeline_tag == _SENTENCE_SIMILARITY:
        title, layout = "BERT for sentence embeddings", "sentence-transformers"
    elif pipeline_tag == _TEXT_RANKING:
        title = "BERT for reranking"
    description = f"a plain BERT in the layout of {layout}"
    needs_bertsmith = to_hf_config(config)["model_type"] != "bert" or bool(info.get("features"))
    if needs_bertsmith:
        description = "a BERT that only Bertsmith loads"
        usage_lines = _bertsmith_usage_lines(kind)
    else:
        usage_lines = _usage_lines(pipeline_tag, config)
    if tokenizer.segmenter is not None:
        usage_lines += ["", f"{SEGMENTER_NOTE[0].upper()}{SEGMENTER_NOTE[1:]}."]
    label_lines = [f"- {line}" for line in shorten_list([*map(_to_line, labels)], _MAX_LABELS)]
    lines = [
        *_front_matter(info, "" if needs_bertsmith else pipeline_tag, publication.license_id),
        f"# {title}",
        "",
        f"{_describe_origin(info)}: {description}.",
        "",
        *([publication.notes.strip(), ""] if publication.notes.strip() else []),
        *_section("Model", _model_lines(config, tokenizer, info, publication.name)),
        *_section("Labels", label_lines),
        *_section("Data", _data_lines(info)),
        *_section("Training", [*_training_lines(info), *_publication_lines(publication)]),
        *_section("Results on held-out data", _result_lines(info)),
        *_section("Comparison with other models", [publication.panel] if publication.panel else []),
        *_section("Use", usage_lines),
        *_section("License", [_describe_license(publication.license_id)]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _describe_origin(info: Mapping[str, Any]) -> str:
    """Return whether Bertsmith has trained the model, or only changed its format."""
    if "provenance" in info:
        return "Trained with Bertsmith"
    source = _get_nested(info, "imported", "source")
    if not isinstance(source, str):
        return "Converted with Bertsmith"
    name = _to_line(Path(source).name)
    # Bertsmith records not the path but the format: "a TensorFlow checkpoint in V2 format".
    is_path = Path(source).name != source
    return f"Converted with Bertsmith from {f'`{name}`' if is_path else name}"


def _publication_lines(publication: Publication) -> list[str]:
    """Return the duration of the training, and the image of the loss curve."""
    lines = []
    if publication.minutes is not None:
        line = f"- training time: {publication.minutes:,.0f} minutes"
        if publication.earlier_minutes:
            line += f", after {publication.earlier_minutes:,.0f} minutes of the model it continues"
        lines.append(line)
    if publication.curve:
        lines += ["", f"![Loss curve]({publication.curve})"]
    return lines


def _describe_license(license_id: str) -> str:
    """Return the section on the license."""
    if not license_id:
        return "To be filled in by whoever trained this model, here and above."
    return f"The weights are published under the license `{_to_line(license_id)}`."


def _front_matter(info: Mapping[str, Any], pipeline_tag: str, license_id: str) -> Iterator[str]:
    """Yield the lines of the front matter. Values are written as JSON, which is valid YAML.

    Args:
        info: The content of bertsmith.json.
        pipeline_tag: The task on the hub; empty for a model that no library of the hub loads.
        license_id: License of the weights on the hub; empty if it is unknown.
    """
    is_embedder_or_reranker = pipeline_tag in (_SENTENCE_SIMILARITY, _TEXT_RANKING)
    values: dict[str, Any] = {}
    if pipeline_tag:
        library = "sentence-transformers" if is_embedder_or_reranker else "transformers"
        values = {"library_name": library, "pipeline_tag": pipeline_tag}
    values["tags"] = ["bert", "bertsmith"]
    language = _get_nested(info, "provenance", "language")
    if isinstance(language, str) and language.isalpha():
        values["language"] = language
    base_model = _base_model_name(info)
    if "/" in base_model:
        values["base_model"] = base_model
    if license_id:
        values["license"] = license_id
    yield "---"
    yield from (f"{key}: {json.dumps(value)}" for key, value in values.items())
    if not license_id:
        yield "# license: fill this in, such as apache-2.0"
    yield "---"
    yield ""


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a section with its title; empty if the section has no lines."""
    return [f"## {title}", "", *lines, ""] if lines else []


def _model_lines(
    config: ModelConfig, tokenizer: Tokenizer, info: Mapping[str, Any], name: str
) -> list[str]:
    """Return lines that describe the architecture, the vocabulary and the base model."""
    casing = "lowercased" if tokenizer.lowercase else "cased"
    lines = [
        f"- {config.layers} layers, width {config.width}, {config.heads} attention heads",
        f"- feed-forward width {config.feed_forward}, {config.activation}",
        f"- up to {config.max_positions:,} tokens",
        f"- WordPiece vocabulary of {tokenizer.vocab_size:,} tokens, {casing}",
    ]
    base_model = _base_model_name(info)
    if base_model:
        version = "an earlier version of " if base_model == name else ""
        lines.append(f"- started from {version}`{base_model}`")
    return lines


def _data_lines(info: Mapping[str, Any]) -> list[str]:
    """Return lines with the names of the training files and the size of the training data."""
    provenance = _get_nested(info, "provenance")
    sources = _get_nested(provenance, "sources")
    for table in ("embedding", "reranking", "distill"):
        if not isinstance(sources, list):
            sources = _get_nested(provenance, table, "train_files")
    if not isinstance(sources, list):
        sources = [_get_nested(provenance, "task", "train_file")]
    file_names = [Path(source).name for source in sources if isinstance(source, str) and source]
    counts = {unit: _get_nested(provenance, unit) for unit in ("documents", "tokens")}
    lines = [f"- {name}" for name in shorten_list([f"`{_to_line(name)}`" for name in file_names])]
    return lines + [
        f"- {count:,} {unit}" for unit, count in counts.items() if isinstance(count, int)
    ]


def _training_lines(info: Mapping[str, Any]) -> list[str]:
    """Return lines with the main hyperparameters."""
    provenance = _get_nested(info, "provenance")
    settings = _get_nested(provenance, "settings")
    if settings is None:
        settings = provenance
    # The model of a checkpoint has the number of its steps; the settings have that of its run.
    steps = info.get("step", _get_nested(provenance, "step"))
    if steps is None:
        steps = _get_nested(settings, "schedule", "steps")
    values = {
        "recipe": info.get("recipe"),
        "pre-training tasks": _describe_tasks(
            _get_nested(settings, "data"), _get_nested(settings, "schedule", "causal_fraction")
        ),
        "maximum sequence length": (
            _get_nested(settings, "schedule", "phase2_max_seqlen")
            or _get_nested(settings, "data", "max_seqlen")
        ),
        "steps": steps,
        "learning rate": _get_nested(settings, "optim", "lr"),
        "batch size": (
            _get_nested(settings, "data", "batch_size")
            or _get_nested(settings, "task", "batch_size")
            or _get_nested(settings, "embedding", "batch_size")
            or _get_nested(settings, "reranking", "batch_size")
            or _get_nested(settings, "distill", "batch_size")
        ),
        "loss": (
            _get_nested(settings, "embedding", "loss") or _get_nested(settings, "reranking", "loss")
        ),
        "Matryoshka dimensions": _format_dims(_get_nested(settings, "embedding")),
        "seed": _get_nested(settings, "run", "seed"),
        "precision": _get_nested(settings, "run", "precision"),
        "PyTorch": _get_nested(provenance, "torch"),
    }
    return [
        f"- {name}: {_to_line(value)}"
        for name, value in values.items()
        if isinstance(value, str | int | float)
    ]


def _format_dims(embedding: Any) -> str | None:
    """Return the Matryoshka dimensions in the settings of an embedding model; None without any."""
    dims = _get_nested(embedding, "matryoshka_dims")
    return ", ".join(map(str, dims)) if isinstance(dims, list) and dims else None


def _describe_tasks(data: Any, causal_fraction: Any) -> str | None:
    """Return the pre-training tasks; None for models that Bertsmith has not pre-trained.

    Args:
        data: The settings of the training examples in bertsmith.json.
        causal_fraction: Fraction of the run that is left to right, in bertsmith.json.
    """
    if not isinstance(data, Mapping):
        return None
    is_causal = data.get("objective") == "left-to-right"
    tasks = "left-to-right language model" if is_causal else "masked LM"
    if isinstance(causal_fraction, float) and causal_fraction > 0:
        tasks = f"left-to-right language model ({causal_fraction:.0%} of the run), then {tasks}"
    if not data.get("nsp", True):
        return tasks
    if data.get("pair_objective") == "sop":
        return f"{tasks} and sentence order (the next-sentence head predicts 1 for swapped texts)"
    return f"{tasks} and next-sentence prediction"


def _result_lines(info: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the metrics on held-out data."""
    metrics = info.get("heldout_metrics")
    if not isinstance(metrics, Mapping):
        return []
    rows = [
        f"| {_to_line(name)} | {value:,.6g} |"
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
    return ["| metric | value |", "| --- | ---: |", *rows] if rows else []


def _usage_lines(pipeline_tag: str, config: ModelConfig) -> list[str]:
    """Return the lines of Python code that load the model with the library of its layout."""
    if pipeline_tag == _SENTENCE_SIMILARITY:
        return [
            "```python",
            "from sentence_transformers import SentenceTransformer",
            "",
            'model = SentenceTransformer("path or hub id")',
            'vectors = model.encode(["a sentence", "another"])',
            "```",
        ]
    if pipeline_tag == _TEXT_RANKING:
        return [
            "```python",
            "from sentence_transformers import CrossEncoder",
            "",
            'model = CrossEncoder("path or hub id")',
            'scores = model.predict([("a query", "a document"), ("a query", "another document")])',
            "```",
        ]
    pretrained_class = "AutoModelForPreTraining" if config.nsp else "AutoModelForMaskedLM"
    class_name = _AUTO_CLASSES.get(pipeline_tag, pretrained_class)
    return [
        "```python",
        f"from transformers import {class_name}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("path or hub id")',
        f'model = {class_name}.from_pretrained("path or hub id")',
        "```",
    ]


def _bertsmith_usage_lines(kind: str | None) -> list[str]:
    """Return the lines of code for a model that only Bertsmith loads; see ``build_model_card``."""
    if kind is None:
        code = ["import bertsmith", "", 'model = bertsmith.load("path or hub id")']
        return ["```python", *code, "```"]
    command = 'bertsmith predict "path or hub id" --input texts.txt'
    if kind == RERANKING:
        command = 'bertsmith rerank "path or hub id" "a query" "a document" "another document"'
    elif kind == ENCODER:
        command = 'bertsmith embed "path or hub id" texts.txt --out vectors.npy'
    return ["```sh", command, "```"]


def _base_model_name(info: Mapping[str, Any]) -> str:
    """Return the hub id or the folder name of the model that training started from, or ""."""
    for keys in (("provenance", "settings", "run"), ("provenance", "run")):
        start_from = _get_nested(info, *keys, "start_from")
        if isinstance(start_from, str) and start_from:
            path = Path(start_from)
            if not path.is_absolute():
                return _to_line(start_from)
            # Earlier versions recorded the path.
            return _to_line(get_model_name(path))
    return ""


def _get_nested(values: Any, *keys: str) -> Any:
    """Return the value under successive keys in nested mappings; None if a key is missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _to_line(value: object) -> str:
    """Return a value as one line of text for a Markdown table cell or code span."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
