"""Load the models of a server, and compute batches with them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.bundle import (
    FineTunedBundle,
    PretrainedBundle,
    load_model,
)
from bertsmith.bundle.any_model import is_bare_encoder
from bertsmith.bundle.directory import locate_embedding_model
from bertsmith.errors import BertsmithError, ModelError
from bertsmith.interop.openvino import EmbeddingBundle, OpenVINOBundle, load_embedding_encoder
from bertsmith.model.task_models import TaskModel
from bertsmith.serve.deadline import NotFiniteError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import TokenSequence
from bertsmith.tasks.outputs import compute_batch_outputs
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.embed import Embedder
from bertsmith.use.explain import AttentionMaps, EncodedTexts, compute_attention
from bertsmith.use.masked_lm import MaskedSequence, TopTokens, predict_masked_batch
from bertsmith.use.model_setup import set_up_model
from bertsmith.use.pair import check_predicts_next_sentence
from bertsmith.use.sparse import SparseVector
from bertsmith.use.token_vectors import Floats

#: Task that a fine-tuned model supports, by the kind of its head.
_TASK_BY_KIND = {
    "single": "classify", "multi": "classify", "regression": "classify", "entities": "tag",
    "tags": "tag", "span": "answer", "choice": "choose",
}  # fmt: skip


#: What a model needs for a task whose name does not say it.
_REQUIREMENTS = {
    "embed_sparse": "a masked-LM head",
    "inspect": "the weights of an encoder",
    "rerank": "one output for a pair of texts",
}


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with its tokenizer.

    Attributes:
        name: name of the model in requests.
        bundle: model and tokenizer.
        embedder: computes vectors with the same model.
        tasks: tasks that the model supports: "embed" (every model), "inspect" (attention and the
            vectors of all layers; every model except OpenVINO graphs), "fill" and "embed_sparse"
            (models with a masked-LM head), "pair", "classify", "rerank" (models with one output),
            "tag", "answer" or "choose".
        version: distinguishes models that were loaded under the same name; their sequences do not
            share batches.
    """

    name: str
    bundle: EmbeddingBundle
    embedder: Embedder
    tasks: frozenset[str]
    version: int = 0

    def with_token_counter(self, counter: TokenCounter) -> "ServedModel":
        """Return a copy of the model whose tokenizers report the tokens that they encode."""
        tokenizer = self.bundle.tokenizer.with_counter(counter)
        bundle = replace(self.bundle, tokenizer=tokenizer)
        return replace(self, bundle=bundle, embedder=self.embedder.with_token_counter(counter))


def load_served_model(
    name: str, path: Path | str, *, device: str = "cpu", fast: bool = False
) -> ServedModel:
    """Load a model.

    Args:
        name: name of the model in requests.
        path: model directory, run directory, name of a reference model or Hugging Face Hub id.
        device: where the model runs.
        fast: use 8-bit or 16-bit arithmetic for vectors and predictions.

    Raises:
        ModelError: there is no such model, or it cannot be read.
    """
    directory = locate_embedding_model(path)
    bundle: EmbeddingBundle
    if is_bare_encoder(directory):
        bundle = load_embedding_encoder(directory, device=device)
    else:
        bundle = load_model(directory, device=device)
    tasks = {"embed"}
    if not isinstance(bundle, OpenVINOBundle):
        tasks.add("inspect")
    if isinstance(bundle, FineTunedBundle):
        try:
            get_task_settings(bundle)
        except BertsmithError as error:
            warnings.warn(f"{name}: predictions are not available: {error}", stacklevel=2)
        else:
            tasks.add(_TASK_BY_KIND[bundle.head.kind])
            if bundle.head.kind == "regression":
                tasks.add("rerank")
    elif isinstance(bundle, PretrainedBundle):
        with suppress(ModelError):
            bundle.require_mlm_head()
            tasks |= {"fill", "embed_sparse"}
        with suppress(ModelError):
            check_predicts_next_sentence(bundle)
            tasks.add("pair")
    if isinstance(bundle, PretrainedBundle | FineTunedBundle):
        bundle = set_up_model(bundle, fast=fast)
    embedder = Embedder(bundle, fast=fast)
    # The files may be deleted before the first request that needs the pooler.
    embedder.preload_pooler()
    # Loads the segmenter, which would otherwise block the event loop during the first request.
    bundle.tokenizer.encode_batch(["a"])
    return ServedModel(name, bundle, embedder, frozenset(tasks))


def describe_task(task: str) -> str:
    """Return a task with what a model needs for it, for error messages."""
    requirement = _REQUIREMENTS.get(task)
    return task if requirement is None else f"{task}, which needs {requirement}"


def require_finite(
    model: str, compute: Callable[[Any], Sequence[Any]]
) -> Callable[[Any], Sequence[Any]]:
    """Wrap ``compute`` to raise NotFiniteError if an output has NaN or infinity.

    JSON cannot express these numbers. Log-probabilities may be -inf.
    """

    def compute_finite(payloads: Any) -> Sequence[Any]:
        results = compute(payloads)
        for result in results:
            if isinstance(result, TopTokens):
                values = result.log_probabilities
                is_finite = not bool((values.isnan() | values.isposinf()).any())
            else:
                numbers = result
                if isinstance(result, AttentionMaps):
                    numbers = result.probabilities
                elif isinstance(result, SparseVector):
                    numbers = result.weights
                is_finite = bool(np.isfinite(numbers).all())
            if not is_finite:
                raise NotFiniteError(model)
        return results

    return compute_finite


def compute_task_outputs(
    model: TaskModel, payloads: list[tuple[TokenSequence, list[int] | None]]
) -> list[Floats]:
    """Return the outputs of a fine-tuned model for each (sequence, token indices), in one batch.

    The token indices are None for all sequences, or for none of them.
    """
    sequences = [sequence for sequence, _ in payloads]
    token_indices = [indices for _, indices in payloads if indices is not None]
    return compute_batch_outputs(model, sequences, token_indices or None)


def compute_top_tokens(
    bundle: PretrainedBundle, payloads: list[tuple[MaskedSequence, int]]
) -> list[TopTokens]:
    """Predict the masked tokens of all sequences in one batch.

    The results of a request wait in memory for its other batches, so they must not have the
    probabilities of the whole vocabulary.

    Args:
        bundle: the model.
        payloads: the sequences, each with its number K of tokens per mask.

    Returns:
        For each sequence, the K most probable tokens at its masked positions.
    """
    sequences = [sequence for sequence, _ in payloads]
    max_top = max(top for _, top in payloads)
    results = []
    for sequence, top in payloads:
        shape = (len(sequence.masked_positions), top)
        results.append(TopTokens(torch.empty(shape), torch.empty(shape, dtype=torch.int64)))
    for predictions in predict_masked_batch(bundle, sequences):
        best = predictions.select_top(max_top)
        rows = zip(predictions.rows, best.log_probabilities, best.token_ids, strict=True)
        for (sequence_index, mask_index), log_probabilities, token_ids in rows:
            top = payloads[sequence_index][1]
            results[sequence_index].log_probabilities[mask_index] = log_probabilities[:top]
            results[sequence_index].token_ids[mask_index] = token_ids[:top]
    return results


def compute_attentions(model: ServedModel, inputs: list[EncodedTexts]) -> list[AttentionMaps]:
    """Return the attention probabilities of each text or pair."""
    return [compute_attention(model.bundle, encoded) for encoded in inputs]
