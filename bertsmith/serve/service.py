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

from bertsmith.bundle import FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError, SettingsError
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.thread_pool import pool_size
from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline, RequestTooLargeError, wait_for_result
from bertsmith.serve.limits import check_limit, check_surrogates, check_top
from bertsmith.serve.models import (
    ServedModel,
    compute_attentions,
    compute_outputs,
    embed_sequences,
    predict_masks,
    require_finite,
)
from bertsmith.serve.settings import ServeSettings
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.outputs import ComputeOutputs
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.answer import Answer, iter_answers
from bertsmith.use.choose import Choice, iter_choices
from bertsmith.use.embed import Batches, Floats, TokenVectors
from bertsmith.use.explain import AttentionMaps
from bertsmith.use.fill import MASK_TOKEN, Filling, iter_fillings
from bertsmith.use.masked_lm import MaskedPredictions, MaskedSequence, MaskedTokenPredictor
from bertsmith.use.pair import (
    EncodedPair,
    NextSentencePrediction,
    iter_pair_predictions,
    next_sentence_probabilities,
)
from bertsmith.use.predict import Prediction, iter_predictions
from bertsmith.use.tag import TaggedText, iter_tagged_texts
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vectors import VectorSpec

#: Characters that /tokenize reads between two looks at its deadline.
_GROUP_CHARACTERS: Final = 65_536


@dataclass(frozen=True)
class PendingEmbeddings:
    """What was asked of a model: a future of float32 [W] for each text, and the tokens of all."""

    model: str
    future: Future[list[Any]]
    width: int
    num_tokens: int


