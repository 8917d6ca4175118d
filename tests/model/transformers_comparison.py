"""Runs a batch in models of Bertsmith and transformers, with the same dropout masks."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForMaskedLM
from transformers import BertForPreTraining as HFBertForPreTraining
from transformers.models.bert import modeling_bert

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops import attention_layout, bucketing
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from tests.model.examples import PreTrainingBatch, make_tokenizer

#: Name of a module with dropout -> location of the dropout in a BERT. Both models use the same mask
#: at the same location.
BERTSMITH_LOCATIONS = {
    "bert.embeddings.dropout": "embeddings",
    "attention.dropout": "probabilities",
    "attention_output_dropout": "attention output",
    "feed_forward_dropout": "feed-forward output",
}
TRANSFORMERS_LOCATIONS = {
    "bert.embeddings.dropout": "embeddings",
    "attention.self": "probabilities",
    "attention.output.dropout": "attention output",
    "output.dropout": "feed-forward output",
}


def get_dropout_location(name: str, locations: dict[str, str]) -> str | None:
    """Return the location of a dropout, such as "layer 1 probabilities"; None for other modules."""
    if name in locations:
        return locations[name]
    match = re.fullmatch(r"bert\.encoder\.layers?\.(\d+)\.(.+)", name)
    if match is None or match[2] not in locations:
        return None
    return f"layer {match[1]} {locations[match[2]]}"


class DropoutMasks:
    """Random dropout masks for each location, the same for both models."""

    def __init__(self, batch: PreTrainingBatch, heads: int, width: int) -> None:
        """Create masks for a batch.

        Args:
            batch: The batch.
            heads: N, number of attention heads.
            width: D, width of the hidden states.
        """
        num_sequences, max_seqlen = len(batch.lengths), batch.packed.max_seqlen
        self.batch = batch
        self.probabilities_shape = (num_sequences, heads, max_seqlen, max_seqlen)
        self.hidden_shape = (num_sequences, max_seqlen, width)
        self.used_locations: set[str] = set()

    def get_padded_mask(self, location: str, rate: float) -> Tensor:
        """Return the mask for padded sequences at a location: 0 or 1 / (1 - rate).

        Its shape is [B, N, S, S] for attention probabilities, otherwise [B, S, D].
        """
        self.used_locations.add(location)
        is_attention = location.endswith("probabilities")
        shape = self.probabilities_shape if is_attention else self.hidden_shape
        seed = int.from_bytes(location.encode()) % (2**31 - 1)
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return (uniform >= rate) / (1 - rate)

    def get_packed_mask(self, location: str, rate: float, shape: torch.Size) -> Tensor:
        """Return the mask for packed sequences at a location, [T, D].

        Attention probabilities are padded in Bertsmith too, and have the same mask as in
        transformers.
        """
        mask = self.get_padded_mask(location, rate)
        if mask.shape == shape:
            return mask
        lengths = self.batch.lengths
        rows = torch.cat([mask[index, :length] for index, length in enumerate(lengths)])
        # The last layer has outputs only for the masked tokens, followed by the [CLS] tokens.
        token_indices = torch.cat(
            [self.batch.masked_positions, self.batch.packed.first_token_indices]
        )
        assert len(token_indices) != len(rows), (
            "all tokens are needed: the shape does not show the layer"
        )
        if len(rows) != shape[0]:
            rows = rows[token_indices]
        return rows.view(shape)


def patch_bertsmith_dropout(
    model: BertForPreTraining, masks: DropoutMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the dropout masks of a Bertsmith model by ``masks``."""
    locations = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            location = get_dropout_location(name, BERTSMITH_LOCATIONS)
            assert location is not None, f"unknown dropout: {name}"
            locations[id(module)] = location

    def draw_mask(self: Dropout, x: Tensor, dropout_seed: DropoutSeed) -> Tensor:
        return masks.get_packed_mask(locations[id(self)], self.rate, x.shape)

    monkeypatch.setattr(Dropout, "draw_mask", draw_mask)
    # Transformers pads all sequences together. test_attention.py tests bucketing.
    monkeypatch.setattr(attention_layout, "bucket_sequences", lambda _: None)
    monkeypatch.setattr(bucketing, "_simd_width", lambda: 1)


