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

from bertsmith.bundle import Head, TaskBundle, load_either, locate, start_task, to_disk
from bertsmith.bundle.any_model import is_bare
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.feature_based import FeatureModel
from bertsmith.model.packed import groups, pack
from bertsmith.model.task_models import SequenceModel, TaskModel
from bertsmith.tasks.inputs import Sequence_
from bertsmith.tasks.text_pairs import joined, shortened
from bertsmith.text.wordpiece import Tokenizer

#: Tokens of one batch: the masked-LM head gives V numbers for each of them.
_TOKENS = 512
#: What is not said by ``ModelConfig``: what a model is for.
_PRE_TRAINED, _BARE = "pre-training", "none"


@dataclass(frozen=True)
class Side:
    """A model as it is compared.

    model: in eval mode. heads: whether its heads are its own; those of a bare encoder are not.
    facts: the fields of its config, its kind of head, and its labels. new: the weights that its
    directory lacks.
    """

    path: Path
    model: PreTrainingModel | TaskModel
    tokenizer: Tokenizer
    config: ModelConfig
    heads: bool
    facts: dict[str, Any]
    new: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        """Return its weights under the names of model directories, float32 on the CPU."""
        state = self.model.state_dict()
        return to_disk({name: value for name, value in state.items() if name not in self.new})


def opened(path: Path | str, device: str) -> Side:
    """Open a model directory or a RUN: pre-trained, fine-tuned, or an encoder without heads.

    Raises ModelError.
    """
    directory = locate(Path(path))
    bare = is_bare(directory)
    found: Any = start_task(directory, Head("single")) if bare else load_either(directory)
    new = frozenset(found.info["new"] if bare else getattr(found, "new", ()))
    # A head that was drawn anew says nothing.
    bare = bool(new)
    facts = found.config.model_dump()
    facts |= {"head": _BARE if bare else _PRE_TRAINED, "labels": ()}
    if isinstance(found, TaskBundle) and not bare:
        facts |= {"head": found.head.kind, "labels": found.head.labels}
        if isinstance(found.model, FeatureModel):
            facts["features"] = found.model.features.model_dump()
    model = found.model.to(device).eval()
    return Side(directory, model, found.tokenizer, found.config, not bare, facts, new)


@dataclass(frozen=True)
class Texts:
    """What became of the texts: the sequences for each side, and those that cannot be compared.

    tokens: of all sequences together. cut_off: texts longer than one of the models takes.
    without_pairs: pairs left out since a model knows one segment only. otherwise: texts that the
    tokenizers cut otherwise, as (text, tokens, tokens).
    """

    first: list[Sequence_]
    second: list[Sequence_]
    tokens: int
    cut_off: int
    without_pairs: int
    otherwise: list[tuple[str, list[str], list[str]]]


def encoded(a: Side, b: Side, texts: Sequence[str]) -> Texts:
    """Encode texts with both tokenizers; a tab parts a pair. Ids may differ, tokens must not."""
    both: tuple[list[Sequence_], list[Sequence_]] = ([], [])
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
            [side.tokenizer.tokens(part) for part in own]
            for side, own in zip((a, b), ids, strict=True)
        )
        if tokens != others:
            otherwise.append((text, list(chain(*tokens)), list(chain(*others))))
            continue
        room = max(most - 1 - len(parts), 0)
        cut_off += sum(map(len, ids[0])) > room
        for found, side, own in zip(both, (a, b), ids, strict=True):
            found.append(joined(shortened(own, room), side.tokenizer))
    count = sum(len(own) for own, _ in both[0])
    return Texts(*both, count, cut_off, without_pairs, otherwise)


@torch.inference_mode()
def outputs(a: Side, b: Side, texts: Texts) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield for batch after batch the name of each output with both sides' values.

    None stands for an output that a side does not have.
    """
    words = _shared_words(a.tokenizer, b.tokenizer)
    for group in groups([len(ids) for ids, _ in texts.first], _TOKENS):
        both = [
            dict(_asked(side, [own[number] for number in group], kept))
            for side, own, kept in zip((a, b), (texts.first, texts.second), words, strict=True)
        ]
        for name in dict.fromkeys([*both[0], *both[1]]):
            yield name, both[0].get(name), both[1].get(name)


def _asked(side: Side, batch: Sequence[Sequence_], words: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each output's name and its values [rows, columns]."""
    model = side.model
    packed = pack(batch).to(next(model.parameters()).device)
    hidden = torch.empty(0)
    for layer, hidden in enumerate(model.bert.hidden_states(packed)):
        yield (f"layer {layer}" if layer else "embeddings"), hidden.float().cpu()
    pooler = getattr(model, "pooler", None)
    if pooler is not None and "pooler.dense.weight" not in side.new:
        yield "pooler", pooler(hidden.index_select(0, packed.starts)).float().cpu()
    if not side.heads:
        return
    if isinstance(model, PreTrainingModel):
        logits = model.mlm(hidden).float().cpu()
        yield "masked LM", logits.index_select(1, words)
        if model.nsp is not None:
            yield "next sentence", model.next_sentence_logits(hidden, packed).float().cpu()
        return
    whole = isinstance(model, SequenceModel) or (isinstance(model, FeatureModel) and model.whole)
    yield ("sequence output" if whole else "token output"), model(packed).float().cpu()


def _shared_words(a: Tokenizer, b: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids of the words that both know, in the same order for both."""
    known = set(b.vocab)
    shared = [word for word in dict.fromkeys(a.vocab) if word in known]
    found = [torch.tensor([side.id(word) for word in shared]) for side in (a, b)]
    return found[0], found[1]
