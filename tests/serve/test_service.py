"""The service computes each batch of the batcher as one batch of the model."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, PretrainedBundle, save_fine_tuned
from bertsmith.errors import InputError
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.packed import PackedBatch
from bertsmith.runtime import inference_batches
from bertsmith.serve.deadline import Deadline, RequestTooLargeError
from bertsmith.serve.models import ServedModel, compute_top_tokens, load_served_model
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.vectors import submit_embeddings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import Embedder
from bertsmith.use.explain import encode_text_or_pair
from bertsmith.use.fill import fill
from bertsmith.use.masked_lm import MaskedSequence
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vectors import VectorSpec
from tests.serve.model_pause import TIMEOUT, paused_model
from tests.serve.model_server import SENTENCES, model_config


def test_embeddings_are_computed_in_the_batches_of_the_batcher(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has at most 64 tokens, and the vectors equal those of the embedder."""
    texts = [SENTENCES[number % 5][: 1 + 7 * number] for number in range(20)]
    batch_lengths: list[list[int]] = []
    original_encode_batch = Embedder.encode_batch

    def recording_encode_batch(
        self: Embedder, sequences: Sequence[list[int]], spec: VectorSpec
    ) -> Any:
        batch_lengths.append([len(ids) for ids in sequences])
        return original_encode_batch(self, sequences, spec)

    expected = models[0].embedder.encode(texts)
    monkeypatch.setattr(Embedder, "encode_batch", recording_encode_batch)
    # The service must not use the embedder's own batching.
    monkeypatch.delattr(Embedder, "encode_batches")
    service = Service(models[:1], ServeSettings(max_batch_tokens=64))
    try:
        pending = submit_embeddings(service, None, texts, VectorSettings(), Deadline(TIMEOUT))
        vectors = pending.future.result(TIMEOUT)
    finally:
        service.close()
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert sum(map(len, batch_lengths)) == len(texts)
    assert max(map(sum, batch_lengths)) <= 64
    assert len(batch_lengths) < len(texts)


@pytest.mark.parametrize(
    ("model_name", "predict"),
    [
        ("plain", lambda service: service.fill(None, ["a [MASK]", "[MASK] the [MASK] smith"], 3)),
        ("plain", lambda service: service.pair(None, list(zip(SENTENCES, SENTENCES, strict=True)))),
        ("mood", lambda service: service.classify(None, SENTENCES)),
        ("names", lambda service: service.tag(None, SENTENCES)),
        ("answers", lambda service: service.answer(None, [("who?", " ".join(SENTENCES))])),
        ("endings", lambda service: service.choose(None, [("a", SENTENCES), ("b", SENTENCES[:2])])),
    ],
)
def test_each_batch_is_one_forward_pass(
    models: list[ServedModel],
    monkeypatch: pytest.MonkeyPatch,
    model_name: str,
    predict: Callable[[Service], Any],
) -> None:
    """The model computes a batch of the batcher at once and does not group its sequences again."""
    batch_sizes: list[int] = []
    forward_sizes: list[int] = []
    forward = BertModel.iter_hidden_states

    def counting_forward(self: BertModel, batch: PackedBatch, *args: Any, **kwargs: Any) -> Any:
        forward_sizes.append(len(batch.cu_seqlens) - 1)
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(BertModel, "iter_hidden_states", counting_forward)
    # With this limit, code that groups the sequences again would compute them one by one.
    monkeypatch.setattr(inference_batches, "max_batch_size", lambda *_: 1)
    served = [model for model in models if model.name == model_name]
    service = Service(served, on_batch=lambda batch: batch_sizes.append(batch.num_sequences))
    try:
        predict(service)
    finally:
        service.close()
    assert forward_sizes == batch_sizes
    assert max(batch_sizes) > 1


@pytest.mark.parametrize(
    ("model_name", "max_tokens", "predict"),
    [
        ("mood", 4000, lambda service, texts: service.classify(None, texts)),
        ("grade", 6000, lambda service, texts: service.rerank(None, "a", texts)),
        (
            "answers",
            6000,
            lambda service, texts: service.answer(None, [("a", text) for text in texts]),
        ),
    ],
)
def test_limit_of_tokens_applies_to_all_texts_of_a_request(
    models: list[ServedModel],
    model_name: str,
    max_tokens: int,
    predict: Callable[[Service, list[str]], Any],
) -> None:
    """1,500 texts exceed the limit together, although 1,024 of them do not."""
    served = [model for model in models if model.name == model_name]
    service = Service(served, ServeSettings(max_texts=2000, max_tokens=max_tokens))
    try:
        with pytest.raises(RequestTooLargeError, match=f"the limit is {max_tokens:,} tokens"):
            predict(service, ["a"] * 1500)
    finally:
        service.close()


