"""What a new model can start from besides chance."""

import torch

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import sinusoids
from bertsmith.model.informed import inform, match_words
from bertsmith.model.packed import Packed, pack

V = 11
CONFIG = ModelConfig(
    vocab_size=V, layers=1, width=8, heads=2, feed_forward=16, max_positions=13, nsp=False
)


def test_the_bias_starts_at_the_words_frequencies() -> None:
    """Without features an informed head predicts each word by its share, the unseen least."""
    model = PreTrainingModel(CONFIG)
    counts = torch.tensor([0, 0, 0, 0, 0, 5, 10, 20, 40, 24, 1])
    inform(model, counts)
    shares = model.mlm.decoder.bias.softmax(-1)
    total = float(counts.clamp(min=0.5).sum())
    torch.testing.assert_close(shares[5:], counts[5:] / total)
    torch.testing.assert_close(shares[:5], torch.full((5,), 0.5 / total))


def test_positions_start_as_sinusoids_of_the_size_of_words() -> None:
    """The learned table begins as scaled sinusoids, as large as its neighbours, and is trained."""
    model = PreTrainingModel(CONFIG.model_copy(update={"max_positions": 512}))
    inform(model, torch.ones(V, dtype=torch.long))
    table = model.bert.embeddings.positions.weight
    ratio = table / sinusoids(*table.shape)
    finite = ratio[sinusoids(*table.shape).abs() > 1e-3]
    torch.testing.assert_close(finite, finite[0].expand_as(finite))
    assert table.requires_grad
    assert abs(float(table.pow(2).mean().sqrt()) - CONFIG.init_range) < 1e-3


def test_a_fixed_table_stays_as_it_is() -> None:
    """Sinusoidal positions that are not learned are not scaled."""
    model = PreTrainingModel(CONFIG.model_copy(update={"positions": "sinusoidal"}))
    before = model.bert.embeddings.positions.weight.clone()
    inform(model, torch.ones(V, dtype=torch.long))
    assert torch.equal(model.bert.embeddings.positions.weight, before)


def test_the_first_head_looks_for_the_same_word() -> None:
    """Wherever a word stands again, in the other segment too, half of its attention goes there."""
    config = CONFIG.model_copy(
        update={
            "vocab_size": 997, "width": 128, "heads": 2, "feed_forward": 131,
            "max_positions": 512, "init_range": 0.049,
        }
    )  # fmt: skip
    torch.manual_seed(3)
    model = PreTrainingModel(config).eval()
    ids = torch.arange(101, 201)
    ids[87] = ids[13]
    packed = pack([(ids.tolist(), [0] * 50 + [1] * 50)])
    before = _attention_of_first_head(model, packed)
    inform(model, torch.ones(997, dtype=torch.long))
    match_words(model)
    after = _attention_of_first_head(model, packed)
    assert before[13, 87] < 0.1
    assert after[13, 87] > 0.25
    assert after[87, 13] > 0.25
    assert after[40].argmax() == 40


def _attention_of_first_head(model: PreTrainingModel, packed: Packed) -> torch.Tensor:
    """Return the probabilities of the first head of the first layer, [T, T]."""
    attention = next(one for one in model.modules() if isinstance(one, SelfAttention))
    hidden = model.bert.embeddings(packed, None)
    qkv = attention.query_key_value(hidden).view(-1, 3, attention.heads, attention.head_width)
    query, key, _ = qkv.unbind(1)
    scores: torch.Tensor = query[:, 0] @ key[:, 0].T / float(attention.head_width) ** 0.5
    return scores.softmax(-1).detach()
