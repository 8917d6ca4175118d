"""Describe models, runs, checkpoints and settings, as lines of text and as JSON values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bertsmith import bundle
from bertsmith.plurals import count_noun
from bertsmith.settings import read_stored_settings
from bertsmith.text.vocabulary_report import describe_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.use.inspection.description import (
    Description,
    draw_sparkline,
    flatten_mapping,
    format_aligned,
    read_json_object,
)

#: Sections of bertsmith.json that are too long to print. JSON output includes them.
_LONG_SECTIONS = frozenset({"settings", "tokenizer"})


@dataclass(frozen=True)
class TensorSummary:
    """Statistics of a stored tensor.

    Attributes:
        name: Name of the tensor.
        dtype: Name of the dtype.
        shape: Shape of the tensor.
        mean: Mean of the finite values.
        std: Standard deviation of the finite values.
        num_nonfinite: Number of infinite and NaN values.
    """

    name: str
    dtype: str
    shape: list[int]
    mean: float
    std: float
    num_nonfinite: int


def summarize_tensors(path: Path) -> list[TensorSummary]:
    """Summarize every tensor of a safetensors file, loading one at a time.

    Raises:
        ModelError: The file cannot be read.
    """
    return _summarize_stored_tensors(bundle.list_file_tensors(path))


def _summarize_stored_tensors(tensors: Mapping[str, bundle.StoredTensor]) -> list[TensorSummary]:
    """Load the tensors one at a time and summarize them."""
    return [_summarize_tensor(name, tensor.load()) for name, tensor in tensors.items()]


def _summarize_tensor(name: str, tensor: torch.Tensor) -> TensorSummary:
    """Compute the statistics of a tensor."""
    values = tensor.float().flatten()
    finite = values[values.isfinite()]
    mean, std = 0.0, 0.0
    if finite.numel():
        variance_tensor, mean_tensor = torch.var_mean(finite, correction=0)
        mean, std = float(mean_tensor), float(variance_tensor.sqrt())
    dtype = str(tensor.dtype).removeprefix("torch.")
    num_nonfinite = values.numel() - finite.numel()
    return TensorSummary(name, dtype, list(tensor.shape), mean, std, num_nonfinite)


def describe_tensors(path: Path) -> Description:
    """Describe a safetensors file."""
    summaries = summarize_tensors(path)
    facts = {"path": str(path), "tensors": [asdict(summary) for summary in summaries]}
    return Description(facts, [f"tensors: {len(summaries)}", *_format_table(summaries)])


def describe_model(path: Path) -> Description:
    """Describe a model directory: its config, size, tensors, vocabulary and provenance."""
    directory = bundle.locate_model(path)
    info = bundle.read_info(directory)
    config = bundle.read_config(directory, info)
    weights = bundle.open_weights(directory, config)
    summaries = _summarize_stored_tensors(bundle.list_tensors(directory))
    heads = _list_heads(directory, weights, info)
    vocabulary = describe_vocabulary(Tokenizer.load(directory))
    sections = [("config", config.model_dump()), ("bertsmith.json", _without_long_sections(info))]
    layers = count_noun(config.layers, "layer")
    sizes = f"{layers}, width {config.width}, {count_noun(config.heads, 'head')}"
    parameters = count_noun(weights.num_parameters, "parameter")
    lines = [
        f"model directory {directory}",
        f"{parameters}: {sizes}; on top: {', '.join(heads) or 'nothing'}",
    ]
    for title, values in sections:
        lines += ["", title, *format_aligned(flatten_mapping(values))]
    lines += ["", "vocabulary", *(f"  {line}" for line in vocabulary.lines())]
    lines += ["", f"tensors: {len(summaries)}", *_format_table(summaries)]
    facts = {
        "path": str(directory),
        "num_parameters": weights.num_parameters,
        "heads": heads,
        "config": config.model_dump(),
        "metadata": info,
        "vocabulary": vocabulary.to_json(),
        "tensors": [asdict(summary) for summary in summaries],
    }
    return Description(facts, lines)


def _list_heads(
    directory: Path, weights: bundle.StoredWeights, info: Mapping[str, Any]
) -> list[str]:
    """Return the names of the heads whose weights are stored."""
    if bundle.is_fine_tuned(directory):
        return [f"fine-tuned ({info.get('kind', 'a task')})"]
    data = info.get("provenance", {}).get("settings", {}).get("data", {})
    lm_name = "next word" if data.get("objective") == "left-to-right" else "masked LM"
    pair_name = "sentence order" if data.get("pair_objective") == "sop" else "next sentence"
    heads = {lm_name: weights.has_mlm_head, pair_name: weights.has_nsp_head}
    return [name for name, exists in heads.items() if exists]


def is_finished_run(run: Path) -> bool:
    """Return whether a run is finished and has written its model."""
    return (run / "model" / bundle.WEIGHTS_FILE).is_file()


def describe_run(path: Path) -> Description:
    """Describe a run directory: its settings, progress, metrics and checkpoints."""
    settings = read_stored_settings(path / "settings.toml")
    records = metrics_log.read_metrics(path)
    checkpoints = [
        (step, _compute_directory_bytes(folder))
        for step, folder in checkpoint.list_checkpoints(path)
    ]
    last_metrics = {kind: _find_last_record(records, kind) for kind in ("train", "heldout")}
    step = max((record.get("step", 0) for record in records), default=0)
    steps = settings.get("schedule", {}).get("steps")
    finished = is_finished_run(path)
    state = "finished" if finished else "not finished; repeat the same command to continue"
    total = f"{steps:,}" if steps else "unknown"
    lines = [f"run {path}: {state}", f"step {step:,} of {total}"]
    for kind, name in (("train", "training batches"), ("heldout", "held out")):
        if last_metrics[kind]:
            lines += ["", name, *format_aligned(flatten_mapping(last_metrics[kind]))]
            # Pre-training logs "mlm_loss", fine-tuning only "loss".
            loss = "mlm_loss" if "mlm_loss" in last_metrics[kind] else "loss"
            values = [
                record[loss] for record in records if record.get("kind") == kind and loss in record
            ]
            lines += draw_sparkline(values, "masked-LM loss" if loss == "mlm_loss" else loss)
    lines += ["", "checkpoints" if checkpoints else "no checkpoint yet"]
    lines += [f"  step-{step:<10} {size / 2**20:10,.1f} MiB" for step, size in checkpoints]
    lines += ["", "settings", *format_aligned(flatten_mapping(settings))]
    facts = {
        "path": str(path),
        "finished": finished,
        "step": step,
        "steps": steps,
        "last_metrics": last_metrics,
        "checkpoints": [{"step": step, "bytes": size} for step, size in checkpoints],
        "settings": settings,
    }
    return Description(facts, lines)


def describe_checkpoint(path: Path) -> Description:
    """Describe a checkpoint: the training state, the weights, and Adam's moments."""
    state = read_json_object(path / checkpoint.STATE_FILE)
    weights = summarize_tensors(path / checkpoint.WEIGHTS_FILE)
    # The moments are removed when the run is finished.
    has_moments = (path / checkpoint.MOMENTS_FILE).exists()
    stored = summarize_tensors(path / checkpoint.MOMENTS_FILE) if has_moments else []
    # Step counts of parameters that were not trained in all steps are in the same file.
    moments = [tensor for tensor in stored if not tensor.name.endswith(".step")]
    lines = [f"checkpoint {path}", *format_aligned(flatten_mapping(state))]
    lines += ["", f"weights: {count_noun(len(weights), 'tensor')}", *_format_table(weights)]
    if has_moments:
        lines += ["", f"moments: {count_noun(len(moments), 'tensor')}", *_format_table(moments)]
    else:
        lines += ["", "no optimizer state (a finished run removes it)"]
    facts = {
        "path": str(path),
        "state": state,
        "weights": [asdict(summary) for summary in weights],
        "moments": [asdict(summary) for summary in moments],
    }
    return Description(facts, lines)


