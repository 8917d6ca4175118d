"""Losses on texts, compared with direct formulas in float64 and with transformers."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.train.distillation.text_losses import (
    EncoderStudent,
    HiddenStateLoss,
    MaskedLMLoss,
    RelationLoss,
    compute_qkv,
    sum_relation_divergence,
)
from tests.train.conftest import make_tokenizer

LENGTHS = [7, 3, 5]
VOCAB_SIZE = make_tokenizer().vocab_size


def make_config(layers: int, width: int, heads: int) -> ModelConfig:
    """Return a small config with large initial weights, so that outputs differ clearly."""
    return ModelConfig(
        vocab_size=VOCAB_SIZE, layers=layers, width=width, heads=heads, feed_forward=29,
        max_positions=11, nsp=False, init_range=0.2, activation="gelu",
    )  # fmt: skip


@pytest.fixture
def packed() -> PackedBatch:
    """Three texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    return pack_sequences([(x.tolist(), [0] * len(x)) for x in ids])


def make_encoder(layers: int, width: int, heads: int) -> BertModel:
    """Return an encoder with random weights, in eval mode."""
    torch.manual_seed(layers)
    return BertForPreTraining(make_config(layers, width, heads)).bert.eval()


def direct_divergence(student: Tensor, teacher: Tensor, num_heads: int) -> float:
    """Return the sum over tokens of the mean over heads of KL, with loops in float64."""
    total = 0.0
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for start, end in pairwise(ends):
        for head in range(num_heads):
            relations = []
            for vectors in (teacher, student):
                size = vectors.shape[1] // num_heads
                part = vectors[start:end, head * size : (head + 1) * size].double()
                relations.append((part @ part.T / math.sqrt(size)).softmax(-1))
            for p, q in zip(*(r.tolist() for r in relations), strict=True):
                total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / num_heads
    return total


