"""Loss of a model on held-out text: the masked-LM loss, and bits per character.

The masked-LM loss is computed as in pre-training: 15 % of the tokens are predicted, in nats per
predicted token. It depends on the vocabulary.

Bits per character compares vocabularies. It is computed from the pseudo-log-likelihood (PLL):

    bits per character = -sum of the PLLs of all sentences / (ln 2 x number of characters)

with the variant "within-word" (Kauf and Ivanova 2023, arXiv:2305.10588), in which a token is
predicted without the later tokens of its word. By the chain rule, the log-probabilities of the
tokens of a word then add up to that of the word given all other words, which does not depend on
how the vocabulary splits the word. Dividing by the length of the text instead of the number of
tokens follows Gao et al. 2020 (arXiv:2101.00027, section 3.1), who use bytes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.bundle import PretrainedBundle, load
from bertsmith.data.counter_rng import derive_key, init_states
from bertsmith.data.masking import VocabularyInfo, mask_tokens
from bertsmith.data.settings import DataSettings
from bertsmith.errors import TaskError
from bertsmith.lab.stage_runners import Job
from bertsmith.model.packed import PackedBatch
from bertsmith.progress import Progress
from bertsmith.runtime.device import resolve_device
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.text.corpus import read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.sources import find_sources
from bertsmith.use.masked_lm import get_max_text_tokens
from bertsmith.use.pseudo_log_likelihood import compute_log_probabilities

#: Sentences are sampled from this many characters at the start of the text.
_MAX_CHARACTERS = 2_000_000
#: Shorter sentences are mostly headings. Longer ones may not fit into a model.
_MIN_SENTENCE_LENGTH, _MAX_SENTENCE_LENGTH = 20, 300
#: Seed of the sample and of the masks, the same for all models.
_SEED = 0
#: Number of sentences whose PLLs are computed together.
_CHUNK_SIZE = 128


def sample_sentences(files: Sequence[Path], num_sentences: int) -> list[str]:
    """Return a random sample of the sentences of a text, the same for every model.

    Raises:
        TaskError: The text has no sentence of suitable length.
    """
    sentences: dict[str, None] = {}
    num_characters = 0
    for document in read_documents(find_sources([str(file) for file in files])):
        for sentence in split_sentences(document.text, presplit=document.presplit):
            if _MIN_SENTENCE_LENGTH <= len(sentence) <= _MAX_SENTENCE_LENGTH:
                sentences[sentence] = None
        num_characters += len(document.text)
        if num_characters >= _MAX_CHARACTERS:
            break
    if not sentences:
        raise TaskError(
            f"{files[0]}: no sentence of {_MIN_SENTENCE_LENGTH} to {_MAX_SENTENCE_LENGTH} "
            "characters; give --text a text with more sentences"
        )
    order = np.random.default_rng(_SEED).permutation(len(sentences))[:num_sentences]
    distinct = list(sentences)
    return [distinct[index] for index in sorted(order.tolist())]


def measure_held_out(job: Job) -> dict[str, Any]:
    """Compute the masked-LM loss and bits per character of a model on the sampled sentences.

    Returns:
        ``metrics`` with ``mlm_loss`` in nats per token, ``bits_per_character`` and
        ``unknown_share``, the share of [UNK] tokens; and counts. Sentences with more tokens than
        the model's maximum are skipped and counted.

    Raises:
        TaskError: No sentence fits into the model.
    """
    files = [path for role, path in job.stage.files.items() if role != "model"]
    sentences = sample_sentences(files, job.stage.settings["sentences"])
    bundle = load(job.model, device=resolve_device("auto", "--device"))
    encoded = bundle.tokenizer.encode_batch(sentences)
    max_tokens = get_max_text_tokens(bundle)
    scored = [
        (sentence, ids)
        for sentence, ids in zip(sentences, encoded, strict=True)
        if 0 < len(ids) <= max_tokens
    ]
    if not scored:
        raise TaskError(
            "no sentence of the held-out text fits into this model, which takes at most "
            f"{max_tokens} tokens; leave held-out out with --tasks, or use a model for longer texts"
        )
    sequences = [ids for _, ids in scored]
    num_tokens = sum(map(len, sequences))
    num_characters = sum(len(sentence) for sentence, _ in scored)
    num_unknown = sum(ids.count(bundle.tokenizer.unk_id) for ids in sequences)
    return {
        "metrics": {
            "mlm_loss": compute_mlm_loss(bundle, sequences),
            "bits_per_character": compute_bits_per_character(
                bundle, sequences, num_characters, job.progress
            ),
            "unknown_share": num_unknown / num_tokens,
        },
        "num_sentences": len(scored), "num_skipped": len(sentences) - len(scored),
        "num_tokens": num_tokens, "num_characters": num_characters,
    }  # fmt: skip


def compute_bits_per_character(
    bundle: PretrainedBundle,
    sequences: Sequence[list[int]],
    num_characters: int,
    progress: Progress,
) -> float:
    """Return the bits per character of sentences, which do not depend on the vocabulary.

    Args:
        bundle: The model.
        sequences: Token ids of each sentence, without [CLS] and [SEP].
        num_characters: Number of characters of all sentences.
        progress: Receives the number of scored tokens.
    """
    pll = 0.0
    progress.start("bits per character", sum(map(len, sequences)), "tokens")
    for start in range(0, len(sequences), _CHUNK_SIZE):
        chunk = sequences[start : start + _CHUNK_SIZE]
        values = compute_log_probabilities(bundle, chunk, ["within-word"], progress)
        pll += math.fsum(value for row in values["within-word"] for value in row)
    progress.finish()
    return -pll / (math.log(2) * num_characters)


def compute_mlm_loss(bundle: PretrainedBundle, sequences: Sequence[list[int]]) -> float:
    """Return the masked-LM loss in nats per predicted token, with the masking of pre-training.

    The masks of a sequence depend only on its tokens and its index.

    Args:
        bundle: The model.
        sequences: Token ids of each sequence, without [CLS] and [SEP].
    """
    tokenizer, device = bundle.tokenizer, next(bundle.model.parameters()).device
    vocabulary, settings = VocabularyInfo.from_tokenizer(tokenizer), DataSettings()
    states = init_states(derive_key(_SEED), np.arange(len(sequences)))
    total_loss, num_predictions = 0.0, 0
    for indices in batch_by_length([len(ids) + 2 for ids in sequences]):
        rows = [[tokenizer.cls_id, *sequences[index], tokenizer.sep_id] for index in indices]
        lengths = np.array([len(row) for row in rows])
        cu_seqlens = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        ids, masked_positions, labels = mask_tokens(
            np.concatenate(rows).astype(np.int64), cu_seqlens, states[indices], vocabulary, settings
        )
        batch = PackedBatch(
            ids=torch.from_numpy(ids),
            segments=torch.zeros(len(ids), dtype=torch.int64),
            positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=int(lengths.max()),
        )
        losses = bundle.model.evaluate(
            batch.to(device), torch.from_numpy(masked_positions).to(device),
            torch.from_numpy(labels).to(device), None,
        )  # fmt: skip
        total_loss += float(losses.mlm_loss)
        num_predictions += len(labels)
    return total_loss / num_predictions if num_predictions else math.nan