def describe_settings(path: Path) -> Description:
    """Describe a settings file."""
    settings = read_stored_settings(path)
    facts = {"path": str(path), "settings": settings}
    return Description(facts, [f"settings {path}", *format_aligned(flatten_mapping(settings))])


def _compute_directory_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _find_last_record(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the last record of a kind in the metrics log, without its key "kind".

    The result is empty if there is no record of this kind.
    """
    matching = [record for record in records if record.get("kind") == kind]
    if not matching:
        return {}
    return {key: value for key, value in matching[-1].items() if key != "kind"}


def _without_long_sections(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the sections named in ``_LONG_SECTIONS``, at any depth."""
    return {
        key: _without_long_sections(value) if isinstance(value, Mapping) else value
        for key, value in info.items()
        if key not in _LONG_SECTIONS
    }


def _format_table(summaries: list[TensorSummary]) -> list[str]:
    """Format a table with the name, shape, dtype, mean and standard deviation of each tensor."""
    if not summaries:
        return []
    shapes = [" x ".join(map(str, summary.shape)) or "scalar" for summary in summaries]
    name_width = max(len(summary.name) for summary in summaries)
    shape_width = max(map(len, shapes))
    lines = [
        f"  {'':{name_width}}  {'shape':>{shape_width}}  {'dtype':8}  {'mean':>10}  {'std':>10}"
    ]
    for summary, shape in zip(summaries, shapes, strict=True):
        statistics = f"{summary.mean:10.3g}  {summary.std:10.3g}"
        if summary.num_nonfinite:
            statistics += (
                f"  {count_noun(summary.num_nonfinite, 'value is', 'values are')} not finite"
            )
        lines.append(
            f"  {summary.name:{name_width}}  {shape:>{shape_width}}  {summary.dtype:8}  "
            f"{statistics}"
        )
    return lines
