"""Two models side by side: opened whatever heads they have, and asked about the same texts.

It never judges whether a difference matters.
"""

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
from bertsmith.model.packed import batch_by_length, pack_sequences
from bertsmith.model.task_models import BertForSequenceClassification, TaskModel
from bertsmith.tasks.inputs import TokenSequence
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: Tokens of one batch: the masked-LM head gives V numbers for each of them.
_TOKENS = 512
#: What is not said by ``ModelConfig``: what a model is for.
_PRE_TRAINED, _BARE = "pre-training", "none"


@dataclass(frozen=True)
class ComparedModel:
    """A model as it is compared.

    model: in eval mode. heads: whether its heads are its own; those of a bare encoder are not.
    facts: the fields of its config, its kind of head, and its labels. new: the weights that its
    directory lacks.
    """

    path: Path
    model: BertForPreTraining | TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    has_heads: bool
    facts: dict[str, Any]
    initialized: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        """Return its weights under the names of model directories, float32 on the CPU."""
        state = self.model.state_dict()
        return to_hf_state_dict(
            {name: value for name, value in state.items() if name not in self.initialized}
        )


def load_compared_model(path: Path | str, device: str) -> ComparedModel:
    """Open a model directory or a RUN: pre-trained, fine-tuned, or an encoder without heads.

    Raises ModelError.
    """
    directory = locate_model(Path(path))
    bare = is_bare_encoder(directory)
    found: Any = (
        load_for_fine_tuning(directory, HeadConfig("single")) if bare else load_model(directory)
    )
    new = frozenset(found.info["new"] if bare else getattr(found, "new", ()))
    # A head that was drawn anew says nothing.
    bare = bool(new)
    facts = found.config.model_dump()
    facts |= {"head": _BARE if bare else _PRE_TRAINED, "labels": ()}
    if isinstance(found, FineTunedBundle) and not bare:
        facts |= {"head": found.head.kind, "labels": found.head.labels}
        if isinstance(found.model, BertWithBiLSTM):
            facts["features"] = found.model.features.model_dump()
    model = found.model.to(device).eval()
    return ComparedModel(directory, model, found.tokenizer, found.config, not bare, facts, new)


@dataclass(frozen=True)
class TokenizedTexts:
    """What became of the texts: the sequences for each side, and those that cannot be compared.

    num_tokens: of all sequences together. cut_off: texts longer than one of the models takes.
    without_pairs: pairs left out since a model knows one segment only. otherwise: texts that the
    tokenizers cut otherwise, as (text, tokens, tokens).
    """

    sequences_a: list[TokenSequence]
    sequences_b: list[TokenSequence]
    num_tokens: int
    cut_off: int
    without_pairs: int
    otherwise: list[tuple[str, list[str], list[str]]]


def tokenize_for_both(a: ComparedModel, b: ComparedModel, texts: Sequence[str]) -> TokenizedTexts:
    """Encode texts with both tokenizers; a tab parts a pair. Ids may differ, tokens must not."""
    both: tuple[list[TokenSequence], list[TokenSequence]] = ([], [])
    otherwise = []
    cut_off = without_pairs = 0
    most = min(a.config.max_positions, b.config.max_positions)
    for text in texts:
        parts = text.split("\t", 1)
        if len(parts) > min(a.config.segments, b.config.segments):
            without_pairs += 1
            continue
        ids = [side.tokenizer.encode_batch(parts) for side in (a, b)]
        tokens, others = (
            [side.tokenizer.ids_to_tokens(part) for part in own]
            for side, own in zip((a, b), ids, strict=True)
        )
        if tokens != others:
            otherwise.append((text, list(chain(*tokens)), list(chain(*others))))
            continue
        room = max(most - 1 - len(parts), 0)
        cut_off += sum(map(len, ids[0])) > room
        for found, side, own in zip(both, (a, b), ids, strict=True):
            found.append(add_special_tokens(truncate_texts(own, room), side.tokenizer))
    count = sum(len(own) for own, _ in both[0])
    return TokenizedTexts(*both, count, cut_off, without_pairs, otherwise)


@torch.inference_mode()
def paired_outputs(
    a: ComparedModel, b: ComparedModel, texts: TokenizedTexts
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield for batch after batch the name of each output with both sides' values.

    None stands for an output that a side does not have.
    """
    words = _shared_words(a.tokenizer, b.tokenizer)
    for group in batch_by_length([len(ids) for ids, _ in texts.sequences_a], _TOKENS):
        both = [
            dict(_asked(side, [own[number] for number in group], kept))
            for side, own, kept in zip(
                (a, b), (texts.sequences_a, texts.sequences_b), words, strict=True
            )
        ]
        for name in dict.fromkeys([*both[0], *both[1]]):
            yield name, both[0].get(name), both[1].get(name)


def _asked(
    side: ComparedModel, batch: Sequence[TokenSequence], words: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield each output's name and its values [rows, columns]."""
    model = side.model
    packed = pack_sequences(batch).to(next(model.parameters()).device)
    hidden = torch.empty(0)
    for layer, hidden in enumerate(model.bert.hidden_states(packed)):
        yield (f"layer {layer}" if layer else "embeddings"), hidden.float().cpu()
    pooler = getattr(model, "pooler", None)
    if pooler is not None and "pooler.dense.weight" not in side.initialized:
        yield "pooler", pooler(hidden.index_select(0, packed.first_token_indices)).float().cpu()
    if not side.has_heads:
        return
    if isinstance(model, BertForPreTraining):
        logits = model.mlm(hidden).float().cpu()
        yield "masked LM", logits.index_select(1, words)
        if model.nsp is not None:
            yield "next sentence", model.next_sentence_logits(hidden, packed).float().cpu()
        return
    whole = isinstance(model, BertForSequenceClassification) or (
        isinstance(model, BertWithBiLSTM) and model.is_sequence_level
    )
    yield ("sequence output" if whole else "token output"), model(packed).float().cpu()


def _shared_words(a: Tokenizer, b: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the words that both know, in the same order for both."""
    known = set(b.vocab)
    shared = [word for word in dict.fromkeys(a.vocab) if word in known]
    found = [torch.tensor([side.token_to_id(word) for word in shared]) for side in (a, b)]
    return found[0], found[1]
