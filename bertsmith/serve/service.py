"""Compute the results of requests with the loaded models.

Most methods block until the results are computed. They can be called from any thread, and
concurrent calls share batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from bertsmith.bundle import FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.runtime.thread_pool import choose_num_workers
from bertsmith.serve.batching import BatchCallback, Batcher
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.limits import (
    MAX_PREDICTIONS,
    check_limit,
    check_no_surrogates,
    iter_strings,
)
from bertsmith.serve.model_calls import ModelCalls
from bertsmith.serve.models import (
    ServedModel,
    describe_task,
)
from bertsmith.serve.settings import ServeSettings
from bertsmith.tasks.outputs import ComputeOutputs
from bertsmith.text.mask import MASK_TOKEN
from bertsmith.text.unknown import TokenCounter
from bertsmith.use.answer import Answer, iter_answers
from bertsmith.use.choose import Choice, iter_choices
from bertsmith.use.fill import Filling, iter_fillings
from bertsmith.use.pair import (
    NextSentencePrediction,
    iter_pair_predictions,
)
from bertsmith.use.predict import Prediction, iter_predictions
from bertsmith.use.rerank import check_ranking_texts
from bertsmith.use.tag import TaggedText, iter_tagged_texts

#: Number of characters that ``Service.tokenize`` encodes between two checks of the deadline.
_CHARACTERS_PER_DEADLINE_CHECK: Final = 65_536
#: Token ids, and character offsets (start, end) of each token.
EncodedText = tuple[list[int], list[tuple[int, int]]]


class Service:
    """Computes the results of requests.

    Attributes:
        models: the loaded models by name, in the order of the command line.
        settings: the limits of the server.
        batcher: batches the sequences of concurrent requests.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        settings: ServeSettings | None = None,
        on_batch: BatchCallback | None = None,
        get_token_counter: Callable[[str], TokenCounter] | None = None,
    ) -> None:
        """Start the batcher's threads.

        Args:
            models: the loaded models.
            settings: the limits of the server.
            on_batch: called after each batch.
            get_token_counter: takes a model's name and returns the counter of its tokens. The
                counter is called from several threads.
        """
        self._get_token_counter = get_token_counter
        self._version = 0
        self.models: dict[str, ServedModel] = {}
        self.replace_models(models)
        self.settings = settings or ServeSettings()
        self.batcher = Batcher(
            max_batch_tokens=self.settings.max_batch_tokens,
            max_queue_tokens=self.settings.max_queue_tokens,
            max_call_tokens=self.settings.max_tokens,
            max_wait_seconds=self.settings.max_wait_ms / 1000,
            num_threads=min(
                (choose_num_workers(model.embedder.device) for model in self.models.values()),
                default=1,
            ),
            on_batch=on_batch,
        )

    def replace_models(self, models: Iterable[ServedModel]) -> None:
        """Answer later requests with other models. Running requests use the previous models."""
        self._version += 1
        models = [replace(model, version=self._version) for model in models]
        if self._get_token_counter is not None:
            models = [
                model.with_token_counter(self._get_token_counter(model.name)) for model in models
            ]
        # One assignment, because other threads read the models.
        self.models = {model.name: model for model in models}

    def find_model(self, model: str | ServedModel | None, task: str) -> ServedModel:
        """Return the named model, or the first one that supports the task.

        A model is returned unchanged: a request that needs its model twice uses the same one
        although the models are replaced meanwhile.

        Raises:
            ModelError: there is no such model, or it does not support the task.
        """
        if isinstance(model, ServedModel):
            return model
        if model is not None and model not in self.models:
            raise ModelError(f"unknown model {model!r}; expected one of {', '.join(self.models)}")
        names = [name for name, other in self.models.items() if task in other.tasks]
        if not names:
            raise ModelError(f"no loaded model can {describe_task(task)}; load such a model")
        if model is not None and model not in names:
            raise ModelError(
                f"the model {model!r} cannot {describe_task(task)}; expected one of "
                f"{', '.join(names)}"
            )
        return self.models[model or names[0]]

    def fill(
        self,
        model: str | ServedModel | None,
        texts: Sequence[str],
        top: int,
        deadline: Deadline | None = None,
    ) -> list[list[Filling]]:
        """Return the ``top`` most probable tokens for each [MASK] of each text."""
        served_model = self.check_request(model, "fill", texts, deadline)
        bundle = served_model.bundle
        assert isinstance(bundle, PretrainedBundle)
        num_masks = sum(text.count(MASK_TOKEN) for text in texts)
        check_limit("masks", num_masks, self.settings.max_masks)
        num_predictions = num_masks * min(top, bundle.tokenizer.vocab_size)
        check_limit("predictions (masks times top)", num_predictions, MAX_PREDICTIONS)
        predictor = self.create_calls(served_model, deadline).predict_top_tokens
        return list(iter_fillings(bundle, texts, top, predictor, self.settings.max_texts))

    def pair(
        self,
        model: str | ServedModel | None,
        pairs: Sequence[tuple[str, str]],
        deadline: Deadline | None = None,
    ) -> list[NextSentencePrediction]:
        """Return the probability that text B follows text A, for each pair."""
        served_model = self.check_request(model, "pair", pairs, deadline)
        bundle = served_model.bundle
        assert isinstance(bundle, PretrainedBundle)
        compute = self.create_calls(served_model, deadline).compute_pair_probabilities
        return list(iter_pair_predictions(bundle, pairs, compute, self.settings.max_texts))

    def classify(
        self,
        model: str | ServedModel | None,
        texts: Sequence[str | tuple[str, str]],
        deadline: Deadline | None = None,
    ) -> list[Prediction]:
        """Return the labels, or the regression score, of each text or pair."""
        bundle, compute_outputs = self.prepare_task(model, "classify", texts, deadline)
        return list(iter_predictions(bundle, texts, compute_outputs, self.settings.max_texts))

    def rerank(
        self,
        model: str | ServedModel | None,
        query: str,
        texts: Sequence[str],
        deadline: Deadline | None = None,
    ) -> list[Prediction]:
        """Return the score of each pair (query, text) by a model with one output."""
        check_ranking_texts(query, texts)
        pairs = [(query, text) for text in texts]
        bundle, compute_outputs = self.prepare_task(model, "rerank", pairs, deadline)
        return list(iter_predictions(bundle, pairs, compute_outputs, self.settings.max_texts))

    def tag(
        self,
        model: str | ServedModel | None,
        texts: Sequence[str],
        deadline: Deadline | None = None,
    ) -> list[TaggedText]:
        """Return the entities, or the tags of the words, of each text."""
        bundle, compute_outputs = self.prepare_task(model, "tag", texts, deadline)
        return list(iter_tagged_texts(bundle, texts, compute_outputs, self.settings.max_texts))

    def answer(
        self,
        model: str | ServedModel | None,
        questions: Sequence[tuple[str, str]],
        deadline: Deadline | None = None,
    ) -> list[Answer]:
        """Return the answer to each (question, context)."""
        bundle, compute_outputs = self.prepare_task(model, "answer", questions, deadline)
        return list(iter_answers(bundle, questions, compute_outputs, self.settings.max_texts))

    def choose(
        self,
        model: str | ServedModel | None,
        prompts: Sequence[tuple[str, Sequence[str]]],
        deadline: Deadline | None = None,
    ) -> list[Choice]:
        """Return the best ending for each (prompt, endings)."""
        check_limit("texts", sum(len(texts) for _, texts in prompts), self.settings.max_texts)
        bundle, compute_outputs = self.prepare_task(model, "choose", prompts, deadline)
        return list(iter_choices(bundle, prompts, compute_outputs, self.settings.max_texts))

    def close(self) -> None:
        """Finish queued requests within ``shutdown_timeout_seconds``, and stop the threads."""
        self.batcher.close(self.settings.shutdown_timeout_seconds)

    def check_request(
        self,
        model: str | ServedModel | None,
        task: str,
        texts: Sequence[Any],
        deadline: Deadline | None = None,
    ) -> ServedModel:
        """Check a request's texts and return its model.

        With a deadline, the tokenizer of the returned model also counts the tokens that it encodes
        in ``deadline.token_counts``.

        Raises:
            RequestTooLargeError: there are too many texts or characters.
            InputError: a text has a lone surrogate.
            ModelError: there is no such model, or it does not support the task.
        """
        check_limit("texts", len(texts), self.settings.max_texts)
        num_characters = sum(map(len, iter_strings(texts)))
        check_limit("characters", num_characters, self.settings.max_characters)
        check_no_surrogates(texts)
        served_model = self.find_model(model, task)
        if deadline is None:
            return served_model
        return served_model.with_token_counter(deadline.token_counts)

    def tokenize(
        self,
        model: str | ServedModel | None,
        texts: Sequence[str],
        deadline: Deadline | None = None,
        *,
        prompt_name: str | None = None,
    ) -> tuple[ServedModel, list[EncodedText]]:
        """Return the model, and the token ids and character offsets of each text.

        The deadline is checked between groups of texts.

        Args:
            model: the model or its name; None for the first one.
            texts: the texts.
            deadline: the request's deadline.
            prompt_name: name of the prompt to add to each text; None for no prompt. The offsets
                are those in the prompt followed by the text.

        Raises:
            InputError: the model declares no such prompt.
            RequestTooLargeError: the texts have too many tokens.
            DeadlineExceededError: the deadline passed.
            DisconnectedError: the client disconnected.
        """
        served_model = self.check_request(model, "embed", texts, deadline)
        if prompt_name is not None:
            prompt = served_model.embedder.with_prompt(prompt_name).text_config.prompt
            texts = [prompt + text for text in texts]
        deadline = self._resolve_deadline(deadline)
        encoded: list[EncodedText] = []
        num_tokens = 0
        for group in _group_texts(texts, _CHARACTERS_PER_DEADLINE_CHECK):
            deadline.check()
            encoded += served_model.bundle.tokenizer.encode_batch_with_offsets(group)
            num_tokens += sum(len(ids) for ids, _ in encoded[-len(group) :])
            check_limit("tokens", num_tokens, self.settings.max_tokens)
        return served_model, encoded

    def _resolve_deadline(self, deadline: Deadline | None) -> Deadline:
        """Return the deadline, or a new one with the default time limit for None."""
        return deadline or Deadline(self.settings.request_timeout_seconds)

    def prepare_task(
        self,
        model: str | ServedModel | None,
        task: str,
        texts: Sequence[Any],
        deadline: Deadline | None,
    ) -> tuple[FineTunedBundle, ComputeOutputs]:
        """Check a request of a task.

        Returns:
            The fine-tuned model, and a function that computes the model's outputs with the batcher.
        """
        served_model = self.check_request(model, task, texts, deadline)
        assert isinstance(served_model.bundle, FineTunedBundle)
        return served_model.bundle, self.create_calls(served_model, deadline).compute_outputs

    def create_calls(self, model: ServedModel, deadline: Deadline | None) -> ModelCalls:
        """Return an object that computes the sequences of one request with a model."""
        return ModelCalls(model, self.batcher, self._resolve_deadline(deadline))


def _group_texts(texts: Sequence[str], min_characters: int) -> Iterator[list[str]]:
    """Yield consecutive groups of texts; all but the last have at least ``min_characters``."""
    group: list[str] = []
    num_characters = 0
    for text in texts:
        group.append(text)
        num_characters += len(text)
        if num_characters >= min_characters:
            yield group
            group = []
            num_characters = 0
    if group:
        yield group
