"""Load two models with any heads, tokenize texts for both, and compute their outputs."""

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
from bertsmith.model.task_models import BertForSequenceClassification, TaskModel
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.tasks.inputs import TokenSequence
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: Tokens per batch; small because the masked-LM head computes V logits per token.
_BATCH_TOKENS = 512
#: Values of "head" for models without a task head.
_PRE_TRAINED, _NO_HEAD = "pre-training", "none"


@dataclass(frozen=True)
class ComparedModel:
    """A loaded model.

    Attributes:
        path: The model directory.
        model: The model in eval mode.
        tokenizer: Its tokenizer.
        config: Its config.
        has_heads: Whether its heads were loaded; those of a bare encoder are newly initialized.
        facts: Fields of its config, kind of head, and labels.
        initialized: Names of the newly initialized weights.
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
    is_bare = is_bare_encoder(directory)
    bundle: Any = (
        load_for_fine_tuning(directory, HeadConfig("single")) if is_bare else load_model(directory)
    )
    initialized = frozenset(
        bundle.info["newly_initialized"] if is_bare else getattr(bundle, "new_weights", ())
    )
    # Outputs of newly initialized heads are meaningless, so they are not compared.
    is_bare = bool(initialized)
    facts = bundle.config.model_dump()
    facts |= {"head": _NO_HEAD if is_bare else _PRE_TRAINED, "labels": ()}
    if isinstance(bundle, FineTunedBundle) and not is_bare:
        facts |= {"head": bundle.head.kind, "labels": bundle.head.labels}
        if isinstance(bundle.model, BertWithBiLSTM):
            facts["features"] = bundle.model.features.model_dump()
    model = bundle.model.to(device).eval()
    return ComparedModel(
        directory, model, bundle.tokenizer, bundle.config, not is_bare, facts, initialized
    )


@dataclass(frozen=True)
class ComparedTexts:
    """Texts tokenized for two models.

    Attributes:
        sequences_a: Token sequences for model A.
        sequences_b: The same sequences for model B.
        num_tokens: Total number of tokens.
        num_truncated: Texts that were truncated to the shorter maximum length of both models.
        num_skipped_pairs: Text pairs skipped because a model has only one segment.
        tokenized_differently: Texts skipped because the tokenizers disagree, as (text, tokens of
            A, tokens of B).
    """

    sequences_a: list[TokenSequence]
    sequences_b: list[TokenSequence]
    num_tokens: int
    num_truncated: int
    num_skipped_pairs: int
    tokenized_differently: list[tuple[str, list[str], list[str]]]


def tokenize_for_both(a: ComparedModel, b: ComparedModel, texts: Sequence[str]) -> ComparedTexts:
    """Tokenize texts with both tokenizers. Tokens must be equal, but ids may differ.

    Args:
        a: The first model.
        b: The second model.
        texts: Texts, or pairs of texts separated by a tab.
    """
    sequences: tuple[list[TokenSequence], list[TokenSequence]] = ([], [])
    tokenized_differently = []
    num_truncated = num_skipped_pairs = 0
    max_positions = min(a.config.max_positions, b.config.max_positions)
    for text in texts:
        parts = text.split("\t", 1)
        if len(parts) > min(a.config.segments, b.config.segments):
            num_skipped_pairs += 1
            continue
        ids = [model.tokenizer.encode_batch(parts) for model in (a, b)]
        tokens_a, tokens_b = (
            [model.tokenizer.ids_to_tokens(part_ids) for part_ids in model_ids]
            for model, model_ids in zip((a, b), ids, strict=True)
        )
        if tokens_a != tokens_b:
            tokenized_differently.append((text, list(chain(*tokens_a)), list(chain(*tokens_b))))
            continue
        max_tokens = max(max_positions - 1 - len(parts), 0)
        num_truncated += sum(map(len, ids[0])) > max_tokens
        for model_sequences, model, model_ids in zip(sequences, (a, b), ids, strict=True):
            truncated = truncate_texts(model_ids, max_tokens)
            model_sequences.append(add_special_tokens(truncated, model.tokenizer))
    num_tokens = sum(len(ids) for ids, _ in sequences[0])
    return ComparedTexts(
        *sequences, num_tokens, num_truncated, num_skipped_pairs, tokenized_differently
    )


@torch.inference_mode()
def iter_paired_outputs(
    a: ComparedModel, b: ComparedModel, texts: ComparedTexts
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield (name of an output, value of A, value of B) for each output of each batch.

    The value is None if a model does not have the output.
    """
    shared_ids = _find_shared_token_ids(a.tokenizer, b.tokenizer)
    for indices in batch_by_length([len(ids) for ids, _ in texts.sequences_a], _BATCH_TOKENS):
        outputs_a, outputs_b = [
            dict(_compute_outputs(model, [sequences[index] for index in indices], model_shared_ids))
            for model, sequences, model_shared_ids in zip(
                (a, b), (texts.sequences_a, texts.sequences_b), shared_ids, strict=True
            )
        ]
        for name in dict.fromkeys([*outputs_a, *outputs_b]):
            yield name, outputs_a.get(name), outputs_b.get(name)


def _compute_outputs(
    compared: ComparedModel, sequences: Sequence[TokenSequence], shared_ids: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each output and its values [rows, columns]."""
    model = compared.model
    batch = pack_sequences(sequences).to(next(model.parameters()).device)
    hidden = torch.empty(0)
    for layer, hidden in enumerate(model.bert.iter_hidden_states(batch)):
        yield (f"layer {layer}" if layer else "embeddings"), hidden.float().cpu()
    pooler = getattr(model, "pooler", None)
    if pooler is not None and "pooler.dense.weight" not in compared.initialized:
        yield "pooler", pooler(hidden.index_select(0, batch.first_token_indices)).float().cpu()
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
    """Return the ids of the tokens in both vocabularies, in the same order for both."""
    vocab_b = set(b.vocab)
    shared_tokens = [token for token in dict.fromkeys(a.vocab) if token in vocab_b]
    ids_a, ids_b = [
        torch.tensor([tokenizer.token_to_id(token) for token in shared_tokens])
        for tokenizer in (a, b)
    ]
    return ids_a, ids_b
