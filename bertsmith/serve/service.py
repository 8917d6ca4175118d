"""What a server can be asked, whoever asks: every model by its name, and what it can do.

It never knows HTTP. Every method waits for its answer and may be called from any thread; what many
threads ask is computed together.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from bertsmith.bundle import Bundle, TaskBundle
from bertsmith.errors import ModelError, SettingsError
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.thread_pool import at_once
from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import LargeError, Patience, waited
from bertsmith.serve.limits import refuse_half, refuse_top, within
from bertsmith.serve.models import (
    Served,
    attentions_of,
    finite,
    masks_of,
    outputs_of,
    vectors_of,
)
from bertsmith.serve.settings import ServeSettings
from bertsmith.tasks.inputs import Inputs
from bertsmith.tasks.outputs import Compute
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.answer import Answer, answer_each
from bertsmith.use.choose import Choice, choose_each
from bertsmith.use.embed import Batches, Floats, TokenVectors
from bertsmith.use.explain import Attention
from bertsmith.use.fill import MASK, Filling, fill_each
from bertsmith.use.masked_lm import Answers, Asking, Question
from bertsmith.use.pair import Pair, Pairing, follows, pair_each
from bertsmith.use.predict import Prediction, predict_each
from bertsmith.use.tag import Tagged, tag_each
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vectors import Recipe

#: Characters that /tokenize reads between two looks at its deadline.
_GROUP_CHARACTERS: Final = 65_536


@dataclass(frozen=True)
class Embedding:
    """What was asked of a model: a future of float32 [W] for each text, and the tokens of all."""

    model: str
    vectors: Future[list[Any]]
    width: int
    tokens: int


class Service:
    """The loaded models, by name, in the order in which they were given."""

    def __init__(
        self,
        models: Iterable[Served],
        settings: ServeSettings | None = None,
        told: Callable[[int, int, float], None] | None = None,
        token_counter: Callable[[str], TokenCounter] | None = None,
    ) -> None:
        """Serve models.

        Args:
            models: The loaded models.
            settings: The limits of the server.
            told: Is told of each batch: units, tokens, seconds.
            token_counter: Returns what counts the tokens of a model, by its name; called in
                several threads.
        """
        self.models = {
            own.name: own.counting(token_counter(own.name)) if token_counter else own
            for own in models
        }
        self.settings = settings or ServeSettings()
        self.batcher = Batcher(
            batch_tokens=self.settings.batch_tokens,
            queue_tokens=self.settings.queue_tokens,
            call_tokens=self.settings.tokens,
            wait=self.settings.wait_ms / 1000,
            at_once=min((at_once(own.embedder.device) for own in self.models.values()), default=1),
            told=told,
        )

    def able(self, ability: str) -> list[str]:
        """Return the names of the models that can do something."""
        return [name for name, own in self.models.items() if ability in own.abilities]

    def find(self, name: str | None, ability: str) -> Served:
        """Return the model of a name, or the first that is able; ModelError where there is none."""
        able = self.able(ability)
        if name is not None and name not in self.models:
            raise ModelError(
                f"there is no model {name!r} here; expected one of {', '.join(self.models)}"
            )
        if not able or (name is not None and name not in able):
            who = f"the model {name!r} cannot" if name is not None else "no model here can"
            others = f"; expected one of {', '.join(able)}" if able else ""
            raise ModelError(f"{who} {ability}{others}")
        return self.models[name or able[0]]

    def fill(
        self, name: str | None, texts: Sequence[str], top: int, patience: Patience | None = None
    ) -> list[list[Filling]]:
        """Return the likeliest words at each [MASK] of each text."""
        own = self.checked(name, "fill", texts, patience)
        assert isinstance(own.bundle, Bundle)
        refuse_top(top)
        within("masks", sum(text.count(MASK) for text in texts), self.settings.masks)
        return list(fill_each(own.bundle, texts, top, self._asking(own, self._until(patience))))

    def pair(
        self,
        name: str | None,
        pairs: Sequence[tuple[str, str]],
        patience: Patience | None = None,
    ) -> list[Pairing]:
        """Return how probable it is that B follows A, for each pair."""
        own, until = self.checked(name, "pair", pairs, patience), self._until(patience)
        assert isinstance(own.bundle, Bundle)

        def compute(bundle: Bundle, sequences: Sequence[Pair]) -> list[float]:
            units = [(len(ids), (ids, segments)) for ids, segments in sequences]
            batch = finite(own.name, partial(follows, bundle))
            return self.batcher.run((own.name, "pair"), batch, units, until)

        return list(pair_each(own.bundle, pairs, compute))

    def classify(
        self,
        name: str | None,
        texts: Sequence[str | tuple[str, str]],
        patience: Patience | None = None,
    ) -> list[Prediction]:
        """Return the labels, or the number, of each text or pair."""
        own = self.checked(name, "classify", texts, patience)
        return list(predict_each(_task(own), texts, self._outputs(own, self._until(patience))))

    def tag(
        self, name: str | None, texts: Sequence[str], patience: Patience | None = None
    ) -> list[Tagged]:
        """Return the entities, or the tags, of each text."""
        own = self.checked(name, "tag", texts, patience)
        return list(tag_each(_task(own), texts, self._outputs(own, self._until(patience))))

    def answer(
        self,
        name: str | None,
        questions: Sequence[tuple[str, str]],
        patience: Patience | None = None,
    ) -> list[Answer]:
        """Return the answer to each (question, context)."""
        own = self.checked(name, "answer", questions, patience)
        return list(answer_each(_task(own), questions, self._outputs(own, self._until(patience))))

    def choose(
        self,
        name: str | None,
        questions: Sequence[tuple[str, Sequence[str]]],
        patience: Patience | None = None,
    ) -> list[Choice]:
        """Return which ending fits, for each (prompt, endings)."""
        own = self.checked(name, "choose", questions, patience)
        return list(choose_each(_task(own), questions, self._outputs(own, self._until(patience))))

    def embed(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Patience | None = None,
    ) -> Floats:
        """Return a vector for each text, float32 [n, W]."""
        until = self._until(patience)
        asked = self.embedding(name, texts, settings, until)
        found = waited(asked.vectors, until)
        return np.stack(found) if found else np.empty((0, asked.width), np.float32)

    def embedding(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Patience,
        *,
        truncate: bool = True,
    ) -> "Embedding":
        """Return what ``embed`` waits for. Without ``truncate`` a text too long is an error."""
        own = self.checked(name, "embed", texts, patience)
        recipe = own.embedder.recipe(settings)
        if recipe.pooling == "none":
            raise SettingsError('pooling "none" gives a vector a token: ask /embed_all')
        encoded = own.embedder.ids(texts)
        if encoded.cut_off and not truncate:
            raise LargeError(
                f"{encoded.cut_off:,} of the texts are longer than the {own.embedder.longest} "
                "tokens that this model takes; shorten them, or send truncate: true"
            )
        within("numbers", len(texts) * recipe.width, self.settings.numbers)
        units = [(len(ids), ids) for ids in encoded.sequences]
        compute = finite(own.name, partial(vectors_of, own.embedder, recipe))
        key = (own.name, "embed", settings)
        future = self.batcher.submit(key, compute, units, patience)
        return Embedding(own.name, future, recipe.width, sum(size for size, _ in units))

    def tokens(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Patience | None = None,
        *,
        most: int | None = None,
    ) -> list[TokenVectors]:
        """Return the vectors of each text's tokens; the pooling of ``settings`` is not read.

        most: how many numbers they may have, where that is another than an answer's bound.
        """
        own, until = self.checked(name, "embed", texts, patience), self._until(patience)
        settings = settings.model_copy(update={"pooling": "none"})
        key = (own.name, "embed", settings)

        def compute(sequences: Sequence[list[int]], recipe: Recipe, _: int | None) -> Batches:
            units = [(len(ids), ids) for ids in sequences]
            numbers = sum(size for size, _ in units) * recipe.width
            within("numbers", numbers, most or self.settings.numbers)
            batch = finite(own.name, partial(vectors_of, own.embedder, recipe))
            yield list(range(len(units))), self.batcher.run(key, batch, units, until)

        return own.embedder.token_vectors(texts, own.embedder.recipe(settings), None, compute)

    def attention(
        self,
        name: str | None,
        text: str,
        pair: str | None = None,
        *,
        longest: int | None = None,
        patience: Patience | None = None,
    ) -> Attention:
        """Return what each head of each layer looks at, in so many tokens at most."""
        own = self.checked(name, "embed", [text])
        units = [(longest or own.embedder.longest, (text, pair, longest))]
        compute = finite(own.name, partial(attentions_of, own))
        [found] = self.batcher.run((own.name, "attention"), compute, units, self._until(patience))
        result: Attention = found
        return result

    def close(self) -> None:
        """Finish what is under way and end."""
        self.batcher.close(self.settings.stop_seconds)

    def _until(self, patience: Patience | None) -> Patience:
        return patience or Patience(self.settings.seconds)

    def checked(
        self,
        name: str | None,
        ability: str,
        texts: Sequence[Any],
        patience: Patience | None = None,
    ) -> Served:
        """Return the model that is asked; LargeError for too many texts, QuestionError for none.

        A text that is none has half a character, which JSON can write and no model reads. The
        model counts the tokens that it encodes in ``patience.counts``.
        """
        within("texts", len(texts), self.settings.texts)
        refuse_half(texts)
        own = self.find(name, ability)
        return own if patience is None else own.counting(patience.counts)

    def tokenized(
        self, name: str | None, texts: Sequence[str], patience: Patience | None = None
    ) -> tuple[Served, list[tuple[list[int], list[tuple[int, int]]]]]:
        """Return ids and characters of the tokens of each text, and whose they are.

        Raises:
            LargeError: the texts have too many tokens.
            LateError: the time is over; it is looked at between groups of texts.
            GoneError: the client went away.
        """
        own, until = self.checked(name, "embed", texts, patience), self._until(patience)
        encoded: list[tuple[list[int], list[tuple[int, int]]]] = []
        tokens = 0
        for group in _groups(texts, _GROUP_CHARACTERS):
            until.check()
            encoded += own.bundle.tokenizer.encode_batch_with_offsets(group)
            tokens += sum(len(ids) for ids, _ in encoded[-len(group) :])
            within("tokens", tokens, self.settings.tokens)
        return own, encoded

    def _outputs(self, own: Served, patience: Patience) -> Compute:
        """Return what computes a fine-tuned model's outputs together with those of others."""

        def compute(model: TaskModel, inputs: Inputs) -> list[Floats]:
            places: Any = inputs.places or itertools.repeat(None)
            payloads = zip(inputs.sequences, places, strict=False)
            units = [(inputs.size(number), own) for number, own in enumerate(payloads)]
            batch = finite(own.name, partial(outputs_of, model))
            return self.batcher.run((own.name, "outputs"), batch, units, patience)

        return compute

    def _asking(self, own: Served, patience: Patience) -> Asking:
        """Return what answers questions about masks together with those of others."""

        def asking(
            bundle: Bundle, lengths: Sequence[int], question: Callable[[int], Question]
        ) -> Iterator[Answers]:
            units = [(length, question(number)) for number, length in enumerate(lengths)]
            batch = finite(own.name, partial(masks_of, bundle))
            found = self.batcher.run((own.name, "fill"), batch, units, patience)
            for number, shares in enumerate(found):
                yield Answers([(number, which) for which in range(len(shares))], shares)

        return asking


def _task(own: Served) -> TaskBundle:
    assert isinstance(own.bundle, TaskBundle)
    return own.bundle


def _groups(texts: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Yield the texts in groups of about so many characters."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
