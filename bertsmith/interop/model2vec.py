"""Export of an embedding model as a static model: a vector for each token, without an encoder.

The format is that of model2vec, which sentence-transformers reads as StaticEmbedding. The vector of
a text is the mean of the vectors of its tokens, scaled to length 1. In shapes, V is the size of the
vocabulary, D the width of the embedding model's vectors, and K that of the token vectors.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import (
    CONFIG_FILE,
    INFO_FILE,
    WEIGHTS_FILE,
    EncoderBundle,
    save_tensors,
)
from bertsmith.errors import InputError, ModelError
from bertsmith.files import atomic_directory, write_json
from bertsmith.interop.sentence_transformers import (
    PoolingConfig,
    build_embedding_model,
)
from bertsmith.interop.sentence_transformers.writing import load_for_export, write_modules_file
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime.inference_batches import choose_batch_tokens
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.text.corpus import read_documents
from bertsmith.text.sources import find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS
from bertsmith.text.wordpiece import Tokenizer

Floats = NDArray[np.float64]
_DEFAULT_DIMS: Final = 256
#: Coefficient a of the weight a / (a + p) of a word with the probability p (SIF; Arora et al.
#: 2017), for probabilities from Zipf's law and for counted ones. Chosen on the training pairs of
#: STS-B with all-MiniLM-L6-v2, like the other constants.
_ZIPF_COEFFICIENT, _COUNT_COEFFICIENT = 1e-4, 8e-4
#: Principal components are divided by this power of their standard deviation, so that the largest
#: ones do not dominate similarities.
_SCALING_POWER: Final = 0.5
#: Directions with less than this fraction of the largest variance are left out.
_MIN_VARIANCE: Final = 1e-6
_UNUSED_TOKEN: Final = re.compile(r"\[unused[0-9]+\]")
#: Approximate number of characters whose tokens are counted together, to bound the memory.
_CHARACTERS_PER_CHUNK: Final = 1 << 20


def write_static_model(
    model: Path | str,
    out: Path | str,
    *,
    dims: int | None = None,
    frequencies: str | None = None,
) -> list[str]:
    """Write the token vectors of an embedding model as a static model.

    The vector of a token is that of the text [CLS] token [SEP], projected to its principal
    components. Rare tokens have more weight.

    Args:
        model: A model directory, run directory, reference model or hub id.
        out: A directory that is empty or does not exist.
        dims: K; None for 256, or less if the model's vectors have less.
        frequencies: A file or folder of text in which tokens are counted; None to assume that the
            vocabulary is sorted by frequency (Zipf's law).

    Returns:
        Notes for the user.

    Raises:
        ModelError: Other libraries cannot tokenize like this model, or ``out`` is not empty.
        InputError: ``dims`` is larger than the width of the vectors, or the text has no word.
    """
    out = Path(out)
    bundle, pooling = load_for_export(model, out, None, None)
    _check_tokenizer(bundle, pooling)
    width = pooling.output_width(bundle.config.width)
    if dims is not None and dims > width:
        raise InputError(f"dims is {dims}, but the model's vectors have {width}; give at most that")
    is_word = _find_words(bundle.tokenizer)
    counts = None
    if frequencies is not None:
        counts = _count_tokens(bundle.tokenizer, frequencies)[is_word]
        if not counts.any():
            raise InputError(
                f"{frequencies}: this text has no word of the vocabulary; expected text in the "
                "language of the model"
            )
    vectors = np.zeros((bundle.tokenizer.vocab_size, dims or min(_DEFAULT_DIMS, width)))
    # Probabilities from Zipf's law give better components than counted ones.
    rank_probabilities = compute_zipf_probabilities(int(is_word.sum()))
    token_vectors = _compute_token_vectors(bundle, pooling, is_word)
    components = compute_components(token_vectors, rank_probabilities)[:, : vectors.shape[1]]
    weights = _ZIPF_COEFFICIENT / (_ZIPF_COEFFICIENT + rank_probabilities)
    if counts is not None:
        # Adding 1 avoids that all words that do not occur have the same maximum weight.
        probabilities = (counts + 1) / (counts + 1).sum()
        weights = _COUNT_COEFFICIENT / (_COUNT_COEFFICIENT + probabilities)
    vectors[is_word, : components.shape[1]] = components * weights[:, None]
    _save(out, bundle, vectors.astype(np.float32))
    if pooling.prompt:
        return [f"the prompt {pooling.prompt!r} of the model is not used"]
    return []


def _check_tokenizer(bundle: EncoderBundle, pooling: PoolingConfig) -> None:
    """Raise ModelError if the tokenizer file does not give the token ids of this model."""
    tokenizer = bundle.tokenizer
    if pooling.lowercase and not tokenizer.lowercase:
        raise ModelError(
            f"{bundle.path}: this model lowercases text before a cased tokenizer, which a static "
            "model cannot do; use a model whose tokenizer lowercases"
        )
    if len(set(tokenizer.spec.tokens)) < tokenizer.vocab_size:
        raise ModelError(
            f"{bundle.path}: the vocabulary has a token twice, which model2vec cannot read; use a "
            "model without repeated tokens"
        )


def _find_words(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which tokens get a vector, bool [V].

    The others are special tokens, such as [UNK], and placeholders, such as [unused1]. Their vectors
    are zero, so that they do not change the direction of a text's vector.
    """
    return np.array(
        [
            token not in SPECIAL_TOKENS and not _UNUSED_TOKEN.fullmatch(token)
            for token in tokenizer.spec.tokens
        ]
    )


def _count_tokens(tokenizer: Tokenizer, path: str) -> Floats:
    """Return how often each token occurs in the documents of a file or folder, float64 [V]."""
    counts = np.zeros(tokenizer.vocab_size)

    def add(texts: Sequence[str]) -> None:
        ids = [i for text_ids in tokenizer.encode_batch(texts) for i in text_ids]
        counts.__iadd__(np.bincount(ids, minlength=len(counts)))

    chunk: list[str] = []
    num_characters = 0
    for document in read_documents(find_sources([path])):
        # No token contains a line break, so lines have the same tokens as the document.
        for line in document.text.split("\n"):
            chunk.append(line)
            num_characters += len(line) + 1
            if num_characters >= _CHARACTERS_PER_CHUNK:
                add(chunk)
                chunk, num_characters = [], 0
    if chunk:
        add(chunk)
    return counts


def _compute_token_vectors(
    bundle: EncoderBundle, pooling: PoolingConfig, is_word: NDArray[np.bool_]
) -> Floats:
    """Return the vector of each word, float64 [number of words, D], before normalization."""
    if pooling.is_normalized:
        pooling = replace(pooling, post_modules=pooling.post_modules[:-1])
    model = build_embedding_model(bundle.model, pooling).eval()
    tokenizer = bundle.tokenizer
    device = torch.device("cpu")
    words = np.flatnonzero(is_word).tolist()
    num_words = choose_batch_tokens(device, bundle.config.feed_forward) // 3

    @torch.no_grad()
    def encode(batch: Sequence[int]) -> NDArray[np.float32]:
        sequences = [([tokenizer.cls_id, word, tokenizer.sep_id], [0, 0, 0]) for word in batch]
        vectors: NDArray[np.float32] = model(pack_sequences(sequences)).numpy()
        return vectors

    batches: Iterable[list[int]] = (
        words[start : start + num_words] for start in range(0, len(words), num_words)
    )
    parts = [vectors for _, vectors in map_in_threads(encode, batches, device)]
    return np.concatenate(parts).astype(np.float64)


def compute_zipf_probabilities(num_words: int) -> Floats:
    """Return probabilities that are inversely proportional to the rank, [number of words]."""
    frequencies = 1 / np.arange(2.0, num_words + 2)
    probabilities: Floats = frequencies / frequencies.sum()
    return probabilities


def compute_components(vectors: Floats, probabilities: Floats) -> Floats:
    """Return the scaled principal components of vectors: [n, D] -> [n, at most D].

    Vectors are centered at their mean in running text. Frequent words have more influence on the
    components than rare ones, but less than in running text. Components are in the order of
    decreasing variance. The sign of each is such that its largest value is positive.

    Args:
        vectors: float64 [n, D].
        probabilities: float64 [n], the probability of each word.
    """
    centered = vectors - probabilities @ vectors
    influence = np.sqrt(probabilities)
    influence /= influence.sum()
    variances, directions = np.linalg.eigh((centered * influence[:, None]).T @ centered)
    order = np.argsort(-variances)
    order = order[variances[order] > _MIN_VARIANCE * variances.max()]
    components = centered @ directions[:, order]
    components /= variances[order] ** (_SCALING_POWER / 2)
    largest = np.abs(components).argmax(0)
    result: Floats = components * np.sign(components[largest, np.arange(len(order))])
    return result


def _save(out: Path, bundle: EncoderBundle, vectors: NDArray[np.float32]) -> None:
    """Write a directory that model2vec and sentence-transformers read."""
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "tokenizer_name": bundle.path.name,
        "apply_pca": vectors.shape[1],
        "hidden_dim": vectors.shape[1],
        "seq_length": 1000000,
        # Without a limit, model2vec truncates texts to 512 tokens.
        "max_length": None,
        "normalize": True,
        "embedding_dtype": "float32",
    }
    modules = [("StaticEmbedding", "."), ("Normalize", "1_Normalize")]
    with atomic_directory(out) as folder:
        tensors = {"embeddings": torch.from_numpy(vectors)}
        save_tensors(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(folder / CONFIG_FILE, config)
        write_json(folder / INFO_FILE, {**bundle.info, "task": "static"})
        bundle.tokenizer.save(folder)
        write_modules_file(folder, modules)