class Service:
    """The loaded models, by name, in the order in which they were given."""

    def __init__(
        self,
        models: Iterable[ServedModel],
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
            own.name: own.with_token_counter(token_counter(own.name)) if token_counter else own
            for own in models
        }
        self.settings = settings or ServeSettings()
        self.batcher = Batcher(
            batch_tokens=self.settings.batch_tokens,
            queue_tokens=self.settings.queue_tokens,
            call_tokens=self.settings.tokens,
            wait=self.settings.wait_ms / 1000,
            at_once=min(
                (pool_size(own.embedder.device) for own in self.models.values()), default=1
            ),
            on_batch=told,
        )

    def models_with(self, ability: str) -> list[str]:
        """Return the names of the models that can do something."""
        return [name for name, own in self.models.items() if ability in own.abilities]

    def find_model(self, name: str | None, ability: str) -> ServedModel:
        """Return the model of a name, or the first that is able; ModelError where there is none."""
        able = self.models_with(ability)
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
        self, name: str | None, texts: Sequence[str], top: int, patience: Deadline | None = None
    ) -> list[list[Filling]]:
        """Return the likeliest words at each [MASK] of each text."""
        own = self.check_request(name, "fill", texts, patience)
        assert isinstance(own.bundle, PretrainedBundle)
        check_top(top)
        check_limit("masks", sum(text.count(MASK_TOKEN) for text in texts), self.settings.masks)
        return list(iter_fillings(own.bundle, texts, top, self._asking(own, self._until(patience))))

    def pair(
        self,
        name: str | None,
        pairs: Sequence[tuple[str, str]],
        patience: Deadline | None = None,
    ) -> list[NextSentencePrediction]:
        """Return how probable it is that B follows A, for each pair."""
        own, until = self.check_request(name, "pair", pairs, patience), self._until(patience)
        assert isinstance(own.bundle, PretrainedBundle)

        def compute(bundle: PretrainedBundle, sequences: Sequence[EncodedPair]) -> list[float]:
            units = [(len(ids), (ids, segments)) for ids, segments in sequences]
            batch = require_finite(own.name, partial(next_sentence_probabilities, bundle))
            return self.batcher.run((own.name, "pair"), batch, units, until)

        return list(iter_pair_predictions(own.bundle, pairs, compute))

    def classify(
        self,
        name: str | None,
        texts: Sequence[str | tuple[str, str]],
        patience: Deadline | None = None,
    ) -> list[Prediction]:
        """Return the labels, or the number, of each text or pair."""
        own = self.check_request(name, "classify", texts, patience)
        return list(iter_predictions(_task(own), texts, self._outputs(own, self._until(patience))))

    def tag(
        self, name: str | None, texts: Sequence[str], patience: Deadline | None = None
    ) -> list[TaggedText]:
        """Return the entities, or the tags, of each text."""
        own = self.check_request(name, "tag", texts, patience)
        return list(iter_tagged_texts(_task(own), texts, self._outputs(own, self._until(patience))))

    def answer(
        self,
        name: str | None,
        questions: Sequence[tuple[str, str]],
        patience: Deadline | None = None,
    ) -> list[Answer]:
        """Return the answer to each (question, context)."""
        own = self.check_request(name, "answer", questions, patience)
        return list(iter_answers(_task(own), questions, self._outputs(own, self._until(patience))))

    def choose(
        self,
        name: str | None,
        questions: Sequence[tuple[str, Sequence[str]]],
        patience: Deadline | None = None,
    ) -> list[Choice]:
        """Return which ending fits, for each (prompt, endings)."""
        own = self.check_request(name, "choose", questions, patience)
        return list(iter_choices(_task(own), questions, self._outputs(own, self._until(patience))))

    def embed(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Deadline | None = None,
    ) -> Floats:
        """Return a vector for each text, float32 [n, W]."""
        until = self._until(patience)
        asked = self.embedding(name, texts, settings, until)
        found = wait_for_result(asked.future, until)
        return np.stack(found) if found else np.empty((0, asked.width), np.float32)

    def embedding(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Deadline,
        *,
        truncate: bool = True,
    ) -> "PendingEmbeddings":
        """Return what ``embed`` waits for. Without ``truncate`` a text too long is an error."""
        own = self.check_request(name, "embed", texts, patience)
        recipe = own.embedder.resolve_settings(settings)
        if recipe.pooling == "none":
            raise SettingsError('pooling "none" gives a vector a token: ask /embed_all')
        encoded = own.embedder.tokenize(texts)
        if encoded.num_cut_off and not truncate:
            raise RequestTooLargeError(
                f"{encoded.num_cut_off:,} of the texts are longer than the {own.embedder.max_seqlen} "
                "tokens that this model takes; shorten them, or send truncate: true"
            )
        check_limit("numbers", len(texts) * recipe.width, self.settings.numbers)
        units = [(len(ids), ids) for ids in encoded.sequences]
        compute = require_finite(own.name, partial(embed_sequences, own.embedder, recipe))
        key = (own.name, "embed", settings)
        future = self.batcher.submit(key, compute, units, patience)
        return PendingEmbeddings(own.name, future, recipe.width, sum(size for size, _ in units))

    def tokens(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Deadline | None = None,
        *,
        most: int | None = None,
    ) -> list[TokenVectors]:
        """Return the vectors of each text's tokens; the pooling of ``settings`` is not read.

        most: how many numbers they may have, where that is another than an answer's bound.
        """
        own, until = self.check_request(name, "embed", texts, patience), self._until(patience)
        settings = settings.model_copy(update={"pooling": "none"})
        key = (own.name, "embed", settings)

        def compute(sequences: Sequence[list[int]], recipe: VectorSpec, _: int | None) -> Batches:
            units = [(len(ids), ids) for ids in sequences]
            numbers = sum(size for size, _ in units) * recipe.width
            check_limit("numbers", numbers, most or self.settings.numbers)
            batch = require_finite(own.name, partial(embed_sequences, own.embedder, recipe))
            yield list(range(len(units))), self.batcher.run(key, batch, units, until)

        return own.embedder.encode_tokens_with_spec(
            texts, own.embedder.resolve_settings(settings), None, compute
        )

    def attention(
        self,
        name: str | None,
        text: str,
        pair: str | None = None,
        *,
        max_seqlen: int | None = None,
        patience: Deadline | None = None,
    ) -> AttentionMaps:
        """Return what each head of each layer looks at, in so many tokens at most."""
        own = self.check_request(name, "embed", [text])
        units = [(max_seqlen or own.embedder.max_seqlen, (text, pair, max_seqlen))]
        compute = require_finite(own.name, partial(compute_attentions, own))
        [found] = self.batcher.run((own.name, "attention"), compute, units, self._until(patience))
        result: AttentionMaps = found
        return result

    def close(self) -> None:
        """Finish what is under way and end."""
        self.batcher.close(self.settings.stop_seconds)

    def _until(self, patience: Deadline | None) -> Deadline:
        return patience or Deadline(self.settings.seconds)

    def check_request(
        self,
        name: str | None,
        ability: str,
        texts: Sequence[Any],
        patience: Deadline | None = None,
    ) -> ServedModel:
        """Return the model that is asked; LargeError for too many texts, QuestionError for none.

        A text that is none has half a character, which JSON can write and no model reads. The
        model counts the tokens that it encodes in ``patience.counts``.
        """
        check_limit("texts", len(texts), self.settings.texts)
        check_surrogates(texts)
        own = self.find_model(name, ability)
        return own if patience is None else own.with_token_counter(patience.token_counts)

    def tokenize(
        self, name: str | None, texts: Sequence[str], patience: Deadline | None = None
    ) -> tuple[ServedModel, list[tuple[list[int], list[tuple[int, int]]]]]:
        """Return ids and characters of the tokens of each text, and whose they are.

        Raises:
            LargeError: the texts have too many tokens.
            LateError: the time is over; it is looked at between groups of texts.
            GoneError: the client went away.
        """
        own, until = self.check_request(name, "embed", texts, patience), self._until(patience)
        encoded: list[tuple[list[int], list[tuple[int, int]]]] = []
        tokens = 0
        for group in _groups(texts, _GROUP_CHARACTERS):
            until.check()
            encoded += own.bundle.tokenizer.encode_batch_with_offsets(group)
            tokens += sum(len(ids) for ids, _ in encoded[-len(group) :])
            check_limit("tokens", tokens, self.settings.tokens)
        return own, encoded

    def _outputs(self, own: ServedModel, patience: Deadline) -> ComputeOutputs:
        """Return what computes a fine-tuned model's outputs together with those of others."""

        def compute(model: TaskModel, inputs: ModelInputs) -> list[Floats]:
            places: Any = inputs.token_indices or itertools.repeat(None)
            payloads = zip(inputs.sequences, places, strict=False)
            units = [(inputs.num_tokens(number), own) for number, own in enumerate(payloads)]
            batch = require_finite(own.name, partial(compute_outputs, model))
            return self.batcher.run((own.name, "outputs"), batch, units, patience)

        return compute

    def _asking(self, own: ServedModel, patience: Deadline) -> MaskedTokenPredictor:
        """Return what answers questions about masks together with those of others."""

        def asking(
            bundle: PretrainedBundle,
            lengths: Sequence[int],
            question: Callable[[int], MaskedSequence],
        ) -> Iterator[MaskedPredictions]:
            units = [(length, question(number)) for number, length in enumerate(lengths)]
            batch = require_finite(own.name, partial(predict_masks, bundle))
            found = self.batcher.run((own.name, "fill"), batch, units, patience)
            for number, shares in enumerate(found):
                yield MaskedPredictions([(number, which) for which in range(len(shares))], shares)

        return asking


def _task(own: ServedModel) -> FineTunedBundle:
    assert isinstance(own.bundle, FineTunedBundle)
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