def test_segmenter_is_loaded_with_the_model(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request does not wait for the segmenter, which blocks the event loop."""
    encoded: list[list[str]] = []
    encode_batch = Tokenizer.encode_batch

    def record(self: Tokenizer, texts: Sequence[str], *args: Any, **options: Any) -> Any:
        encoded.append(list(texts))
        return encode_batch(self, texts, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", record)
    bundle.save(tmp_path / "m", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    load_served_model("m", tmp_path / "m")
    assert len(encoded) == 1


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"objective": "left-to-right"}, {"fill", "embed_sparse"}),
        ({"pair_objective": "sop"}, {"pair"}),
    ],
)
def test_models_with_other_objectives_do_not_have_the_tasks_of_their_heads(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, str], missing: set[str]
) -> None:
    """Their heads have the same form, but predict the next word, or whether texts are swapped."""
    info = {"provenance": {"settings": {"data": settings}}}
    model = BertForPreTraining(model_config(tokenizer))
    for name, model_info in (("usual", {}), ("other", info)):
        bundle.save(tmp_path / name, model, tokenizer, model_info)
    usual, other = (load_served_model(name, tmp_path / name) for name in ("usual", "other"))
    assert usual.tasks - other.tasks == missing


def test_requests_before_and_after_a_reload_share_no_batch(
    models: list[ServedModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Two requests in the queue are answered by the models that were loaded when they arrived."""
    torch.manual_seed(5)
    bundle.save(tmp_path / "m", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    replacement = load_served_model("plain", tmp_path / "m")
    service = Service(models[:1])
    deadline = Deadline(TIMEOUT)

    def submit(text: str) -> Future[Any]:
        return submit_embeddings(service, None, [text], VectorSettings(), deadline).future

    try:
        with paused_model() as pause:
            submit("the smith")
            assert pause.started.wait(TIMEOUT)
            futures = [submit("a hammer")]
            service.replace_models([replacement])
            futures.append(submit("a hammer"))
            pause.resume.set()
            vectors = [future.result(TIMEOUT)[0] for future in futures]
    finally:
        service.close()
    for model, vector in zip((models[0], replacement), vectors, strict=True):
        np.testing.assert_allclose(vector, model.embedder.encode(["a hammer"])[0], atol=1e-5)


def test_batch_returns_only_the_top_tokens_of_masks(models: list[ServedModel]) -> None:
    """Requests with different numbers of predictions share a batch."""
    pretrained = models[0].bundle
    assert isinstance(pretrained, PretrainedBundle)
    tokenizer = pretrained.tokenizer
    text = "a [MASK] the [MASK] smith"
    ids = [tokenizer.cls_id, *tokenizer.encode(text, allow_special=True), tokenizer.sep_id]
    masks = [index for index, token_id in enumerate(ids) if token_id == tokenizer.mask_id]
    sequence = MaskedSequence(ids, [0] * len(ids), masks)
    results = compute_top_tokens(pretrained, [(sequence, 2), (sequence, 5)])
    assert [tuple(result.log_probabilities.shape) for result in results] == [(2, 2), (2, 5)]
    for result, top in zip(results, (2, 5), strict=True):
        for token_ids, filling in zip(
            result.token_ids.tolist(), fill(pretrained, text, top), strict=True
        ):
            expected = [token for token, _ in filling.predictions]
            assert tokenizer.ids_to_tokens(token_ids) == expected


def test_models_with_unsupported_outputs_only_compute_vectors(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A warning says why the server does not offer the task of the model."""
    tags, scores = ("O", "B-PER", "PAD"), ("a", "b", "c")
    for head, message in (
        (HeadConfig("entities", tags), "the label 'PAD' is not an entity tag"),
        (HeadConfig("regression", scores), "this regression model has 3 outputs"),
    ):
        model = head.build_model(model_config(tokenizer))
        save_fine_tuned(tmp_path / head.kind, model, tokenizer, head, {})
        with pytest.warns(UserWarning, match=f"m: predictions are not available: .*{message}"):
            served_model = load_served_model("m", tmp_path / head.kind)
        assert served_model.tasks == {"embed", "inspect"}


def test_maximum_length_is_read_when_the_model_is_loaded(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Requests do not read the files of the model, which may be replaced by another version."""
    head = HeadConfig("single", ("bad", "good"))
    model = head.build_model(model_config(tokenizer))
    save_fine_tuned(tmp_path / "m", model, tokenizer, head, {}, max_seqlen=12)
    served_model = load_served_model("m", tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    service = Service([served_model], ServeSettings())
    try:
        short, long = service.classify("m", [SENTENCES[0][:12], SENTENCES[0]])
    finally:
        service.close()
    assert (short.is_truncated, long.is_truncated) == (False, True)


def test_pairs_for_a_model_with_a_single_segment_do_not_reach_a_batch(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has no path; in a batch, it would also affect the requests of other clients."""
    head = HeadConfig("single", ("bad", "good"))
    config = model_config(tokenizer).model_copy(update={"segments": 1})
    save_fine_tuned(tmp_path / "m", head.build_model(config), tokenizer, head, {})
    service = Service([load_served_model("m", tmp_path / "m")], ServeSettings())
    try:
        assert len(service.classify("m", [SENTENCES[0]])) == 1
        monkeypatch.setattr(service.batcher, "submit", None)
        message = r"^this model takes single texts, got a pair; send single texts$"
        with pytest.raises(InputError, match=message):
            service.classify("m", [(SENTENCES[0], SENTENCES[1])])
        model = service.find_model("m", "inspect")
        encoded = encode_text_or_pair(model.bundle, SENTENCES[0], SENTENCES[1], None)
        calls = service.create_calls(model, None)
        with pytest.raises(InputError, match=message):
            calls.compute_attention(encoded)
    finally:
        service.close()
