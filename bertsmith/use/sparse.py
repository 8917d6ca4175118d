"""Sparse vectors of texts (SPLADE): a weight for each entry of the vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import PretrainedBundle
from bertsmith.interop.sentence_transformers.splade import SpladeConfig
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.use.embed import Embedder
from bertsmith.use.inputs import check_is_text_list
from bertsmith.use.masked_lm import pack_on_device
from bertsmith.use.model_setup import ModelOrPath, resolve_model
from bertsmith.use.token_vectors import Floats

#: Maximum number of logits computed at once (16 MiB of float32), except for a longer sequence.
_MAX_LOGITS = 2**22


@dataclass(frozen=True)
class SparseVector:
    """The vocabulary entries of a text with a weight above 0.

    Attributes:
        token_ids: int64 [n], in ascending order.
        weights: float32 [n].
    """

    token_ids: NDArray[np.int64]
    weights: Floats


def embed_sparse(
    model: ModelOrPath,
    texts: Sequence[str],
    *,
    prompt_name: str | None = None,
    fast: bool = False,
) -> list[SparseVector]:
    """Compute a sparse vector per text from the masked-LM head, as SPLADE models do.

    The weight of a vocabulary entry is the maximum of log(1 + ReLU(logit)) over all tokens of the
    text, with [CLS] and [SEP] (Formal et al. 2021, arXiv:2109.10086). A sentence-transformers
    directory of a sparse model can specify a sum and another activation.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        texts: The texts. Texts longer than the maximum length are truncated.
        prompt_name: Name of a prompt of the model; see ``Embedder.with_prompt``.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        One vector per text, in input order.

    Raises:
        ModelError: The model has no masked-LM head.
        InputError: ``texts`` is a single string.
    """
    check_is_text_list(texts)
    bundle = resolve_model(model, fast=fast)
    bundle.require_mlm_head()
    embedder = Embedder(bundle).with_prompt(prompt_name)
    sequences = embedder.tokenize(texts).sequences
    vectors: dict[int, SparseVector] = {}
    for indices in batch_by_length([len(ids) for ids in sequences]):
        batch = [sequences[index] for index in indices]
        results = compute_sparse_vectors(bundle, batch, embedder.splade_config)
        vectors |= zip(indices, results, strict=True)
    return [vectors[index] for index in range(len(sequences))]


@torch.inference_mode()
def compute_sparse_vectors(
    bundle: PretrainedBundle, sequences: Sequence[Sequence[int]], config: SpladeConfig
) -> list[SparseVector]:
    """Compute the sparse vectors of sequences as one batch.

    Args:
        bundle: The model.
        sequences: Token ids of each text, including [CLS] and [SEP].
        config: How the logits are combined.
    """
    batch = pack_on_device(bundle, [(ids, [0] * len(ids)) for ids in sequences])
    hidden: Tensor = bundle.model.bert(batch)
    vocab_size = bundle.tokenizer.vocab_size
    vectors = []
    for start, lengths in _group_sequences(list(map(len, sequences)), bundle.config.vocab_size):
        logits: Tensor = bundle.model.mlm(hidden[start : start + sum(lengths)])
        # The decoder of a model may have more outputs than the vocabulary has tokens.
        weights = logits[:, :vocab_size].float().relu().log1p()
        if config.activation == "log1p_relu":
            weights = weights.log1p()
        for token_weights in torch.split(weights, lengths):
            is_max = config.mode == "max"
            text_weights = token_weights.amax(0) if is_max else token_weights.sum(0)
            token_ids = text_weights.nonzero().squeeze(1)
            vectors.append(
                SparseVector(token_ids.cpu().numpy(), text_weights[token_ids].cpu().numpy())
            )
    return vectors


def _group_sequences(lengths: Sequence[int], vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield groups of consecutive sequences with at most ``_MAX_LOGITS`` logits.

    A longer sequence is a group of its own.

    Yields:
        The index of the group's first token in the batch, and the length of each sequence.
    """
    max_tokens = max(_MAX_LOGITS // vocab_size, 1)
    starts = [0, *accumulate(lengths)]
    first = 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or starts[index + 1] - starts[first] > max_tokens:
            yield starts[first], list(lengths[first:index])
            first = index
