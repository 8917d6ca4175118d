"""The same batch in transformers, and dropout by the same masks in both models.

It never knows what a test expects of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForMaskedLM, BertForPreTraining
from transformers.models.bert import modeling_bert

from bertsmith import bundle
from bertsmith.model import attention as attending
from bertsmith.model.bert import BertForPreTraining as PreTrainingModel
from bertsmith.model.ops import bucketing
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from tests.model.examples import PreTrainingBatch, make_tokenizer

#: Where dropout is, by our names and theirs. Keyed by place, not by number: an order of sites
#: that differs is no fault, a site in another place is.
OURS = {
    "bert.embeddings.dropout": "embeddings",
    "attention.dropout": "probabilities",
    "attention_dropout": "attention output",
    "feed_forward_dropout": "feed-forward output",
}
THEIRS = {
    "bert.embeddings.dropout": "embeddings",
    "attention.self": "probabilities",
    "attention.output.dropout": "attention output",
    "output.dropout": "feed-forward output",
}


def site_of(name: str, places: dict[str, str]) -> str | None:
    """Return the place of a module in either model, such as ``layer 1 probabilities``."""
    if name in places:
        return places[name]
    head, _, rest = name.partition("encoder.layer")
    if head != "bert.":
        return None
    _, index, part = rest.split(".", 2) if rest.count(".") > 1 else ("", "", "")
    return f"layer {index} {places[part]}" if part in places else None


class Masks:
    """Uniform numbers for each (site, sequence, position), the same for whoever asks."""

    def __init__(self, example: PreTrainingBatch, heads: int, width: int) -> None:
        """For hidden states [B, S, D] and probabilities [B, N, S, S]."""
        sequences, longest = len(example.lengths), example.packed.max_seqlen
        self.example = example
        self.shapes = [(sequences, heads, longest, longest), (sequences, longest, width)]
        self.asked: set[str] = set()

    def full(self, site: str, rate: float) -> Tensor:
        """Return what to multiply the padded tensor of a site with."""
        self.asked.add(site)
        shape = self.shapes[0 if site.endswith("probabilities") else 1]
        seed = int.from_bytes(site.encode()) % (2**31 - 1)
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return (uniform >= rate) / (1 - rate)

    def packed(self, site: str, rate: float, shape: torch.Size) -> Tensor:
        """Return the same for the packed tensor of a site, or for padded probabilities."""
        full = self.full(site, rate)
        if full.shape == shape:
            return full
        lengths = self.example.lengths
        rows = torch.cat([full[row, :length] for row, length in enumerate(lengths)])
        # The last layer is computed where a loss is asked for: at the masks, then at [CLS].
        asked = torch.cat([self.example.masked_positions, self.example.packed.first_token_indices])
        assert len(asked) != len(rows), "an example in which the two could be taken for each other"
        if len(rows) != shape[0]:
            rows = rows[asked]
        return rows.view(shape)


def key_ours(model: PreTrainingModel, masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our dropout look its decisions up; rate and place stay the model's own."""
    sites = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            site = site_of(name, OURS)
            assert site is not None, f"an unknown dropout: {name}"
            sites[id(module)] = site

    def scale(self: Dropout, x: Tensor, noise: DropoutSeed) -> Tensor:
        return masks.packed(sites[id(self)], self.rate, x.shape)

    monkeypatch.setattr(Dropout, "scale", scale)
    # Theirs pads all sequences together; that groups change nothing is tested beside attention.
    monkeypatch.setattr(attending, "grouped", lambda _: None)
    monkeypatch.setattr(bucketing, "_edge", lambda: 1)


