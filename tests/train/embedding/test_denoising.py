"""TSDAE: noise, loss, parity with sentence-transformers, training and resuming."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import DenoisingAutoEncoderLoss
from torch import Tensor

from bertsmith import bundle
from bertsmith.bundle import to_hf_state_dict
from bertsmith.errors import BertsmithError
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.model.denoising_decoder import VectorAttention
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.tasks.embedding_data import read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding import denoising
from bertsmith.train.embedding.denoising import (
    DenoisingMicroBatch,
    DenoisingObjective,
    delete_words,
)
from bertsmith.train.embedding.evaluation import HeldoutTexts
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.embedding.start_model import EmbeddingBundle, load_start_model
from bertsmith.train.embedding.training_data import build_tokenize_function
from bertsmith.train.engine import loop
from bertsmith.train.engine.step import take_step
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.use.embed import embed
from tests.train.embedding.conftest import WriteTable, make_rows

MACHINE = Machine(torch.device("cpu"), "fp32", "padded")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
#: Maximum tokens of a micro-batch: for the whole batch, and for a few texts.
LARGE, SMALL = 16384, 48
NUM_TEXTS = 17
VALUES: dict[str, Any] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1, "precision": "fp32"},
    "embedding": {"batch_size": 16, "loss": "tsdae"},
    "schedule": {"epochs": 3.0},
}


def build_objective(
    bundle: EmbeddingBundle, table: Path, settings: EmbeddingSettings, micro_batch_tokens: int
) -> DenoisingObjective:
    """Return the objective of a table whose texts are all in one batch."""
    tokenize = build_tokenize_function(bundle.encoder.tokenizer, bundle.pooling)
    examples, _ = read_examples([table], settings, tokenize, settings.columns)
    bundle.model.train()
    return DenoisingObjective(
        bundle.model, settings, examples, {}, MACHINE, bundle.encoder.tokenizer,
        micro_batch_tokens=micro_batch_tokens, seed=0,
    )  # fmt: skip


def compute_gradients(
    objective: DenoisingObjective, *, with_dropout: bool
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the first batch and the gradients by name."""
    objective.model.zero_grad()
    micro_batches = objective.make_micro_batches(0)
    total = 0.0
    for micro_batch in micro_batches:
        seed = DropoutSeed(torch.tensor(7)) if with_dropout else None
        loss = objective.compute_losses(micro_batch, micro_batches, seed)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    parameters = objective.model.named_parameters()
    return total, {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def test_words_are_deleted(start_model: Path) -> None:
    """60 % of the words are deleted, with all of their tokens; at least one word remains."""
    rng = np.random.default_rng(0)
    is_continuation = np.zeros(1000, np.bool_)
    is_continuation[500:] = True
    # Word n has the tokens n and 500 + n.
    words = list(range(10, 210))
    ids = [1, *(token for word in words for token in (word, 500 + word)), 2]
    noisy = delete_words(ids, is_continuation, 0.6, rng)
    assert (noisy[0], noisy[-1]) == (1, 2)
    remaining = noisy[1:-1:2]
    assert [token - 500 for token in noisy[2:-1:2]] == remaining
    assert remaining == sorted(set(remaining) & set(words))
    assert 80 - 28 < len(remaining) < 80 + 28, "within four standard deviations"
    for _ in range(50):
        assert delete_words([1, 10, 510, 2], is_continuation, 0.99, rng) == [1, 10, 510, 2]
        assert len(delete_words([1, 510, 10, 2], is_continuation, 0.99, rng)) == 3
    assert delete_words([1, 2], is_continuation, 0.6, rng) == [1, 2]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_loss_and_gradients_equal_those_of_sentence_transformers(
    start_model: Path, write_table: WriteTable, tmp_path: Path, pooling: Any
) -> None:
    """With the same noise and weights, the loss and all gradients agree within 1e-6.

    The decoder reads the vectors before normalization. The gradients of queries and keys of the
    attention to the vector are 0.
    """
    table = write_table("train.jsonl", make_rows("texts", NUM_TEXTS))
    settings = EmbeddingSettings(
        train_files=[str(table)], loss="tsdae", pooling=pooling, normalize=True, batch_size=64
    )
    model = load_start_model(start_model, settings, NO_DROPOUT)
    objective = build_objective(model, table, settings, LARGE)
    loss, gradients = compute_gradients(objective, with_dropout=False)
    write_sentence_transformers(start_model, tmp_path / "st", pooling=pooling, normalize=False)
    reference = SentenceTransformer(str(tmp_path / "st"), device="cpu")
    reference_loss = DenoisingAutoEncoderLoss(reference, tie_encoder_decoder=True)
    decoder = model.model.decoder
    assert decoder is not None
    heads = to_hf_state_dict({f"mlm.{k}": v for k, v in decoder.mlm.state_dict().items()})
    hf_decoder = reference_loss.decoder
    missing = hf_decoder.load_state_dict(heads, strict=False)
    assert not missing.unexpected_keys
    for layer, attention in zip(
        hf_decoder.bert.encoder.layer, decoder.vector_attentions, strict=True
    ):
        assert isinstance(attention, VectorAttention)
        cross = layer.crossattention
        for target, source in (
            (cross.self.value, attention.value),
            (cross.output.dense, attention.output),
            (cross.output.LayerNorm, attention.norm),
        ):
            target.load_state_dict(source.state_dict())
    for module in reference_loss.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    [micro_batch] = objective.make_micro_batches(0)
    noisy, inputs = (
        torch.tensor_split(batch.ids, batch.cu_seqlens[1:-1].long())
        for batch in (micro_batch.noisy, micro_batch.inputs)
    )
    sep = noisy[0][-1:]
    features = [pad(list(noisy)), pad([torch.cat([ids, sep]) for ids in inputs])]
    expected = reference_loss(features, torch.empty(0))
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    named = {
        "bert.embeddings.word_embeddings.weight": "bert.embeddings.words.weight",
        "cls.predictions.transform.dense.weight": "decoder.mlm.transform.weight",
        "cls.predictions.bias": "decoder.mlm.decoder.bias",
        "bert.encoder.layer.0.intermediate.dense.weight": "bert.encoder.layers.0.up.weight",
        "bert.encoder.layer.1.attention.output.dense.weight":
            "bert.encoder.layers.1.attention.output.weight",
        "bert.encoder.layer.1.crossattention.self.value.weight":
            "decoder.vector_attentions.1.value.weight",
        "bert.encoder.layer.0.crossattention.output.LayerNorm.weight":
            "decoder.vector_attentions.0.norm.weight",
    }  # fmt: skip
    expected_gradients = dict(hf_decoder.named_parameters())
    for hf_name, name in named.items():
        gradient = expected_gradients[hf_name].grad
        assert gradient is not None, hf_name
        assert gradient.abs().max() > 1e-5, hf_name
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)
    query = expected_gradients["bert.encoder.layer.0.crossattention.self.query.weight"].grad
    assert query is None or query.abs().max() < 1e-7


