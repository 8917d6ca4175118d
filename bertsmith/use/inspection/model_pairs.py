"""Load two models to compare, tokenize texts with both tokenizers, and compute their outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.bundle import (
    FineTunedBundle,
    HeadConfig,
    load_for_fine_tuning,
    load_model,
    locate_model,
    to_hf_state_dict,
)
from bertsmith.bundle.any_model import is_bare_encoder
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import (
    BertForSequenceClassification,
    TaskModel,
    get_pooled_token_indices,
)
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.tasks.inputs import TokenSequence
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: Maximum number of tokens per batch. It is small because the masked-LM head computes V logits for
#: every token.
_BATCH_TOKENS = 512
#: Reported as the head of a pre-trained model, and of a model whose heads were not loaded.
_PRE_TRAINED, _NO_HEAD = "pre-training", "none"


@dataclass(frozen=True)
class ComparedModel:
    """A loaded model to be compared with another.

    Attributes:
        path: The model directory.
        model: The model in eval mode.
        tokenizer: The tokenizer of the model.
        config: The config of the model.
        has_heads: Whether the heads were loaded. The heads of a bare encoder are newly initialized.
        facts: Fields of the config, kind of head, and labels.
        initialized: Names of the newly initialized weights, which are not compared.
    """

    path: Path
    model: BertForPreTraining | TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    has_heads: bool
    facts: dict[str, Any]
    initialized: frozenset[str] = frozenset()

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the loaded weights under their Hugging Face names, float32 on the CPU."""
        state = self.model.state_dict()
        return to_hf_state_dict(
            {name: value for name, value in state.items() if name not in self.initialized}
        )


def load_compared_model(path: Path | str, device: str) -> ComparedModel:
    """Load a model directory or run directory: pre-trained, fine-tuned, or a bare encoder.

    Raises:
        ModelError: The model cannot be loaded.
    """
    directory = locate_model(Path(path))
    bundle: Any
    if is_bare_encoder(directory):
        # The kind of head does not matter, because newly initialized weights are not compared.
        bundle = load_for_fine_tuning(directory, HeadConfig("single"))
        initialized = frozenset(bundle.info["newly_initialized"])
    else:
        bundle = load_model(directory)
        initialized = frozenset(getattr(bundle, "new_weights", ()))
    has_heads = not initialized
    facts = bundle.config.model_dump()
    facts |= {"head": _PRE_TRAINED if has_heads else _NO_HEAD, "labels": ()}
    if isinstance(bundle, FineTunedBundle) and has_heads:
        facts |= {"head": bundle.head.kind, "labels": bundle.head.labels}
        if isinstance(bundle.model, BertWithBiLSTM):
            facts["features"] = bundle.model.features.model_dump()
    model = bundle.model.to(device).eval()
    return ComparedModel(
        directory, model, bundle.tokenizer, bundle.config, has_heads, facts, initialized
    )


@dataclass(frozen=True)
class ComparedTexts:
    """Texts tokenized for two models A and B.

    Attributes:
        sequences_a: The token sequences for A.
        sequences_b: The same tokens as sequences for B, whose ids may differ.
        num_tokens: Number of tokens in all sequences of A.
        num_truncated: Number of texts that were truncated, to the shorter maximum length of the
            two models.
        num_skipped_pairs: Number of text pairs that were skipped because a model has only one
            segment.
        tokenized_differently: Texts that were skipped because the tokenizers give different tokens,
            as (text, tokens of A, tokens of B).
    """

    sequences_a: list[TokenSequence]
    sequences_b: list[TokenSequence]
    num_tokens: int
    num_truncated: int
    num_skipped_pairs: int
    tokenized_differently: list[tuple[str, list[str], list[str]]]