def key_theirs(model: nn.Module, masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dropout in transformers look its decisions up, after its own eager attention."""
    places: dict[int, str] = {}
    for name, module in model.named_modules():
        site = site_of(name, THEIRS)
        if site is not None:
            places[id(module)] = site
    eager: Callable[..., Any] = modeling_bert.eager_attention_forward
    plain, current = F.dropout, [""]

    def keyed(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * masks.full(current[0], p) if training and p else x

    def named(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current[0] = places[id(module)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "dropout", keyed)
            result = function(*args, **kwargs)
        assert F.dropout is plain
        return result

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return named(module, eager, module, *args, **kwargs)

    forward = nn.Dropout.forward

    def dropout(self: nn.Dropout, x: Tensor) -> Any:
        return named(self, forward, self, x)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", attention)
    monkeypatch.setattr(nn.Dropout, "forward", dropout)


def transferred(model: PreTrainingModel, directory: Path) -> Any:
    """Write the model directory and let transformers read it; every key must fit."""
    bundle.save(directory, model, make_tokenizer(model.config.vocab_size), {})
    kind = BertForPreTraining if model.config.nsp else BertForMaskedLM
    theirs, loading = kind.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    faults = {key: value for key, value in loading.items() if value}
    assert not faults, faults
    return theirs


#: Where the largest entry is smaller than this, sums have cancelled and rounding stands out.
SMALL = 0.01


@dataclass(frozen=True)
class Outcome:
    """What both models are compared by.

    masked, next_sentence: mean losses. words: logits [T, V]. pairs: logits [B, 2].
    gradients: those of the sum of both losses, under the names on disk.
    """

    masked: Tensor
    next_sentence: Tensor
    words: Tensor
    pairs: Tensor
    gradients: dict[str, Tensor]

    def differences(self, other: "Outcome", least: float = SMALL) -> dict[str, float]:
        """Return the largest difference of each quantity, as a share of its largest entry.

        Where that entry is smaller than ``least``, as a share of ``least``.
        """
        assert self.gradients.keys() == other.gradients.keys()
        both = {
            "masked loss": (self.masked, other.masked),
            "next-sentence loss": (self.next_sentence, other.next_sentence),
            "masked logits": (self.words, other.words),
            "next-sentence logits": (self.pairs, other.pairs),
        }
        for name, gradient in self.gradients.items():
            both[f"gradient of {name}"] = (gradient, other.gradients[name])
        return {name: _difference(name, *values, least) for name, values in both.items()}


def _difference(name: str, ours: Tensor, theirs: Tensor, least: float) -> float:
    # A bias of the keys shifts all scores of a query alike, and softmax takes it out again: its
    # gradient is nothing but rounding.
    largest = 1.0 if name.endswith("self.key.bias") else float(theirs.abs().max())
    return float((ours - theirs).abs().max()) / max(largest, least)


def run_ours(model: PreTrainingModel, example: PreTrainingBatch) -> Outcome:
    """Run our model forward and backward."""
    noise = DropoutSeed(torch.tensor(0))
    model.zero_grad()
    losses = model(*example.arguments, noise)
    assert losses.next_sentence is not None
    masked = losses.masked / len(example.masked_labels)
    next_sentence = losses.next_sentence / len(example.nsp_labels)
    (masked + next_sentence).backward()
    with torch.no_grad():
        hidden = model.bert(example.packed, noise)
        words, pairs = model.mlm(hidden), model.next_sentence_logits(hidden, example.packed)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    found = {name: value for name, value in gradients.items() if value is not None}
    assert len(found) == len(gradients)
    return Outcome(
        masked.detach(), next_sentence.detach(), words, pairs, bundle.to_hf_state_dict(found)
    )


def run_theirs(model: Any, example: PreTrainingBatch) -> Outcome:
    """Run transformers' model forward and backward, on padded rows."""
    lengths, packed = example.lengths, example.packed
    rows = (len(lengths), packed.max_seqlen)
    real = torch.arange(packed.max_seqlen) < torch.tensor(lengths)[:, None]
    labels = torch.full_like(packed.ids, -100)
    labels[example.masked_positions] = example.masked_labels
    padded = {}
    for name, values, filler in (
        ("input_ids", packed.ids, 0),
        ("token_type_ids", packed.segments, 0),
        ("labels", labels, -100),
    ):
        padded[name] = torch.full(rows, filler)
        padded[name][real] = values
    model.zero_grad()
    output = model(
        **padded,
        attention_mask=real.long(),
        next_sentence_label=example.nsp_labels,
        return_dict=True,
    )
    output.loss.backward()
    words = output.prediction_logits[real]
    pairs = output.seq_relationship_logits
    masked = F.cross_entropy(words[example.masked_positions], example.masked_labels)
    next_sentence = F.cross_entropy(pairs, example.nsp_labels)
    assert torch.allclose(masked + next_sentence, output.loss)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return Outcome(
        masked.detach(), next_sentence.detach(), words.detach(), pairs.detach(), gradients
    )