def pad(sequences: list[Tensor]) -> dict[str, Tensor]:
    """Return the input of a padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    ones = [torch.ones_like(sequence) for sequence in sequences]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def test_micro_batches_do_not_change_the_gradient(
    start_model: Path, write_table: WriteTable
) -> None:
    """Several micro-batches give the loss and the gradients of one."""
    table = write_table("train.jsonl", make_rows("texts", NUM_TEXTS))
    settings = EmbeddingSettings(train_files=[str(table)], loss="tsdae", batch_size=64)
    results = []
    for micro_batch_tokens in (LARGE, SMALL):
        model = load_start_model(start_model, settings, NO_DROPOUT)
        objective = build_objective(model, table, settings, micro_batch_tokens)
        assert (len(objective.make_micro_batches(0)) > 1) == (micro_batch_tokens == SMALL)
        results.append(compute_gradients(objective, with_dropout=True))
    (loss, gradients), (other_loss, other_gradients) = results
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=1e-6)


def test_held_out_texts_are_evaluated_in_parts(
    start_model: Path, write_table: WriteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of many held-out texts does not depend on how many are on the device at a time."""
    table = write_table("train.jsonl", make_rows("texts", NUM_TEXTS))
    settings = EmbeddingSettings(train_files=[str(table)], loss="tsdae", batch_size=64)
    model = load_start_model(start_model, settings, NO_DROPOUT)
    objective = build_objective(model, table, settings, LARGE)
    heldout = HeldoutTexts(objective._examples, settings)
    expected = objective._evaluate_set(heldout)
    sizes: list[int] = []
    build = objective._build_micro_batches

    def record(texts: Any, numbers: Any, rng: Any) -> list[DenoisingMicroBatch]:
        sizes.append(len(numbers))
        return build(texts, numbers, rng)

    monkeypatch.setattr(objective, "_build_micro_batches", record)
    monkeypatch.setattr(denoising, "_EVAL_CHUNK_SIZE", 7)
    assert objective._evaluate_set(heldout) == pytest.approx(expected)
    assert max(sizes) == 7
    assert sum(sizes) == expected["examples"]