def tokenize_for_both(a: ComparedModel, b: ComparedModel, texts: Sequence[str]) -> ComparedTexts:
    """Tokenize texts with both tokenizers. Texts whose tokens differ are skipped.

    Args:
        a: The first model.
        b: The second model.
        texts: Texts, or pairs of texts separated by a tab.
    """
    sequences_a: list[TokenSequence] = []
    sequences_b: list[TokenSequence] = []
    tokenized_differently = []
    num_truncated = num_skipped_pairs = 0
    max_positions = min(a.config.max_positions, b.config.max_positions)
    for text in texts:
        parts = text.split("\t", 1)
        if len(parts) > min(a.config.segments, b.config.segments):
            num_skipped_pairs += 1
            continue
        ids_a, ids_b = a.tokenizer.encode_batch(parts), b.tokenizer.encode_batch(parts)
        tokens_a = [a.tokenizer.ids_to_tokens(ids) for ids in ids_a]
        tokens_b = [b.tokenizer.ids_to_tokens(ids) for ids in ids_b]
        if tokens_a != tokens_b:
            tokenized_differently.append((text, list(chain(*tokens_a)), list(chain(*tokens_b))))
            continue
        # Positions are also needed for [CLS], and for [SEP] after each text.
        max_tokens = max(max_positions - 1 - len(parts), 0)
        num_truncated += sum(map(len, ids_a)) > max_tokens
        sequences_a.append(add_special_tokens(truncate_texts(ids_a, max_tokens), a.tokenizer))
        sequences_b.append(add_special_tokens(truncate_texts(ids_b, max_tokens), b.tokenizer))
    return ComparedTexts(
        sequences_a,
        sequences_b,
        num_tokens=sum(len(ids) for ids, _ in sequences_a),
        num_truncated=num_truncated,
        num_skipped_pairs=num_skipped_pairs,
        tokenized_differently=tokenized_differently,
    )


@torch.inference_mode()
def iter_paired_outputs(
    a: ComparedModel, b: ComparedModel, texts: ComparedTexts
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (name of an output, tensor of A, tensor of B) for each output and each batch.

    A tensor is None if the model does not have the output.
    """
    shared_ids_a, shared_ids_b = _find_shared_token_ids(a.tokenizer, b.tokenizer)
    for indices in batch_by_length([len(ids) for ids, _ in texts.sequences_a], _BATCH_TOKENS):
        batch_a = [texts.sequences_a[index] for index in indices]
        batch_b = [texts.sequences_b[index] for index in indices]
        outputs_a = dict(_compute_outputs(a, batch_a, shared_ids_a))
        outputs_b = dict(_compute_outputs(b, batch_b, shared_ids_b))
        for name in dict.fromkeys([*outputs_a, *outputs_b]):
            yield name, outputs_a.get(name), outputs_b.get(name)


def _compute_outputs(
    compared: ComparedModel, sequences: Sequence[TokenSequence], shared_ids: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each output of a model and its values for a batch.

    Args:
        compared: The model.
        sequences: The sequences of the batch.
        shared_ids: The token ids whose masked-LM logits are included.

    Yields:
        Pairs (name, tensor), whose first axis is T tokens or B sequences of the batch.
    """
    model = compared.model
    batch = pack_sequences(sequences).to(next(model.parameters()).device)
    hidden = torch.empty(0)  # Replaced in the loop, which always yields the embeddings.
    for layer, hidden in enumerate(model.bert.iter_hidden_states(batch)):
        yield (f"layer {layer}" if layer else "embeddings"), hidden.float().cpu()
    pooler = getattr(model, "pooler", None)
    if pooler is not None and "pooler.dense.weight" not in compared.initialized:
        token_indices = get_pooled_token_indices(model.config, batch)
        yield "pooler", pooler(hidden.index_select(0, token_indices)).float().cpu()
    if not compared.has_heads:
        return
    if isinstance(model, BertForPreTraining):
        logits = model.mlm(hidden).float().cpu()
        yield "masked LM", logits.index_select(1, shared_ids)
        if model.nsp is not None:
            yield "next sentence", model.compute_nsp_logits(hidden, batch).float().cpu()
        return
    is_sequence_level = isinstance(model, BertForSequenceClassification) or (
        isinstance(model, BertWithBiLSTM) and model.is_sequence_level
    )
    yield ("sequence output" if is_sequence_level else "token output"), model(batch).float().cpu()


def _find_shared_token_ids(a: Tokenizer, b: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the tokens that both vocabularies contain.

    Returns:
        The ids in the vocabulary of A, and the ids of the same tokens in the vocabulary of B.
    """
    vocab_b = set(b.vocab)
    shared_tokens = [token for token in dict.fromkeys(a.vocab) if token in vocab_b]
    ids_a = torch.tensor([a.token_to_id(token) for token in shared_tokens])
    ids_b = torch.tensor([b.token_to_id(token) for token in shared_tokens])
    return ids_a, ids_b
