"""What looks inside a model, kept for the next step of a slider. It never makes HTML."""

from functools import lru_cache

from bertsmith.errors import InputError
from bertsmith.serve.page.wordmap import WordMaps, word_maps
from bertsmith.serve.service import Service
from bertsmith.use.explain import AttentionMaps
from bertsmith.use.vector_settings import build_vector_settings

#: Tokens of a text whose attention is shown; more is neither seen nor quick.
LONGEST = 256
#: Sentences with a word that are compared at once.
SENTENCES = 50
#: Places of that word: each is compared with each, in every layer.
PLACES = 100
#: In the vectors of all layers that a map is made of: 256 MB, some 6,700 tokens of a base-sized
#: model; the map itself has none of them.
_NUMBERS = 64 * 2**20
#: Answers kept: some 40 MB each at the most for a base-sized model's attention.
_KEPT = 4


class Looking:
    """Attention and word maps of the loaded models.

    The last few are kept for all visitors, so that a step of a slider computes nothing anew.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        # On the object, so that the models may go when the page does.
        self._attention = lru_cache(_KEPT)(self._attend)
        self._words = lru_cache(_KEPT)(self._map)

    def attention(self, model: str | None, text: str, pair: str) -> AttentionMaps:
        """Return the attention of all heads over a text, or over two; the text is cut to fit."""
        return self._attention(self._service.find_model(model, "embed").name, text, pair)

    def word(self, model: str | None, word: str, texts: tuple[str, ...]) -> WordMaps:
        """Return distances and maps of a word in all layers. Raises QuestionError."""
        if len(texts) > SENTENCES:
            raise InputError(f"{len(texts)} sentences; expected {SENTENCES} at most")
        return self._words(self._service.find_model(model, "embed").name, word.strip(), texts)

    def sizes(self, model: str | None) -> tuple[int, int]:
        """Return how many layers a model has, and heads a layer."""
        config = self._service.find_model(model, "embed").bundle.config
        return config.layers, config.heads

    def state(self, model: str | None, layer: int) -> int:
        """Return the number of a hidden state, 0 the embeddings; negative ones from the end."""
        layers, _ = self.sizes(model)
        state = layer if layer >= 0 else layers + 1 + layer
        if not 0 <= state <= layers:
            raise InputError(f"layer is {layer}; expected 0 (the embeddings) to {layers}")
        return state

    @staticmethod
    def check(found: AttentionMaps, layer: int, head: int) -> None:
        """Raise QuestionError for a layer or a head that is not there."""
        layers, heads = found.probabilities.shape[:2]
        if not (1 <= layer <= layers and 1 <= head <= heads):
            raise InputError(
                f"there is no layer {layer}, head {head}; expected layers 1 to {layers} and heads "
                f"1 to {heads}"
            )

    def _attend(self, model: str, text: str, pair: str) -> AttentionMaps:
        second = pair if pair.strip() else None
        return self._service.attention(model, text, second, max_seqlen=LONGEST)

    def _map(self, model: str, word: str, texts: tuple[str, ...]) -> WordMaps:
        if not texts:
            raise InputError("there is no sentence; give two or more, one a line")
        embedder = self._service.models[model].embedder
        count = embedder.count_word(texts, word)
        if count > PLACES:
            raise InputError(
                f"{word!r} stands {count:,} times in these sentences; expected {PLACES} at most"
            )
        states = embedder.config.layers + 1
        settings = build_vector_settings(range(states), pooling="none")
        vectors = self._service.tokens(model, texts, settings, most=_NUMBERS)
        return word_maps(word, texts, embedder.word_vectors(texts, word, vectors), states)
