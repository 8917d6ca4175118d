"""Embed texts: one vector per text, per token, or per occurrence of a word.

In shapes, n is the number of texts and W the width of a vector.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle
from bertsmith.bundle.encoder import load_pooler
from bertsmith.errors import InputError, ModelError
from bertsmith.interop.openvino import (
    EmbeddingBundle,
    OpenVINOEncoder,
    load_embedding_encoder,
)
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.interop.sentence_transformers.splade import SpladeConfig, read_splade
from bertsmith.memory import format_bytes, get_total_memory_bytes
from bertsmith.model.heads import Pooler
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime.device import keep_freed_memory
from bertsmith.runtime.inference_batches import batch_by_length, choose_batch_tokens
from bertsmith.runtime.memory_estimates import estimate_inference_bytes
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.inputs import check_is_text_list
from bertsmith.use.model_setup import set_up_embedding_encoder
from bertsmith.use.token_vectors import (
    Floats,
    TokenizedTexts,
    TokenVectors,
    WordVector,
    average_word_tokens,
    find_word_in_texts,
)
from bertsmith.use.vector_settings import TruncationSide, VectorSettings, build_vector_settings
from bertsmith.use.vectors import VectorSpec, compute_vectors, resolve_settings

#: For each batch, the indices of its texts, and their vectors: float32 [n, W] with one vector per
#: text, or a list of n arrays [S, W] with one vector per token.
VectorBatches = Iterator[tuple[list[int], Any]]
Item = TypeVar("Item")
#: Number of texts whose token vectors are in memory at the same time, to compute those of a word.
_WORD_TEXTS = 64


class Embedder:
    """Computes vectors of texts with any BERT model directory.

    Attributes:
        path: The model directory.
        config: The model's config.
        tokenizer: The model's tokenizer.
        encoder: The encoder; an OpenVINO graph if the directory has one and no weights.
        fast: Whether the encoder uses 8-bit or 16-bit arithmetic.
        device: The device of the encoder.
        has_pooler: Whether the model may have BERT's pooler; see ``preload_pooler``.
        pooling_config: Pooling of a sentence-transformers directory; None for other models.
        prompt_name: The argument of ``with_prompt``; None for the model's default prompt.
        splade_config: Sparse vectors of a sentence-transformers directory, or the defaults.
        text_config: How texts are preprocessed: prompts, lowercasing and maximum length.
    """

    def __init__(
        self,
        bundle: EmbeddingBundle,
        *,
        fast: bool = False,
    ) -> None:
        """Create an embedder from a loaded model.

        On a CPU, the memory of a finished batch is kept for the next batches instead of being
        returned to the operating system; see ``keep_freed_memory``. On CUDA, products of float32
        matrices use TF32.

        Args:
            bundle: The loaded model.
            fast: Whether to use 8-bit or 16-bit arithmetic, whichever is faster on this machine.
                The vectors change little; see ``quantize``.

        Raises:
            SettingsError: ``fast`` is set for an OpenVINO graph.
        """
        self.path = bundle.path
        self.config = bundle.config
        self.tokenizer = bundle.tokenizer
        self.encoder, self.device = set_up_embedding_encoder(bundle, fast=fast)
        self.fast = fast
        if self.device.type == "cpu":
            keep_freed_memory()
        self.pooling_config = read_pooling(bundle.path)
        self.prompt_name: str | None = None
        self.has_pooler = True
        self.splade_config = read_splade(bundle.path) or SpladeConfig()
        self.text_config = self.pooling_config or self.splade_config.text_config

    @classmethod
    def load(
        cls, path: Path | str, *, device: torch.device | str = "cpu", fast: bool = False
    ) -> Self:
        """Create an embedder from a model directory, a run directory, or the name of a model.

        Raises:
            ModelError: The model cannot be loaded.
            SettingsError: ``fast`` is set for an OpenVINO graph.
        """
        return cls(load_embedding_encoder(path, device=device), fast=fast)

    def with_token_counter(self, counter: TokenCounter) -> Self:
        """Return an embedder with the same model that counts the tokens it encodes.

        Args:
            counter: Receives the tokens of every encoded text, before truncation.
        """
        embedder = copy.copy(self)
        embedder.tokenizer = self.tokenizer.with_counter(counter)
        return embedder

    @property
    def prompts(self) -> Mapping[str, str]:
        """Prompts by name, as declared by a sentence-transformers directory."""
        return self.text_config.prompts

    def with_prompt(self, name: str | None) -> Self:
        """Return an embedder with the same model that adds a prompt to every text.

        Args:
            name: Name of a prompt in ``prompts``; None or "default" for the model's default prompt,
                if it has one.

        Raises:
            InputError: The model declares no such prompt.
        """
        if name is None or (name == "default" and name not in self.prompts):
            return self
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts))
            advice = f"expected one of {names}" if names else "the model declares no prompts"
            raise InputError(f"unknown prompt {name!r}; {advice}")
        embedder = copy.copy(self)
        embedder.prompt_name = name
        embedder.text_config = replace(self.text_config, default_prompt_name=name)
        return embedder

    def without_prompt(self) -> Self:
        """Return an embedder with the same model that adds no prompt to texts."""
        embedder = copy.copy(self)
        embedder.text_config = replace(self.text_config, default_prompt_name=None)
        return embedder

    def with_query_prompt(self) -> Self:
        """Return an embedder that adds the model's prompt of queries."""
        return self.with_prompt(self.text_config.query_prompt_name)

    def with_document_prompt(self) -> Self:
        """Return an embedder that adds the model's prompt of documents."""
        return self.with_prompt(self.text_config.document_prompt_name)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens, including [CLS] and [SEP], to which longer texts are truncated."""
        max_positions = self.config.max_positions
        return min(self.text_config.max_seq_length or max_positions, max_positions)

    def encode(
        self,
        texts: Sequence[str],
        *,
        layer: int | Sequence[int] | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        include_special_tokens: bool = True,
        combine: str = "concat",
        weights: Sequence[float] = (),
        batch_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> Floats:
        """Compute one vector per text. Texts longer than the maximum length are truncated.

        Pooling and normalization default to what a sentence-transformers directory specifies, and
        to mean pooling without normalization for other models.

        Args:
            texts: The texts.
            layer: Layer number or numbers; -1 is the last layer, 0 the embeddings.
            pooling: "mean", "max", "mean-max", "first" ([CLS]), "last" ([SEP]), or "pooled" (the
                output of the model's pooler).
            normalize: Whether to scale each vector to length 1.
            include_special_tokens: Whether pooling includes [CLS] and [SEP].
            combine: How several layers are combined: "concat", "mean" or "weighted".
            weights: One weight per layer, if ``combine`` is "weighted".
            batch_tokens: Maximum number of tokens per batch. On a CPU, up to four batches are
                computed in parallel.
            prompt_name: Name of the prompt to add to each text; see ``with_prompt``.

        Returns:
            float32 [n, W], in input order.

        Raises:
            SettingsError: The settings are invalid for this model.
            InputError: The model declares no such prompt.
        """
        spec = self.resolve_settings(
            build_vector_settings(
                layer,
                pooling=pooling,
                normalize=normalize,
                include_special_tokens=include_special_tokens,
                combine=combine,
                weights=weights,
            )
        )
        if spec.pooling == "none":
            raise InputError(
                'pooling is "none", which gives one vector per token; call encode_tokens() instead'
            )
        return self.with_prompt(prompt_name).encode_with_spec(texts, spec, batch_tokens)

    def encode_with_spec(
        self, texts: Sequence[str], spec: VectorSpec, batch_tokens: int | None = None
    ) -> Floats:
        """Compute one vector per text, float32 [n, W]; the spec's pooling must not be "none"."""
        vectors = np.empty((len(texts), spec.width), np.float32)
        sequences = self.tokenize(texts).sequences
        for indices, batch_vectors in self.encode_batches(sequences, spec, batch_tokens):
            vectors[indices] = batch_vectors
        return vectors

    def encode_tokens(
        self,
        texts: Sequence[str],
        *,
        layer: int | Sequence[int] | None = None,
        batch_tokens: int | None = None,
        prompt_name: str | None = None,
        **settings: Any,
    ) -> list[TokenVectors]:
        """Compute one vector per token of each text; arguments of ``encode`` except pooling."""
        spec = self.resolve_settings(build_vector_settings(layer, pooling="none", **settings))
        embedder = self.with_prompt(prompt_name)
        return embedder.encode_tokens_with_spec(texts, spec, batch_tokens)

    def encode_tokens_with_spec(
        self,
        texts: Sequence[str],
        spec: VectorSpec,
        batch_tokens: int | None = None,
        compute: Callable[[Sequence[list[int]], VectorSpec, int | None], VectorBatches]
        | None = None,
    ) -> list[TokenVectors]:
        """Compute one vector per token of each text.

        Args:
            texts: The texts.
            spec: A spec whose pooling is "none".
            batch_tokens: Maximum number of tokens per batch.
            compute: Computes the vectors of the sequences; by default ``encode_batches``.
        """
        encoded = self.tokenizer.encode_batch_with_offsets(self._preprocess(texts))
        sequences = [self.build_sequence(ids) for ids, _ in encoded]
        compute = compute or self.encode_batches
        results: list[Any] = [None] * len(texts)
        for indices, batch in compute(sequences, spec, batch_tokens):
            for index, vectors in zip(indices, batch, strict=True):
                ids, offsets = encoded[index]
                results[index] = self._build_token_vectors(
                    texts[index],
                    self._truncate(ids),
                    self._truncate(offsets),
                    vectors,
                    is_truncated=len(ids) > self._max_text_tokens,
                )
        return results

    def _build_token_vectors(
        self,
        text: str,
        ids: list[int],
        offsets: list[tuple[int, int]],
        vectors: Floats,
        *,
        is_truncated: bool,
    ) -> TokenVectors:
        """Combine the tokens of a text with their vectors.

        Args:
            text: The text without the prompt.
            ids: The token ids of the prompt and the text, without [CLS] and [SEP].
            offsets: The range [start, end) of the characters of each of these tokens.
            vectors: float32 [S, W], with or without the vectors of [CLS] and [SEP].
            is_truncated: Whether the ids were truncated.
        """
        offsets = self.text_config.restore_offsets(text, offsets, self.tokenizer)
        has_special_tokens = len(vectors) > len(ids)
        if has_special_tokens:
            ids = [self.tokenizer.cls_id, *ids, self.tokenizer.sep_id]
            offsets = [(0, 0), *offsets, (len(text), len(text))]
        tokens = self.tokenizer.ids_to_tokens(ids)
        return TokenVectors(tokens, ids, offsets, vectors, is_truncated)

    def encode_word(
        self,
        texts: Sequence[str],
        word: str,
        *,
        layer: int | Sequence[int] | None = None,
        skip: bool = False,
        **settings: Any,
    ) -> list[WordVector]:
        """Compute a vector for each occurrence of a word: the mean over its WordPiece tokens.

        If a text contains the word only as the beginning of longer words, these count as
        occurrences, because a Korean noun is written together with its particle.

        Args:
            texts: The texts.
            word: The word.
            layer: As for ``encode``.
            skip: Whether to skip texts without the word.
            settings: As for ``encode``, except pooling.

        Raises:
            InputError: A text does not contain the word, and ``skip`` is False.
        """
        spans_by_text = self.find_word(texts, word, skip=skip)
        items = list(spans_by_text.items())
        word_vectors: list[WordVector] = []
        # The vectors of all tokens of all texts could need gigabytes.
        for first in range(0, len(items), _WORD_TEXTS):
            spans = dict(items[first : first + _WORD_TEXTS])
            vectors = self.encode_tokens([texts[index] for index in spans], layer=layer, **settings)
            word_vectors += average_word_tokens(word, spans, vectors, self.max_seqlen, skip=skip)
        return word_vectors

    def resolve_settings(self, settings: VectorSettings) -> VectorSpec:
        """Resolve settings for this model.

        Raises:
            SettingsError: The settings are invalid for this model.
        """
        spec = resolve_settings(settings, self.pooling_config, self.config)
        if isinstance(self.encoder, OpenVINOEncoder):
            self.encoder.check_settings(spec.layer_indices, spec.pooling)
        return spec

    def tokenize(
        self, texts: Sequence[str], truncation_side: TruncationSide = "right"
    ) -> TokenizedTexts:
        """Tokenize texts and truncate them to the model's maximum length."""
        return self.build_sequences(self.encode_texts(texts), truncation_side)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts with the prompt: without special tokens, not truncated."""
        return self.tokenizer.encode_batch(self._preprocess(texts))

    def build_sequences(
        self, encoded: Sequence[list[int]], truncation_side: TruncationSide = "right"
    ) -> TokenizedTexts:
        """Truncate the results of ``encode_texts`` and add special tokens."""
        sequences = [self.build_sequence(ids, truncation_side) for ids in encoded]
        num_truncated = sum(len(ids) > self._max_text_tokens for ids in encoded)
        return TokenizedTexts(sequences, num_truncated)

    @property
    def _max_text_tokens(self) -> int:
        """Maximum number of tokens of a text, without [CLS] and [SEP]."""
        return self.max_seqlen - 2

    def build_sequence(
        self, ids: list[int], truncation_side: TruncationSide = "right"
    ) -> list[int]:
        """Return [CLS] text [SEP] for the token ids of a text, truncated to the maximum length."""
        ids = self._truncate(ids, truncation_side)
        return [self.tokenizer.cls_id, *ids, self.tokenizer.sep_id]

    def _truncate(self, items: list[Item], truncation_side: TruncationSide = "right") -> list[Item]:
        """Return the ids or offsets of a text's tokens, without those beyond the maximum length."""
        if truncation_side == "left":
            return items[max(len(items) - self._max_text_tokens, 0) :]
        return items[: self._max_text_tokens]

    @torch.inference_mode()
    def encode_batch(self, sequences: Sequence[list[int]], spec: VectorSpec) -> Any:
        """Compute the vectors of sequences as one batch.

        Returns:
            float32 [n, W], or a list of n arrays [S, W] if the pooling of the spec is "none".
        """
        batch = pack_sequences([(ids, [0] * len(ids)) for ids in sequences]).to(self.device)
        pooler = self._pooler if spec.pooling == "pooled" else None
        vectors = compute_vectors(self.encoder, batch, spec, pooler)
        if isinstance(vectors, list):
            return [token_vectors.cpu().numpy() for token_vectors in vectors]
        return vectors.cpu().numpy()

    def encode_batches(
        self, sequences: Sequence[list[int]], spec: VectorSpec, batch_tokens: int | None = None
    ) -> VectorBatches:
        """Compute the vectors of sequences in batches of similar lengths; see ``VectorBatches``."""
        dtype = torch.float32
        if not isinstance(self.encoder, OpenVINOEncoder):
            dtype = self.encoder.embeddings.words.weight.dtype
        feed_forward = self.config.feed_forward
        max_tokens = batch_tokens or choose_batch_tokens(self.device, feed_forward, dtype)

        def compute(indices: list[int]) -> Any:
            return self.encode_batch([sequences[index] for index in indices], spec)

        lengths = [len(ids) for ids in sequences]
        if batch_tokens is not None:
            tokens_per_batch = (
                sum(lengths[index] for index in indices)
                for indices in batch_by_length(lengths, max_tokens)
            )
            self._check_memory(max(tokens_per_batch, default=0))
        return map_in_threads(compute, batch_by_length(lengths, max_tokens), self.device)

    def _check_memory(self, num_tokens: int) -> None:
        """Raise InputError if a batch of this many tokens cannot fit in memory."""
        required = estimate_inference_bytes(self.config, num_tokens)
        if self.device.type == "cpu" and required > get_total_memory_bytes():
            raise InputError(
                f"a batch of {num_tokens:,} tokens needs at least {format_bytes(required)} of "
                f"memory, and this machine has {format_bytes(get_total_memory_bytes())}; lower "
                "batch_tokens (--batch-tokens)"
            )

    def preload_pooler(self) -> None:
        """Load the pooler now instead of at first use, and set ``has_pooler``."""
        try:
            _ = self._pooler  # Reading the cached property loads the pooler.
        except ModelError:
            self.has_pooler = False

    @cached_property
    def _pooler(self) -> Pooler:
        return load_pooler(self.path, self.config).to(self.device)

    def _preprocess(self, texts: Sequence[str]) -> list[str]:
        """Prepend the prompt to the texts and lowercase them, as the model's configuration says.

        Raises:
            InputError: ``texts`` is a single string.
        """
        check_is_text_list(texts)
        return self.text_config.prepare_texts(texts, self.tokenizer)

    def find_word(
        self, texts: Sequence[str], word: str, *, skip: bool = False
    ) -> dict[int, list[tuple[int, int]]]:
        """Return the character ranges of a word by text index, without running the model.

        Args:
            texts: The texts.
            word: The word.
            skip: Whether to skip texts without the word.

        Raises:
            InputError: A text does not contain the word, and ``skip`` is False.
        """
        return find_word_in_texts(texts, word, ignore_case=self._ignores_case, skip=skip)

    @property
    def _ignores_case(self) -> bool:
        """Whether the model reads lowercased text."""
        return self.tokenizer.lowercase or self.text_config.lowercase


def embed(
    model: PretrainedBundle | FineTunedBundle | EncoderBundle | Path | str,
    texts: Sequence[str],
    fast: bool = False,
    **settings: Any,
) -> Floats:
    """Compute one vector per text. To embed repeatedly, create an ``Embedder``.

    Args:
        model: A loaded model, or a path or name as in ``load``.
        texts: The texts.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        settings: See ``Embedder.encode``.

    Returns:
        float32 [n, W], in input order.
    """
    bundle = load_embedding_encoder(model) if isinstance(model, Path | str) else model
    return Embedder(bundle, fast=fast).encode(texts, **settings)