def test_encoder_and_decoder_have_different_dropout_masks(
    start_model: Path, write_table: WriteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward passes of encoder and decoder get different seeds; dropout changes the loss."""
    table = write_table("train.jsonl", make_rows("texts", NUM_TEXTS))
    settings = EmbeddingSettings(train_files=[str(table)], loss="tsdae", batch_size=64)
    model = load_start_model(start_model, settings, {})
    objective = build_objective(model, table, settings, LARGE)
    seeds: list[int] = []
    embeddings = model.model.bert.embeddings
    forward = embeddings.forward

    def record(batch: Any, seed: DropoutSeed | None) -> Tensor:
        seeds.append(-1 if seed is None else int(seed.seed))
        return forward(batch, seed)

    monkeypatch.setattr(embeddings, "forward", record)
    loss, _ = compute_gradients(objective, with_dropout=True)
    assert seeds[0] == 7
    assert seeds[1] not in (7, -1)
    assert loss != compute_gradients(objective, with_dropout=False)[0]


def test_training_is_resumed_and_learns(
    start_model: Path, write_table: WriteTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out loss falls; an interrupted run ends with the same bytes; snapshots load."""
    table = write_table("train.jsonl", make_rows("texts", 100))
    values = VALUES | {"checkpoint": {"steps": 3}}
    expected = finetune_embedder(start_model, tmp_path / "a", data=table, values=values)
    untrained = finetune_embedder(
        start_model, tmp_path / "b", data=table, values=values | {"optim": {"lr": 1e-12}}
    )
    assert expected.metric_names == ["loss"]
    assert expected.metrics["loss"] < untrained.metrics["loss"] - 0.3
    num_steps = 0

    def interrupt_step_5(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        return take_step(*arguments, **keywords)

    monkeypatch.setattr(loop, "take_step", interrupt_step_5)
    with pytest.raises(KeyboardInterrupt):
        finetune_embedder(start_model, tmp_path / "c", data=table, values=values)
    monkeypatch.undo()
    write_latest_snapshot(tmp_path / "c", tmp_path / "snapshot")
    assert embed(tmp_path / "snapshot", ["ba be"]).shape == (1, 32)
    resumed = finetune_embedder(start_model, tmp_path / "c", data=table, values=values)
    assert resumed.model is not None
    assert expected.model is not None
    name = bundle.WEIGHTS_FILE
    assert (resumed.model / name).read_bytes() == (expected.model / name).read_bytes()
    texts = ["ba be", "bo"]
    vectors = SentenceTransformer(str(resumed.model), device="cpu").encode(texts)
    np.testing.assert_allclose(embed(resumed.model, texts), vectors, rtol=0, atol=1e-6)


def test_other_kinds_and_matryoshka_are_errors(
    start_model: Path, write_table: WriteTable, tmp_path: Path
) -> None:
    """TSDAE needs plain texts, and does not train the first dimensions."""
    table = write_table("train.jsonl", make_rows("pairs", 20))
    with pytest.raises(BertsmithError, match="'tsdae', but the examples are pairs; use mnrl or"):
        finetune_embedder(start_model, tmp_path / "run", data=table, values=VALUES)
    values = VALUES | {"embedding": {"loss": "tsdae", "matryoshka_dims": [8]}}
    with pytest.raises(BertsmithError, match="matryoshka_dims has no effect on the loss tsdae"):
        finetune_embedder(start_model, tmp_path / "run", data=table, values=values)