def patch_transformers_dropout(
    model: nn.Module, masks: DropoutMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the dropout masks of a transformers model with eager attention by ``masks``."""
    locations: dict[int, str] = {}
    for name, module in model.named_modules():
        location = get_dropout_location(name, TRANSFORMERS_LOCATIONS)
        if location is not None:
            locations[id(module)] = location
    eager_attention: Callable[..., Any] = modeling_bert.eager_attention_forward
    original_dropout = F.dropout
    current_location = ""

    def masked_dropout(
        x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return x * masks.get_padded_mask(current_location, p) if training and p else x

    def call_patched(
        module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal current_location
        current_location = locations[id(module)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "dropout", masked_dropout)
            result = function(*args, **kwargs)
        assert F.dropout is original_dropout
        return result

    def patched_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_patched(module, eager_attention, module, *args, **kwargs)

    original_forward = nn.Dropout.forward

    def patched_forward(self: nn.Dropout, x: Tensor) -> Any:
        return call_patched(self, original_forward, self, x)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", patched_attention)
    monkeypatch.setattr(nn.Dropout, "forward", patched_forward)


def to_transformers(model: BertForPreTraining, directory: Path) -> Any:
    """Return the same model in transformers, after checking that no weight is missing there."""
    bundle.save(directory, model, make_tokenizer(model.config.vocab_size), {})
    model_class = HFBertForPreTraining if model.config.nsp else BertForMaskedLM
    hf_model, loading_info = model_class.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in loading_info.items() if value}
    assert not problems, problems
    return hf_model


#: Lower bound for the divisor of relative differences. If all entries of a tensor are smaller, they
#: consist mostly of rounding errors.
MIN_SCALE = 0.01


@dataclass(frozen=True)
class ModelOutputs:
    """Losses, logits and gradients of a model for a batch.

    Attributes:
        mlm_loss: Mean masked-LM loss.
        nsp_loss: Mean next-sentence loss.
        mlm_logits: [T, V].
        nsp_logits: [B, 2].
        gradients: Gradients of the sum of both losses, by Hugging Face name.
    """

    mlm_loss: Tensor
    nsp_loss: Tensor
    mlm_logits: Tensor
    nsp_logits: Tensor
    gradients: dict[str, Tensor]

    def compute_differences(
        self, expected: "ModelOutputs", min_scale: float = MIN_SCALE
    ) -> dict[str, float]:
        """Return the largest relative difference of each loss, logit tensor and gradient.

        Differences are divided by the largest expected entry, but at least by ``min_scale``.
        """
        assert self.gradients.keys() == expected.gradients.keys()
        pairs = {
            "masked loss": (self.mlm_loss, expected.mlm_loss),
            "next-sentence loss": (self.nsp_loss, expected.nsp_loss),
            "masked logits": (self.mlm_logits, expected.mlm_logits),
            "next-sentence logits": (self.nsp_logits, expected.nsp_logits),
        }
        for name, gradient in self.gradients.items():
            pairs[f"gradient of {name}"] = (gradient, expected.gradients[name])
        return {
            name: _relative_difference(name, *values, min_scale) for name, values in pairs.items()
        }


def _relative_difference(name: str, actual: Tensor, expected: Tensor, min_scale: float) -> float:
    """Return the largest difference, divided by the largest expected entry or ``min_scale``."""
    # A bias of the keys adds the same value to all scores of a query and does not change their
    # softmax. Its gradient therefore consists only of rounding errors.
    largest = 1.0 if name.endswith("self.key.bias") else float(expected.abs().max())
    return float((actual - expected).abs().max()) / max(largest, min_scale)


def run_bertsmith(model: BertForPreTraining, batch: PreTrainingBatch) -> ModelOutputs:
    """Run the forward and backward passes of a Bertsmith model."""
    dropout_seed = DropoutSeed(torch.tensor(0))
    model.zero_grad()
    losses = model(*batch.arguments, dropout_seed)
    assert losses.nsp_loss is not None
    mlm_loss = losses.mlm_loss / len(batch.masked_labels)
    nsp_loss = losses.nsp_loss / len(batch.nsp_labels)
    (mlm_loss + nsp_loss).backward()
    with torch.no_grad():
        hidden = model.bert(batch.packed, dropout_seed)
        mlm_logits = model.mlm(hidden)
        nsp_logits = model.compute_nsp_logits(hidden, batch.packed)
    all_gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients = {name: value for name, value in all_gradients.items() if value is not None}
    assert len(gradients) == len(all_gradients)
    return ModelOutputs(
        mlm_loss.detach(),
        nsp_loss.detach(),
        mlm_logits,
        nsp_logits,
        bundle.to_hf_state_dict(gradients),
    )


def run_transformers(model: Any, batch: PreTrainingBatch) -> ModelOutputs:
    """Run the forward and backward passes of a transformers model on padded sequences."""
    lengths, packed = batch.lengths, batch.packed
    shape = (len(lengths), packed.max_seqlen)
    is_token = torch.arange(packed.max_seqlen) < torch.tensor(lengths)[:, None]
    labels = torch.full_like(packed.ids, -100)
    labels[batch.masked_positions] = batch.masked_labels
    inputs = {}
    for name, values, padding_value in (
        ("input_ids", packed.ids, 0),
        ("token_type_ids", packed.segments, 0),
        ("labels", labels, -100),
    ):
        inputs[name] = torch.full(shape, padding_value)
        inputs[name][is_token] = values
    model.zero_grad()
    output = model(
        **inputs,
        attention_mask=is_token.long(),
        next_sentence_label=batch.nsp_labels,
        return_dict=True,
    )
    output.loss.backward()
    mlm_logits = output.prediction_logits[is_token]
    nsp_logits = output.seq_relationship_logits
    mlm_loss = F.cross_entropy(mlm_logits[batch.masked_positions], batch.masked_labels)
    nsp_loss = F.cross_entropy(nsp_logits, batch.nsp_labels)
    assert torch.allclose(mlm_loss + nsp_loss, output.loss)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return ModelOutputs(
        mlm_loss.detach(), nsp_loss.detach(), mlm_logits.detach(), nsp_logits.detach(), gradients
    )
