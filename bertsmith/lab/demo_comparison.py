"""Compares the model of ``bertsmith demo`` with a reference model on the demo's held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from bertsmith.bundle import PretrainedBundle, load
from bertsmith.data.store import Store
from bertsmith.errors import StoreError
from bertsmith.lab.panel.held_out import compute_bits_per_character
from bertsmith.progress import Progress
from bertsmith.use.fill import fill
from bertsmith.use.masked_lm import get_max_text_tokens

#: Shorter sentences are mostly headings; the time grows with the square of the length.
_MIN_CHARACTERS, _MAX_CHARACTERS = 20, 200
#: Seed of the sample of sentences.
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class ModelResults:
    """Results of a model.

    Attributes:
        words: The most probable words for the [MASK] of each text.
        bits_per_character: On the held-out sentences; see ``bertsmith.lab.panel.held_out``.
    """

    words: list[list[str]]
    bits_per_character: float


def compare_on_store(
    models: Sequence[Path | str],
    store_path: Path,
    texts: Sequence[str],
    *,
    num_sentences: int,
    top: int,
    progress: Progress,
) -> tuple[list[ModelResults], int]:
    """Fill in masks and compute bits per character with several models.

    Args:
        models: Paths or names of models. The first one has the tokenizer of the store.
        store_path: The token store with the held-out sentences.
        texts: Texts with one [MASK] each.
        num_sentences: Maximum number of held-out sentences.
        top: Number of words per mask.
        progress: Receives a progress bar for each model.

    Returns:
        The results of each model, and the number of held-out sentences.

    Raises:
        ModelError: A model cannot be loaded.
        StoreError: No held-out sentence is suitable.
    """
    bundles = [load(model) for model in models]
    sentences = _sample_sentences(Store.open(store_path), bundles, num_sentences)
    num_characters = sum(map(len, sentences))
    results = []
    for bundle in bundles:
        words = [[word for word, _ in fill(bundle, text, top)[0].predictions] for text in texts]
        sequences = bundle.tokenizer.encode_batch(sentences)
        bits = compute_bits_per_character(bundle, sequences, num_characters, progress)
        results.append(ModelResults(words=words, bits_per_character=bits))
    return results, len(sentences)


def _sample_sentences(
    store: Store, bundles: Sequence[PretrainedBundle], num_sentences: int
) -> list[str]:
    """Return a random sample of distinct held-out sentences.

    A sentence is decoded from its token ids, so its case and its spaces may differ from those of
    the text. Sentences with [UNK] and sentences that are too long for a model are left out.
    """
    tokenizer, split = store.load_tokenizer(), store.load_split("heldout")
    offsets = pairwise(split.sentence_offsets.tolist())
    sentences = dict.fromkeys(tokenizer.decode(split.ids[start:end]) for start, end in offsets)
    candidates = [
        sentence for sentence in sentences if _MIN_CHARACTERS <= len(sentence) <= _MAX_CHARACTERS
    ]
    sampled: list[str] = []
    for index in np.random.default_rng(_SEED).permutation(len(candidates)).tolist():
        if len(sampled) == num_sentences:
            break
        if all(_can_score(bundle, candidates[index]) for bundle in bundles):
            sampled.append(candidates[index])
    if not sampled:
        raise StoreError(f"{store.path}: no held-out sentence that all models can score")
    return sampled


def _can_score(bundle: PretrainedBundle, sentence: str) -> bool:
    """Return whether a model can score a sentence without [UNK] and without truncation."""
    ids = bundle.tokenizer.encode(sentence)
    return len(ids) <= get_max_text_tokens(bundle) and bundle.tokenizer.unk_id not in ids
