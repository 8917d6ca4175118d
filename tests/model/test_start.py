"""What a new model can start from besides chance."""

import torch

from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import sinusoids

V = 11
CONFIG = ModelConfig(
    vocab_size=V, layers=1, width=8, heads=2, feed_forward=16, max_positions=13, nsp=False
)


def test_the_bias_starts_at_the_words_frequencies() -> None:
    """Without features an informed head predicts each word by its share, the unseen least."""
    model = PreTrainingModel(CONFIG)
    counts = torch.tensor([0, 0, 0, 0, 0, 5, 10, 20, 40, 24, 1])
    model.inform(counts)
    shares = model.mlm.decoder.bias.softmax(-1)
    total = float(counts.clamp(min=0.5).sum())
    torch.testing.assert_close(shares[5:], counts[5:] / total)
    torch.testing.assert_close(shares[:5], torch.full((5,), 0.5 / total))


def test_positions_start_as_sinusoids_of_the_size_of_words() -> None:
    """The learned table begins as scaled sinusoids, as large as its neighbours, and is trained."""
    model = PreTrainingModel(CONFIG.model_copy(update={"max_positions": 512}))
    model.inform(torch.ones(V, dtype=torch.long))
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
    model.inform(torch.ones(V, dtype=torch.long))
    assert torch.equal(model.bert.embeddings.positions.weight, before)
