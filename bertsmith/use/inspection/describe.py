"""Describe models, runs, checkpoints and settings, for human eyes and as plain values.

It never knows how a description is shown, and changes nothing that it looks at.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bertsmith import bundle
from bertsmith.settings import read_toml
from bertsmith.text.vocabulary_report import describe_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.use.inspection.description import (
    Description,
    flatten,
    format_aligned,
    read_json_object,
    sparkline,
)

#: The parts of bertsmith.json that are shown elsewhere, or only as JSON: they are long.
_LONG = frozenset({"settings", "tokenizer"})


@dataclass(frozen=True)
class TensorSummary:
    """One stored tensor. mean, deviation: over its finite values; strange: how many are not."""

    name: str
    dtype: str
    shape: list[int]
    mean: float
    deviation: float
    strange: int


def summarize_tensors(path: Path) -> list[TensorSummary]:
    """Return facts of every tensor of a safetensors file, one in memory at a time.

    Raises ModelError if it cannot be read.
    """
    return _facts_of_all(bundle.list_file_tensors(path))


def _facts_of_all(stored: Mapping[str, bundle.StoredTensor]) -> list[TensorSummary]:
    return [_facts_of(name, one.load()) for name, one in stored.items()]


def _facts_of(name: str, tensor: torch.Tensor) -> TensorSummary:
    values = tensor.float().flatten()
    finite = values[values.isfinite()]
    mean, deviation = 0.0, 0.0
    if finite.numel():
        variance, middle = torch.var_mean(finite, correction=0)
        mean, deviation = float(middle), float(variance.sqrt())
    dtype = str(tensor.dtype).removeprefix("torch.")
    strange = values.numel() - finite.numel()
    return TensorSummary(name, dtype, list(tensor.shape), mean, deviation, strange)


def describe_tensors(path: Path) -> Description:
    """Describe a safetensors file."""
    found = summarize_tensors(path)
    facts = {"path": str(path), "tensors": [asdict(one) for one in found]}
    return Description(facts, [f"tensors: {len(found)}", *_table(found)])


def describe_model(path: Path) -> Description:
    """Describe a model directory: config, size, tensors, words and where it comes from."""
    directory = bundle.locate_model(path)
    source = directory / bundle.INFO_FILE
    info: dict[str, Any] = read_json_object(source) if source.exists() else {}
    config = bundle.read_config(directory, info)
    weights = bundle.open_weights(directory, config)
    found = _facts_of_all(bundle.list_tensors(directory))
    heads = _heads(directory, weights, info)
    words = describe_vocabulary(Tokenizer.load(directory))
    shown = [("config", config.model_dump()), ("bertsmith.json", _without_long(info))]
    sizes = f"{config.layers} layers, width {config.width}, {config.heads} heads"
    lines = [
        f"model directory {directory}",
        f"{weights.num_parameters:,} parameters: {sizes}; on top: {', '.join(heads) or 'nothing'}",
    ]
    for title, values in shown:
        lines += ["", title, *format_aligned(flatten(values))]
    lines += ["", "words", *(f"  {line}" for line in words.lines())]
    lines += ["", f"tensors: {len(found)}", *_table(found)]
    facts = {
        "path": str(directory),
        "parameters": weights.num_parameters,
        "heads": heads,
        "config": config.model_dump(),
        "info": info,
        "words": words.to_json(),
        "tensors": [asdict(one) for one in found],
    }
    return Description(facts, lines)


def _heads(directory: Path, weights: bundle.StoredWeights, info: Mapping[str, Any]) -> list[str]:
    """Return what stands on the encoder, by the weights that are there."""
    if bundle.is_fine_tuned(directory):
        return [f"fine-tuned ({info.get('kind', 'a task')})"]
    objective = info.get("provenance", {}).get("settings", {}).get("data", {}).get("objective")
    word = "next word" if objective == "left-to-right" else "masked LM"
    there = {word: weights.has_mlm_head, "next sentence": weights.has_nsp_head}
    return [name for name, has in there.items() if has]


def is_finished(run: Path) -> bool:
    """Tell whether a RUN has come to its end and has written its model."""
    return (run / "model" / bundle.WEIGHTS_FILE).is_file()


def describe_run(path: Path) -> Description:
    """Describe a RUN: its settings, how far it is, its figures and checkpoints."""
    settings = read_toml(path / "settings.toml")
    told = metrics_log.read_metrics(path)
    stored = [(step, _bytes(folder)) for step, folder in checkpoint.list_checkpoints(path)]
    last = {kind: _last(told, kind) for kind in ("train", "heldout")}
    step = max((line.get("step", 0) for line in told), default=0)
    steps = settings.get("schedule", {}).get("steps")
    finished = is_finished(path)
    state = "finished" if finished else "not finished: the same command goes on with it"
    lines = [f"run {path}: {state}", f"step {step:,} of {f'{steps:,}' if steps else 'unknown'}"]
    for kind, name in (("train", "training batches"), ("heldout", "held out")):
        if last[kind]:
            lines += ["", name, *format_aligned(flatten(last[kind]))]
            # A pre-training's loss of words, or the one loss of a fine-tuning.
            loss = "masked_lm" if "masked_lm" in last[kind] else "loss"
            values = [line[loss] for line in told if line.get("kind") == kind and loss in line]
            lines += sparkline(values, "masked-LM loss" if loss == "masked_lm" else loss)
    lines += ["", "checkpoints" if stored else "no checkpoint yet"]
    lines += [f"  step-{step:<10} {size / 2**20:10,.1f} MiB" for step, size in stored]
    lines += ["", "settings", *format_aligned(flatten(settings))]
    facts = {
        "path": str(path),
        "finished": finished,
        "step": step,
        "steps": steps,
        "last": last,
        "checkpoints": [{"step": step, "bytes": size} for step, size in stored],
        "settings": settings,
    }
    return Description(facts, lines)


def describe_checkpoint(path: Path) -> Description:
    """Describe a checkpoint: where the run stood, its weights, and the optimizer's moments."""
    state = read_json_object(path / checkpoint.STATE_FILE)
    weights = summarize_tensors(path / checkpoint.WEIGHTS_FILE)
    # A finished run keeps the weights alone.
    has_moments = (path / checkpoint.MOMENTS_FILE).exists()
    moments = summarize_tensors(path / checkpoint.MOMENTS_FILE) if has_moments else []
    lines = [f"checkpoint {path}", *format_aligned(flatten(state))]
    lines += ["", f"weights: {len(weights)} tensors", *_table(weights)]
    if has_moments:
        lines += ["", f"moments: {len(moments)} tensors", *_table(moments)]
    else:
        lines += ["", "no optimizer state (a finished run removes it)"]
    facts = {
        "path": str(path),
        "state": state,
        "weights": [asdict(one) for one in weights],
        "moments": [asdict(one) for one in moments],
    }
    return Description(facts, lines)


