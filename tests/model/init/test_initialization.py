"""What a new model can start from besides chance."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import sinusoidal_positions
from bertsmith.model.init.structured import init_cross_segment_heads, init_neighbor_heads
from bertsmith.model.init.unigram import init_from_unigrams
from bertsmith.model.packed import PackedBatch, pack_sequences

V = 11
CONFIG = ModelConfig(
    vocab_size=V, layers=1, width=8, heads=2, feed_forward=16, max_positions=13, nsp=False
)

#: As wide as a real small model, where what is drawn averages out.
REAL = CONFIG.model_copy(
    update={
        "vocab_size": 997, "width": 128, "heads": 2, "feed_forward": 131, "max_positions": 512,
        "init_range": 0.049,
    }
)  # fmt: skip


#: The ids of [CLS] and [SEP] in these tests.
CLS, SEP = 2, 3


def test_the_bias_starts_at_the_words_frequencies() -> None:
    """Without features an informed head predicts each word by its share, the unseen least."""
    model = BertForPreTraining(CONFIG)
    counts = torch.tensor([0, 0, 0, 0, 0, 5, 10, 20, 40, 24, 1])
    init_from_unigrams(model, counts)
    shares = model.mlm.decoder.bias.softmax(-1)
    total = float(counts.clamp(min=0.5).sum())
    torch.testing.assert_close(shares[5:], counts[5:] / total)
    torch.testing.assert_close(shares[:5], torch.full((5,), 0.5 / total))


def test_positions_start_as_sinusoids_of_the_size_of_words() -> None:
    """The learned table begins as scaled sinusoids, as large as its neighbours, and is trained."""
    model = BertForPreTraining(CONFIG.model_copy(update={"max_positions": 512}))
    init_from_unigrams(model, torch.ones(V, dtype=torch.long))
    table = model.bert.embeddings.positions.weight
    ratio = table / sinusoidal_positions(*table.shape)
    finite = ratio[sinusoidal_positions(*table.shape).abs() > 1e-3]
    torch.testing.assert_close(finite, finite[0].expand_as(finite))
    assert table.requires_grad
    assert abs(float(table.detach().pow(2).mean().sqrt()) - CONFIG.init_range) < 1e-3


def test_positions_start_as_sinusoids_in_dimensions_of_their_own() -> None:
    """As large as words there; a shift is a rotation, the same one wherever it begins."""
    torch.manual_seed(0)
    model = BertForPreTraining(CONFIG.model_copy(update={"max_positions": 512, "width": 32}))
    init_neighbor_heads(model)
    embeddings = model.bert.embeddings
    table = embeddings.positions.weight.detach()
    own = table[:, 24:]
    assert not table[:, :24].any()
    assert not embeddings.words.weight[:, 24:].any()
    assert not embeddings.segments.weight[:, 24:].any()
    assert embeddings.positions.weight.requires_grad
    assert abs(float(own.pow(2).mean().sqrt() / embeddings.words.weight[:, :24].std()) - 1) < 0.2
    for shift in (1, 5):
        turn = torch.linalg.lstsq(own[:-shift], own[shift:]).solution
        torch.testing.assert_close(own[:-shift] @ turn, own[shift:], atol=1e-5, rtol=0)
        torch.testing.assert_close(turn @ turn.T, torch.eye(8), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("attention", "norm", "shifts"),
    [("bidirectional", "post", (-1, 1)), ("bidirectional", "pre", (-1, 1)),
     ("bidirectional", "none", (-1, 1)), ("causal", "post", (-1, -2))],
)  # fmt: skip
def test_two_heads_look_at_the_neighbours(
    attention: str, norm: str, shifts: tuple[int, int]
) -> None:
    """Whatever words stand there; they had looked everywhere. What they find differs by word."""
    torch.manual_seed(3)
    model = BertForPreTraining(
        REAL.model_copy(update={"attention": attention, "norm": norm})
    ).eval()
    packed = pack_sequences([(torch.randint(997, (100,)).tolist(), [0] * 50 + [1] * 50)])
    before = [_attention_of(model, packed, head) for head in range(2)]
    init_neighbor_heads(model)
    rows = torch.arange(2, 98)
    for head, shift in enumerate(shifts):
        assert before[head][rows, rows + shift].mean() < 0.1
        after = _attention_of(model, packed, head)
        assert after[rows, rows + shift].min() > 0.3
        assert (after[2:98].argmax(-1) == rows + shift).all()
    first = next(one for one in model.modules() if isinstance(one, SelfAttention))
    values = first.query_key_value.weight.view(3, 2, 64, 128)[2]
    assert not values[:, :, 96:].any()
    torch.testing.assert_close(values[0][:, :96] @ values[0][:, :96].T, torch.eye(64))


def test_a_model_without_room_for_positions_of_their_own_stays_as_drawn() -> None:
    """With a width of 7 no two dimensions are to spare, and a fixed table has them all."""
    for changes in ({"width": 7, "heads": 1}, {"positions": "sinusoidal"}):
        model = BertForPreTraining(CONFIG.model_copy(update=changes))
        before = {name: own.clone() for name, own in model.state_dict().items()}
        init_neighbor_heads(model)
        assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())


def test_a_fixed_table_stays_as_it_is() -> None:
    """Sinusoidal positions that are not learned are not scaled."""
    model = BertForPreTraining(CONFIG.model_copy(update={"positions": "sinusoidal"}))
    before = model.bert.embeddings.positions.weight.clone()
    init_from_unigrams(model, torch.ones(V, dtype=torch.long))
    assert torch.equal(model.bert.embeddings.positions.weight, before)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_head_looks_for_the_word_in_the_other_segment(heads: int) -> None:
    """Where it is not there, the head stays at [CLS], and adds the same wherever it does."""
    torch.manual_seed(3)
    config = REAL.model_copy(update={"layers": 2, "heads": heads, "nsp": True})
    model = BertForPreTraining(config).eval()
    ids = torch.arange(101, 201)
    ids[0] = CLS
    ids[60:70], ids[30:35] = ids[10:20], ids[40:45]
    packed = pack_sequences([(ids.tolist(), [0] * 50 + [1] * 50)])
    init_from_unigrams(model, torch.ones(997, dtype=torch.long))
    init_cross_segment_heads(model, CLS)
    after = _attention_of(model, packed, 1 if heads == 2 else 2)
    here, there = torch.arange(10, 20), torch.arange(60, 70)
    assert after[here, there].mean() > 0.6
    assert after[there, here].mean() > 0.6
    # The same word in the same segment, or itself, is not what it looks for.
    alone = torch.tensor([*range(1, 10), *range(20, 60), *range(70, 100)])
    assert after[alone, 0].median() > 0.3
    assert after[torch.arange(30, 35), torch.arange(40, 45)].mean() < 0.3


@pytest.mark.parametrize("heads", [2, 4])
def test_neighbours_are_looked_at_beside_it(heads: int) -> None:
    """Both in the first layer; of two heads, the one ahead is in the second."""
    torch.manual_seed(3)
    model = BertForPreTraining(REAL.model_copy(update={"layers": 2, "heads": heads})).eval()
    packed = pack_sequences([(torch.randint(997, (100,)).tolist(), [0] * 50 + [1] * 50)])
    init_cross_segment_heads(model, CLS)
    rows = torch.arange(2, 98)
    back = _attention_of(model, packed, 0)[rows, rows - 1]
    layer, head = (1, 0) if heads == 2 else (0, 1)
    ahead = _attention_of(model, packed, head, layer)[rows, rows + 1]
    assert back.mean() > 0.8
    # In the second layer, what the first one added blurs where a word stands.
    assert ahead.mean() > (0.2 if layer else 0.8)


@pytest.mark.parametrize("norm", ["post", "pre", "none"])
def test_heads_are_as_loud_as_they_are_to_be(norm: str) -> None:
    """Where what the layer reads has 1: 1/2 for a neighbour, and 1 for staying at [CLS]."""
    torch.manual_seed(3)
    changes = {"layers": 2, "heads": 4, "nsp": True, "norm": norm}
    model = BertForPreTraining(REAL.model_copy(update=changes)).eval()
    init_cross_segment_heads(model, CLS)
    first = next(one for one in model.modules() if isinstance(one, SelfAttention))
    packed = pack_sequences([([CLS, *range(101, 200)], [0] * 50 + [1] * 50)])
    read = 1.0 if norm != "none" else float(next(iter(model.bert.hidden_states(packed))).std())
    added = []
    for head in range(3):
        attention, values = (_attention_of(model, packed, head), _values_of(model, packed, head))
        outputs = first.output.weight.detach()[:, head * 32 : head * 32 + 32]
        if head == 2:
            # Only its first value says where it stays; the others are as drawn.
            own = (attention @ values[:, :1] @ outputs[:, :1].T)[attention[:, 0] > 0.98]
            assert len(own) > 5
            assert (own - own.mean(0)).norm(dim=1).max() < 0.2 * own.mean(0).norm()
        else:
            own = values[1:] @ outputs.T
        added.append(float(own.pow(2).mean().sqrt()) / read)
    assert added == pytest.approx([0.5, 0.5, 1.0], rel=0.2)


@pytest.mark.parametrize(
    "changes",
    [{"layers": layers, "heads": heads, "norm": norm}
     for heads, layers in ((2, 2), (4, 2), (4, 4)) for norm in ("post", "pre", "none")]
    + [{"layers": 4, "heads": 4, "attention": "causal", "nsp": False}],
    ids=str,
)  # fmt: skip
def test_a_head_counts_the_words_that_are_not_in_the_other_segment(changes: dict[str, Any]) -> None:
    """What tasks read hears of it: it differs in this more than in any other direction."""
    torch.manual_seed(3)
    model = BertForPreTraining(REAL.model_copy(update={"nsp": True} | changes)).eval()
    init_cross_segment_heads(model, CLS)
    shared = torch.arange(0, 45, 3).repeat(4)
    heard = torch.stack([_read_by_tasks(model, int(count)) for count in shared])
    apart = heard - heard.mean(0)
    verdict = torch.linalg.svd(apart, full_matrices=False).Vh[0]
    told = torch.stack([apart @ verdict, shared.float()])
    assert torch.corrcoef(told)[0, 1].abs() > 0.8


def test_next_sentence_begins_without_an_opinion() -> None:
    """Else what it says by chance shakes the head that it is to listen to."""
    model = BertForPreTraining(REAL.model_copy(update={"layers": 2, "nsp": True}))
    init_cross_segment_heads(model, CLS)
    packed = pack_sequences([([CLS, *range(101, 120)], [0] * 10 + [1] * 10)])
    hidden = list(model.bert.hidden_states(packed))[-1]
    assert not model.next_sentence_logits(hidden, packed).any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "start", [partial(init_cross_segment_heads, cls_id=CLS), init_neighbor_heads]
)
def test_a_model_on_a_gpu_begins_so_too(start: Callable[[BertForPreTraining], None]) -> None:
    """Written where the weights are: what is not drawn, as on the CPU."""
    changes = {"layers": 2, "heads": 4, "nsp": True}
    model = BertForPreTraining(REAL.model_copy(update=changes))
    there = BertForPreTraining(REAL.model_copy(update=changes)).cuda()
    there.load_state_dict(model.state_dict())
    start(model)
    start(there)
    for name, own in there.state_dict().items():
        assert own.isfinite().all()
        if name.endswith("positions.weight"):
            torch.testing.assert_close(own.cpu(), model.state_dict()[name])


@pytest.mark.parametrize(
    "changes",
    [{"layers": 1}, {"layers": 2, "heads": 1}, {"layers": 2, "segments": 1}],
)
def test_where_it_cannot_look_across_it_looks_beside_alone(changes: dict[str, int]) -> None:
    """What [CLS] could not hear of is not looked for."""
    made = []
    for start in (partial(init_cross_segment_heads, cls_id=CLS), init_neighbor_heads):
        torch.manual_seed(3)
        model = BertForPreTraining(REAL.model_copy(update=changes))
        start(model)
        made.append(model.state_dict())
    assert all(torch.equal(own, made[1][name]) for name, own in made[0].items())


def _read_by_tasks(model: BertForPreTraining, shared: int) -> torch.Tensor:
    """Return what [CLS], or the last token, is where so many words of 49 stand in both segments."""
    words = torch.randperm(900)[: 98 - shared] + 50
    second = torch.cat([words[:shared], words[49:]])
    ids = [CLS, *words[:49].tolist(), *second.tolist(), SEP]
    packed = pack_sequences([(ids, [0] * 50 + [1] * 50)])
    with torch.no_grad():
        hidden = list(model.bert.hidden_states(packed))[-1]
    return hidden[-1 if model.config.attention == "causal" else 0]


def _attention_of(
    model: BertForPreTraining, packed: PackedBatch, head: int, layer: int = 0
) -> torch.Tensor:
    """Return the probabilities of a head, every token seen, [T, T]."""
    query, key, _ = _parts_of(model, packed, head, layer)
    scores = query @ key.T / float(query.shape[1]) ** 0.5
    return torch.softmax(scores, -1)


def _values_of(model: BertForPreTraining, packed: PackedBatch, head: int) -> torch.Tensor:
    """Return the values of a head of the first layer, [T, H]."""
    return _parts_of(model, packed, head, 0)[2]


def _parts_of(
    model: BertForPreTraining, packed: PackedBatch, head: int, layer: int
) -> tuple[torch.Tensor, ...]:
    attention = [one for one in model.modules() if isinstance(one, SelfAttention)][layer]
    hidden = list(model.bert.hidden_states(packed))[layer]
    if model.config.norm == "pre":
        hidden = model.bert.encoder.layers[layer].attention_norm(hidden)  # type: ignore[operator]
    qkv = attention.query_key_value(hidden).view(-1, 3, attention.heads, attention.head_width)
    return tuple(part[:, head].detach() for part in qkv.unbind(1))
