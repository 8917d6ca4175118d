"""Compute attention and word maps of the loaded models, with a cache for the page's sliders."""

from functools import lru_cache

from bertsmith.errors import InputError
from bertsmith.serve.page.wordmap import WordMaps, word_maps
from bertsmith.serve.service import Service
from bertsmith.use.explain import AttentionMaps
from bertsmith.use.vector_settings import build_vector_settings

#: Maximum tokens of a text whose attention is shown; more would be slow and unreadable.
MAX_TOKENS = 256
#: Maximum sentences of a word map.
MAX_SENTENCES = 50
#: Maximum occurrences of the word; every two occurrences are compared in every layer.
MAX_OCCURRENCES = 100
#: Maximum numbers in the token vectors of all layers: 256 MB, about 6,700 tokens of a base model.
_MAX_NUMBERS = 64 * 2**20
#: Cached results; the attention of a base model has up to 40 MB.
_CACHE_SIZE = 4


class ModelInspector:
    """Attention and word maps of the loaded models.

    The latest results are cached for all visitors, because each step of a slider needs them again.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        # Caches of the instance: those of a decorated method would keep the models in memory.
        self._cached_attention = lru_cache(_CACHE_SIZE)(self._compute_attention)
        self._cached_maps = lru_cache(_CACHE_SIZE)(self._compute_maps)

    def attention(self, model: str | None, text: str, pair: str) -> AttentionMaps:
        """Return the attention of all heads for a text or a pair, truncated to MAX_TOKENS."""
        return self._cached_attention(self._service.find_model(model, "embed").name, text, pair)

    def word(self, model: str | None, word: str, texts: tuple[str, ...]) -> WordMaps:
        """Return the distances and maps of a word's vectors in all layers.

        Raises:
            InputError: there are too many or too few sentences or occurrences.
        """
        if len(texts) > MAX_SENTENCES:
            raise InputError(f"the limit is {MAX_SENTENCES} sentences, got {len(texts)}")
        return self._cached_maps(self._service.find_model(model, "embed").name, word.strip(), texts)

    def sizes(self, model: str | None) -> tuple[int, int]:
        """Return the number of layers and heads of a model."""
        config = self._service.find_model(model, "embed").bundle.config
        return config.layers, config.heads

    def layer_index(self, model: str | None, layer: int) -> int:
        """Return a non-negative layer index (0: embeddings); negative layers count from the end.

        Raises:
            InputError: there is no such layer.
        """
        layers, _ = self.sizes(model)
        index = layer if layer >= 0 else layers + 1 + layer
        if not 0 <= index <= layers:
            raise InputError(f"layer is {layer}; expected 0 (the embeddings) to {layers}")
        return index

    @staticmethod
    def check(maps: AttentionMaps, layer: int, head: int) -> None:
        """Raise InputError for a layer or head that does not exist; both count from 1."""
        layers, heads = maps.probabilities.shape[:2]
        if not (1 <= layer <= layers and 1 <= head <= heads):
            raise InputError(
                f"there is no layer {layer}, head {head}; expected layers 1 to {layers} and heads "
                f"1 to {heads}"
            )

    def _compute_attention(self, model: str, text: str, pair: str) -> AttentionMaps:
        second = pair if pair.strip() else None
        return self._service.attention(model, text, second, max_seqlen=MAX_TOKENS)

    def _compute_maps(self, model: str, word: str, texts: tuple[str, ...]) -> WordMaps:
        if not texts:
            raise InputError("there is no sentence; enter two or more, one per line")
        embedder = self._service.models[model].embedder
        count = embedder.count_word(texts, word)
        if count > MAX_OCCURRENCES:
            raise InputError(
                f"the limit is {MAX_OCCURRENCES} occurrences of {word!r}, got {count:,}; use fewer "
                "sentences"
            )
        num_states = embedder.config.layers + 1
        settings = build_vector_settings(range(num_states), pooling="none")
        vectors = self._service.embed_tokens(
            model, texts, settings, max_vector_elements=_MAX_NUMBERS
        )
        return word_maps(
            word, texts, embedder.compute_word_vectors(texts, word, vectors), num_states
        )