def describe_settings(path: Path) -> Description:
    """Describe a settings file."""
    settings = read_toml(path)
    facts = {"path": str(path), "settings": settings}
    return Description(facts, [f"settings {path}", *format_aligned(flatten(settings))])


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _last(lines: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [line for line in lines if line.get("kind") == kind]
    return {key: value for key, value in found[-1].items() if key != "kind"} if found else {}


def _without_long(info: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is shown elsewhere, at any depth."""
    return {
        key: _without_long(value) if isinstance(value, Mapping) else value
        for key, value in info.items()
        if key not in _LONG
    }


def _table(found: list[TensorSummary]) -> list[str]:
    """Return a line a tensor: name, shape, dtype, mean, deviation."""
    if not found:
        return []
    shapes = [" x ".join(map(str, one.shape)) or "scalar" for one in found]
    name, shape = max(len(one.name) for one in found), max(map(len, shapes))
    lines = [f"  {'':{name}}  {'shape':>{shape}}  {'dtype':8}  {'mean':>10}  {'deviation':>10}"]
    for one, size in zip(found, shapes, strict=True):
        figures = f"{one.mean:10.3g}  {one.deviation:10.3g}"
        strange = f"  {one.strange:,} values are not finite" if one.strange else ""
        lines.append(f"  {one.name:{name}}  {size:>{shape}}  {one.dtype:8}  {figures}{strange}")
    return lines