def test_relation_divergence_is_the_formula() -> None:
    """The sum over tokens is KL of each head's relations, for different widths and lengths."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(sum(LENGTHS), 9, generator=generator, requires_grad=True)
    teacher = torch.randn(sum(LENGTHS), 15, generator=generator)
    result = sum_relation_divergence(student, teacher, LENGTHS, 3)
    expected = direct_divergence(student.detach(), teacher, 3)
    assert float(result.detach()) == pytest.approx(expected, rel=1e-5)
    result.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert student.grad.isfinite().all()
    self_divergence = sum_relation_divergence(teacher, teacher, LENGTHS, 3)
    assert float(self_divergence) == pytest.approx(0, abs=1e-5)


def test_relation_loss_compares_queries_keys_and_values(packed: PackedBatch) -> None:
    """The student's last layer is compared with the teacher's layer, for each of the three."""
    student, teacher = make_encoder(2, 9, 3), make_encoder(3, 15, 5)
    inputs: list[Tensor] = []
    handle = teacher.encoder.layers[1].register_forward_hook(
        lambda _, arguments, __: inputs.append(arguments[0])
    )
    teacher(packed)
    handle.remove()
    qkv = teacher.encoder.layers[1].attention.query_key_value(inputs[0])  # type: ignore[union-attr, operator]
    torch.testing.assert_close(compute_qkv(teacher, packed, 2, None).flatten(1), qkv)
    empty = torch.empty(0, dtype=torch.int64)
    losses = RelationLoss(EncoderStudent(student), teacher, 2, 3).compute(
        packed, empty, empty, None
    )
    student_qkv = compute_qkv(student, packed, 2, None)
    for index, name in enumerate(("query_loss", "key_loss", "value_loss")):
        part = qkv[:, 15 * index : 15 * (index + 1)]
        total, count = losses[name]
        expected = direct_divergence(student_qkv[:, index].detach(), part.detach(), 3)
        assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
        assert count == sum(LENGTHS)


def test_hidden_loss_is_the_formula(packed: PackedBatch) -> None:
    """Projected states of two layers are compared with those of layers 2 and 3 of three."""
    student = EncoderStudent(make_encoder(2, 9, 3), projection_width=15)
    teacher = make_encoder(3, 15, 5)
    assert isinstance(student.projection, nn.Linear)
    empty = torch.empty(0, dtype=torch.int64)
    total, count = HiddenStateLoss(student, teacher).compute(packed, empty, empty, None)[
        "hidden_loss"
    ]
    states = list(student.bert.iter_hidden_states(packed))
    targets = list(teacher.iter_hidden_states(packed))
    weight, bias = student.projection.weight.double(), student.projection.bias.double()
    expected = 0.0
    for layer, teacher_layer in ((1, 2), (2, 3)):
        projected = states[layer].double() @ weight.T + bias
        errors = (projected - targets[teacher_layer].double()).detach().square()
        expected += float(errors.sum()) / 15 / 2
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    assert count == sum(LENGTHS)


@pytest.mark.parametrize("hard_weight", [0.0, 0.25])
def test_mlm_loss_and_gradient_equal_those_of_transformers(
    packed: PackedBatch, tmp_path: Path, hard_weight: float
) -> None:
    """Loss and gradients equal those of a plain forward pass of transformers on padded texts."""
    temperature = 2.0
    models: list[BertForPreTraining] = []
    references: list[BertForMaskedLM] = []
    for name, config in (("student", make_config(1, 9, 3)), ("teacher", make_config(2, 15, 5))):
        torch.manual_seed(config.layers)
        models.append(BertForPreTraining(config).eval())
        bundle.save(tmp_path / name, models[-1], make_tokenizer(), {})
        references.append(BertForMaskedLM.from_pretrained(tmp_path / name).eval())
    masked_positions = torch.tensor([1, 4, 8, 12])
    labels = packed.ids[masked_positions]
    loss = MaskedLMLoss(models[0], models[1], VOCAB_SIZE, temperature, hard_weight)
    losses = loss.compute(packed, masked_positions, labels, None)
    total = torch.stack([value / count for value, count in losses.values()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    parts = packed.ids.split(LENGTHS)  # type: ignore[no-untyped-call]
    ids = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(n) for n in LENGTHS], batch_first=True)
    is_token = mask.bool()
    student, teacher = (
        model(input_ids=ids, attention_mask=mask).logits[is_token][masked_positions]
        for model in references
    )
    soft = nn.functional.kl_div(
        (student / temperature).log_softmax(-1),
        (teacher.detach() / temperature).softmax(-1),
        reduction="batchmean",
    )
    expected = (1 - hard_weight) * temperature**2 * soft
    if hard_weight:
        expected = expected + hard_weight * nn.functional.cross_entropy(student, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    gradients = dict(references[0].named_parameters())
    embeddings = gradients["bert.embeddings.word_embeddings.weight"].grad
    torch.testing.assert_close(
        models[0].bert.embeddings.words.weight.grad, embeddings, rtol=1e-4, atol=1e-6
    )
    up = gradients["bert.encoder.layer.0.intermediate.dense.weight"].grad
    layer = models[0].bert.encoder.layers[0]
    torch.testing.assert_close(layer.up.weight.grad, up, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in models[1].parameters())


def test_dropout_applies_to_the_student_only(packed: PackedBatch) -> None:
    """Two seeds give different losses, and the teacher's hidden states have no dropout."""
    student, teacher = EncoderStudent(make_encoder(2, 15, 5)), make_encoder(2, 15, 5)
    student.train()
    empty = torch.empty(0, dtype=torch.int64)
    loss = HiddenStateLoss(student, teacher)
    values = [
        float(loss.compute(packed, empty, empty, seed)["hidden_loss"][0].detach())
        for seed in (None, DropoutSeed(torch.tensor(1)), DropoutSeed(torch.tensor(2)))
    ]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert 0 < values[1] != values[2] > 0
