"""Embed texts: a vector for each text, for each of its tokens, or for a word in it.

It never knows what the vectors are compared with, nor where they go.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle, load_encoder
from bertsmith.bundle.encoder import load_pooler
from bertsmith.errors import InputError, ModelError
from bertsmith.interop.sentence_transformers import PoolingConfig, read_pooling
from bertsmith.model.heads import Pooler
from bertsmith.model.memory import format_bytes, inference_bytes, total_memory_bytes
from bertsmith.model.packed import batch_by_length, pack_sequences, preferred_batch_tokens
from bertsmith.runtime.device import keep_freed_memory
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.masked_lm import check_is_text_list
from bertsmith.use.quantization import quantize
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings
from bertsmith.use.vectors import VectorSpec, compute_vectors, resolve_settings

Floats = NDArray[np.float32]
#: The numbers of the texts of each batch, and their vectors: float32 [n, W], or a list of [S, W].
Batches = Iterator[tuple[list[int], Any]]


@dataclass(frozen=True)
class TokenizedTexts:
    """[CLS] text [SEP] of each text, as ids, and how many texts were cut to the model's length."""

    sequences: list[list[int]]
    num_truncated: int


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of a text: words, ids, characters [start, end), and vectors, float32 [S, W].

    [CLS] and [SEP], where they are told, stand for no character. is_truncated: whether the text was
    longer than the model takes.
    """

    tokens: list[str]
    ids: list[int]
    offsets: list[tuple[int, int]]
    vectors: Floats
    is_truncated: bool


@dataclass(frozen=True)
class WordVector:
    """A word where it stands: number of the text (from 0), characters [start, end), vector [W]."""

    text: int
    start: int
    end: int
    vector: Floats


class Embedder:
    """A model that makes vectors of texts; any BERT's directory does."""

    def __init__(
        self, bundle: PretrainedBundle | FineTunedBundle | EncoderBundle, *, fast: bool = False
    ) -> None:
        """``fast``: in the quickest numbers of this machine, of 8 or 16 bits, nearly the same.

        On the CPU the process keeps the memory that batches free, see ``keep_freed_memory``.
        """
        self.path, self.config, self.tokenizer = bundle.path, bundle.config, bundle.tokenizer
        encoder = bundle.model if isinstance(bundle, EncoderBundle) else bundle.model.bert
        self.encoder, self.fast = quantize(encoder) if fast else encoder, fast
        self.device = next(encoder.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.pooling_config = read_pooling(bundle.path)
        self._limits = self.pooling_config or PoolingConfig()

    @classmethod
    def load(
        cls, path: Path | str, *, device: torch.device | str = "cpu", fast: bool = False
    ) -> Self:
        """Read a model directory, a RUN or a hub id. Raises ModelError."""
        return cls(load_encoder(path, device=device), fast=fast)

    def with_token_counter(self, counter: TokenCounter) -> Self:
        """Return an embedder that shares this one's model and counts the tokens that it encodes.

        Args:
            counter: Every text that the copy encodes is added to it, before it is cut off.
        """
        other = copy.copy(self)
        other.tokenizer = self.tokenizer.with_counter(counter)
        return other

    @property
    def max_seqlen(self) -> int:
        """The longest text in tokens, [CLS] and [SEP] counted; what is beyond is cut off."""
        own = self.config.max_positions
        return min(self._limits.max_seq_length or own, own)

    def encode(
        self,
        texts: Sequence[str],
        *,
        layer: int | Sequence[int] | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        special: bool = True,
        combine: str = "concat",
        weights: Sequence[float] = (),
        batch_tokens: int | None = None,
    ) -> Floats:
        """Return float32 [n, W], a vector for each of n texts, in their order.

        layer: by number, -1 the last; several are joined, or make a mean, or a sum by ``weights``
        (``combine`` "concat", "mean", "weighted"). pooling: mean, max, mean-max, first, last or
        pooled; with normalize as the model's directory says if it is one of sentence-transformers,
        else the plain mean. special: whether [CLS] and [SEP] are pooled with the text.
        batch_tokens: of a batch; on the CPU up to four batches are computed at once. A text longer
        than the model takes is cut off. Raises SettingsError.
        """
        recipe = self.resolve_settings(
            build_vector_settings(layer, pooling=pooling, normalize=normalize, special=special,
                        combine=combine, weights=weights)
        )  # fmt: skip
        if recipe.pooling == "none":
            raise InputError('pooling "none" gives a vector a token: ask for tokens() instead')
        return self.encode_with_spec(texts, recipe, batch_tokens)

    def encode_with_spec(
        self, texts: Sequence[str], recipe: VectorSpec, batch_tokens: int | None = None
    ) -> Floats:
        """Return float32 [n, W], a vector for each text, by a recipe that pools."""
        found = np.empty((len(texts), recipe.width), np.float32)
        for numbers, own in self.encode_batches(
            self.tokenize(texts).sequences, recipe, batch_tokens
        ):
            found[numbers] = own
        return found

    def encode_tokens(
        self, texts: Sequence[str], *, layer: int | Sequence[int] | None = None,
        batch_tokens: int | None = None, **more: Any,
    ) -> list[TokenVectors]:  # fmt: skip
        """Return the vectors of each text's tokens; arguments as for ``encode``."""
        settings = build_vector_settings(layer, pooling="none", **more)
        return self.encode_tokens_with_spec(texts, self.resolve_settings(settings), batch_tokens)

    def encode_tokens_with_spec(
        self,
        texts: Sequence[str],
        recipe: VectorSpec,
        batch_tokens: int | None = None,
        compute: Callable[[Sequence[list[int]], VectorSpec, int | None], Batches] | None = None,
    ) -> list[TokenVectors]:
        """Return the vectors of each text's tokens by a recipe whose pooling is "none".

        ``compute``: stands in for ``batches``.
        """
        tokenizer, shift = self.tokenizer, len(self._limits.prompt)
        room = self.max_seqlen - 2
        encoded = tokenizer.encode_batch_with_offsets(self._prepared(texts))
        sequences = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids, _ in encoded]
        found: list[Any] = [None] * len(texts)
        for numbers, own in (compute or self.encode_batches)(sequences, recipe, batch_tokens):
            for number, rows in zip(numbers, own, strict=True):
                ids = sequences[number]
                # What a prompt before the text stands for is no part of the text.
                places = [(max(start - shift, 0), max(end - shift, 0))
                          for start, end in encoded[number][1][:room]]  # fmt: skip
                end = len(texts[number])
                offsets = [(0, 0), *places, (end, end)]
                if len(rows) < len(ids):
                    ids, offsets = ids[1:-1], offsets[1:-1]
                cut = len(encoded[number][0]) > room
                found[number] = TokenVectors(tokenizer.ids_to_tokens(ids), ids, offsets, rows, cut)
        return found

    def encode_word(
        self, texts: Sequence[str], word: str, *, layer: int | Sequence[int] | None = None,
        skip: bool = False, **more: Any,
    ) -> list[WordVector]:  # fmt: skip
        """Return one word's vector wherever it stands in the texts: the mean of its pieces'.

        Where no whole word of a text is this one, words that begin with it count: a Korean noun
        carries its particle. ``skip``: texts without it are left out, instead of a QuestionError.
        """
        spans = self._places(texts, word, skip=skip)
        vectors = self.encode_tokens([texts[number] for number in spans], layer=layer, **more)
        return self._words(word, spans, vectors, skip=skip)

    def word_vectors(
        self, texts: Sequence[str], word: str, vectors: Sequence[TokenVectors]
    ) -> list[WordVector]:
        """Return what ``word`` does, from the vectors of the texts' tokens."""
        spans = self._places(texts, word, skip=False)
        return self._words(word, spans, vectors, skip=False)

    def _places(
        self, texts: Sequence[str], word: str, *, skip: bool
    ) -> dict[int, list[tuple[int, int]]]:
        """Return where the word stands in each text, before anything is computed."""
        check_is_text_list(texts)
        found = {number: self._spans(text, word) for number, text in enumerate(texts)}
        for number, places in found.items():
            if not places and not skip:
                raise InputError(
                    f"text {number + 1}: the word {word!r} is not in {texts[number][:60]!r}; "
                    "expected it in each"
                )
        return {number: places for number, places in found.items() if places}

    def _words(
        self,
        word: str,
        spans: Mapping[int, list[tuple[int, int]]],
        vectors: Sequence[TokenVectors],
        *,
        skip: bool,
    ) -> list[WordVector]:
        found = []
        for (number, places), one in zip(spans.items(), vectors, strict=True):
            for start, end in places:
                pieces = [
                    place for place, (a, b) in enumerate(one.offsets) if a < end and b > start
                ]
                if pieces:
                    vector = one.vectors[pieces].mean(0)
                    found.append(WordVector(number, start, end, vector))
                elif not skip:
                    raise InputError(
                        f"text {number + 1}: the word {word!r} stands beyond the "
                        f"{self.max_seqlen} tokens that this model takes; shorten the text"
                    )
        return found

    def resolve_settings(self, settings: VectorSettings) -> VectorSpec:
        """Return settings, worked out for this model. Raises SettingsError."""
        return resolve_settings(settings, self.pooling_config, self.config)

    def tokenize(self, texts: Sequence[str]) -> TokenizedTexts:
        """Return each text as ids, cut to what the model takes."""
        tokenizer, room = self.tokenizer, self.max_seqlen - 2
        found = tokenizer.encode_batch(self._prepared(texts))
        sequences = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids in found]
        return TokenizedTexts(sequences, sum(len(ids) > room for ids in found))

    def encode_batches(
        self, sequences: Sequence[list[int]], recipe: VectorSpec, batch_tokens: int | None = None
    ) -> Batches:
        """Yield the numbers of each batch's texts, and their vectors as ``compute_vectors`` has them."""
        budget = batch_tokens or preferred_batch_tokens(self.device, self.config.feed_forward)
        pooler = self._pooler if recipe.pooling == "pooled" else None

        @torch.inference_mode()
        def compute(group: list[int]) -> Any:
            packed = pack_sequences(
                [(sequences[number], [0] * len(sequences[number])) for number in group]
            )
            found = compute_vectors(self.encoder, packed.to(self.device), recipe, pooler)
            if isinstance(found, list):
                return [own.cpu().numpy() for own in found]
            return found.cpu().numpy()

        lengths = [len(ids) for ids in sequences]
        if batch_tokens is not None:
            sizes = (
                sum(lengths[one] for one in group) for group in batch_by_length(lengths, budget)
            )
            self._require_memory(max(sizes, default=0))
        return map_in_threads(compute, batch_by_length(lengths, budget), self.device)

    def _require_memory(self, num_tokens: int) -> None:
        """Raise QuestionError where a batch of so many tokens cannot fit in memory."""
        needed = inference_bytes(self.config, num_tokens)
        if self.device.type == "cpu" and needed > total_memory_bytes():
            raise InputError(
                f"a batch of {num_tokens:,} tokens needs at least {format_bytes(needed)} of memory, "
                f"and this machine has {format_bytes(total_memory_bytes())}; lower batch_tokens "
                "(--batch-tokens)"
            )

    def preload_pooler(self) -> None:
        """Read the pooler now, not when it is first asked for; nothing where there is none."""
        with suppress(ModelError):
            _ = self._pooler

    @cached_property
    def _pooler(self) -> Pooler:
        return load_pooler(self.path, self.config).to(self.device)

    def _prepared(self, texts: Sequence[str]) -> list[str]:
        """Return the texts as the tokenizer is to see them; QuestionError for a lone text."""
        check_is_text_list(texts)
        texts = [self._limits.prompt + text for text in texts]
        if self._limits.lowercase and not self.tokenizer.lowercase:
            # Character by character, as their tokenizers do it.
            texts = ["".join(character.lower() for character in text) for text in texts]
        return texts

    def count_word(self, texts: Sequence[str], word: str) -> int:
        """Return in how many places of the texts a word stands; nothing is computed."""
        return sum(len(self._spans(text, word)) for text in texts)

    def _spans(self, text: str, word: str) -> list[tuple[int, int]]:
        """Return where a word stands in a text."""
        flags = re.IGNORECASE if self.tokenizer.lowercase else 0
        begins = rf"(?<!\w){re.escape(word.strip())}"
        for pattern in (rf"{begins}(?!\w)", begins):
            found = [match.span() for match in re.finditer(pattern, text, flags)]
            if found and word.strip():
                return found
        return []


def embed(
    model: PretrainedBundle | FineTunedBundle | EncoderBundle | Path | str,
    texts: Sequence[str],
    **settings: Any,
) -> Floats:
    """Return float32 [n, W], a vector for each of n texts, in their order.

    ``model`` is loaded, or any model directory, RUN or hub id. ``settings``: see
    ``Embedder.encode``. To embed more than once, keep an ``Embedder``.
    """
    bundle = load_encoder(model) if isinstance(model, Path | str) else model
    return Embedder(bundle).encode(texts, **settings)
