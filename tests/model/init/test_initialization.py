"""Initialization from token counts, and initialization of structured attention heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bertsmith.model.attention import SelfAttention
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.embeddings import sinusoidal_positions
from bertsmith.model.init.structured import (
    count_layers_with_neighbor_heads,
    init_cross_segment_heads,
    init_neighbor_heads,
    init_separate_positions,
)
from bertsmith.model.init.unigram import init_from_unigrams
from bertsmith.model.packed import PackedBatch, pack_sequences

V = 11
CONFIG = ModelConfig(
    vocab_size=V, layers=1, width=8, heads=2, feed_forward=16, max_positions=13, nsp=False
)

#: A config with a large enough width for random weights to average out, as in a real model.
WIDE_CONFIG = CONFIG.model_copy(
    update={
        "vocab_size": 997,
        "width": 128,
        "heads": 2,
        "feed_forward": 131,
        "max_positions": 512,
        "init_range": 0.049,
    }
)

#: The ids of [CLS] and [SEP] in these tests.
CLS, SEP = 2, 3


def test_mlm_bias_starts_at_the_word_frequencies() -> None:
    """Softmax of the decoder bias equals the smoothed token frequencies."""
    model = BertForPreTraining(CONFIG)
    counts = torch.tensor([0, 0, 0, 0, 0, 5, 10, 20, 40, 24, 1])
    init_from_unigrams(model, counts)
    probabilities = model.mlm.decoder.bias.softmax(-1)
    total = float(counts.clamp(min=0.5).sum())
    torch.testing.assert_close(probabilities[5:], counts[5:] / total)
    torch.testing.assert_close(probabilities[:5], torch.full((5,), 0.5 / total))


def test_learned_positions_start_as_scaled_sinusoids() -> None:
    """Learned positions start as sinusoids with the RMS of the word embeddings, and are trained."""
    model = BertForPreTraining(CONFIG.model_copy(update={"max_positions": 512}))
    init_from_unigrams(model, torch.ones(V, dtype=torch.long))
    table = model.bert.embeddings.positions.weight
    ratio = table / sinusoidal_positions(*table.shape)
    finite_ratio = ratio[sinusoidal_positions(*table.shape).abs() > 1e-3]
    torch.testing.assert_close(finite_ratio, finite_ratio[0].expand_as(finite_ratio))
    assert table.requires_grad
    assert abs(float(table.detach().pow(2).mean().sqrt()) - CONFIG.init_range) < 1e-3


def test_positions_use_dimensions_without_words() -> None:
    """Positions use dimensions that words do not use; shifting all positions rotates them."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"max_positions": 512, "width": 32})
    model = BertForPreTraining(config)
    init_neighbor_heads(model)
    embeddings = model.bert.embeddings
    table = embeddings.positions.weight.detach()
    # Positions use the last quarter of the 32 dimensions.
    positions = table[:, 24:]
    assert not table[:, :24].any()
    assert not embeddings.words.weight[:, 24:].any()
    assert not embeddings.segments.weight[:, 24:].any()
    assert embeddings.positions.weight.requires_grad
    word_std = embeddings.words.weight[:, :24].detach().std()
    assert abs(float(positions.pow(2).mean().sqrt() / word_std) - 1) < 0.2
    for shift in (1, 5):
        rotation = torch.linalg.lstsq(positions[:-shift], positions[shift:]).solution
        torch.testing.assert_close(
            positions[:-shift] @ rotation, positions[shift:], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(8), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("attention", "norm", "shifts"),
    [("bidirectional", "post", (-1, 1)), ("bidirectional", "pre", (-1, 1)),
     ("bidirectional", "none", (-1, 1)), ("causal", "post", (-1, -2))],
)  # fmt: skip
def test_neighbor_heads_attend_to_neighbors(
    attention: str, norm: str, shifts: tuple[int, int]
) -> None:
    """Two heads attend to the neighbors of every token, and copy only the word dimensions."""
    torch.manual_seed(3)
    config = WIDE_CONFIG.model_copy(update={"attention": attention, "norm": norm})
    model = BertForPreTraining(config).eval()
    batch = pack_sequences([(torch.randint(997, (100,)).tolist(), [0] * 50 + [1] * 50)])
    before = [_compute_attention_probabilities(model, batch, head) for head in range(2)]
    init_neighbor_heads(model)
    token_indices = torch.arange(2, 98)
    for head, shift in enumerate(shifts):
        assert before[head][token_indices, token_indices + shift].mean() < 0.1
        after = _compute_attention_probabilities(model, batch, head)
        assert after[token_indices, token_indices + shift].min() > 0.3
        assert (after[2:98].argmax(-1) == token_indices + shift).all()
    layer = next(module for module in model.modules() if isinstance(module, SelfAttention))
    # Shape [3 (query, key, value), N, H, D]. Positions use the last 32 dimensions.
    values = layer.query_key_value.weight.view(3, 2, 64, 128)[2]
    assert not values[:, :, 96:].any()
    torch.testing.assert_close(values[0][:, :96] @ values[0][:, :96].T, torch.eye(64))


def test_positions_have_separate_dimensions() -> None:
    """Words and segments are 0 in the dimensions of positions, and positions in the others."""
    model = BertForPreTraining(CONFIG)
    init_separate_positions(model)
    embeddings = model.bert.embeddings
    num_word_dims = CONFIG.width - CONFIG.width // 4
    for table in (embeddings.words.weight, embeddings.segments.weight):
        assert table[:, :num_word_dims].all()
        assert not table[:, num_word_dims:].any()
    assert not embeddings.positions.weight[:, :num_word_dims].any()
    position_std = embeddings.positions.weight[:, num_word_dims:].std()
    torch.testing.assert_close(position_std, embeddings.words.weight[:, :num_word_dims].std(),
                               rtol=0.1, atol=0.0)  # fmt: skip


def test_model_without_room_for_position_dimensions_is_not_changed() -> None:
    """Models with a width of 7 or with sinusoidal positions keep their random initialization."""
    for changes in ({"width": 7, "heads": 1}, {"positions": "sinusoidal"}):
        model = BertForPreTraining(CONFIG.model_copy(update=changes))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        init_neighbor_heads(model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        for initialization in ("neighbor-heads", "cross-segment-heads"):
            assert count_layers_with_neighbor_heads(initialization, model.config) == 0


def test_second_layer_has_a_neighbor_head_only_next_to_match_heads() -> None:
    """With two heads and a single segment, both neighbor heads are in the first layer."""
    for segments, expected in ((2, 2), (1, 1)):
        config = CONFIG.model_copy(update={"layers": 2, "segments": segments})
        assert count_layers_with_neighbor_heads("cross-segment-heads", config) == expected


def test_fixed_positions_are_not_changed() -> None:
    """``init_from_unigrams`` does not change sinusoidal positions."""
    model = BertForPreTraining(CONFIG.model_copy(update={"positions": "sinusoidal"}))
    before = model.bert.embeddings.positions.weight.clone()
    init_from_unigrams(model, torch.ones(V, dtype=torch.long))
    assert torch.equal(model.bert.embeddings.positions.weight, before)


@pytest.mark.parametrize("neighbor_heads", [True, False])
@pytest.mark.parametrize("heads", [2, 4])
def test_cross_segment_head_finds_the_word_in_the_other_segment(
    heads: int, neighbor_heads: bool
) -> None:
    """A token attends to the same token in the other segment, or to [CLS] if there is none."""
    torch.manual_seed(3)
    config = WIDE_CONFIG.model_copy(update={"layers": 2, "heads": heads, "nsp": True})
    model = BertForPreTraining(config).eval()
    ids = torch.arange(101, 201)
    ids[0] = CLS
    # Ten tokens are in both segments, and five tokens are twice in segment A.
    ids[60:70] = ids[10:20]
    ids[30:35] = ids[40:45]
    batch = pack_sequences([(ids.tolist(), [0] * 50 + [1] * 50)])
    init_from_unigrams(model, torch.ones(997, dtype=torch.long))
    init_cross_segment_heads(model, CLS, neighbor_heads=neighbor_heads)
    # The match head follows one neighbor head, or both if there are more than two heads. Without
    # neighbor heads, it is the head with the smallest slope of the attention bias.
    match_head = {(2, True): 1, (4, True): 2, (2, False): 1, (4, False): 3}[heads, neighbor_heads]
    probabilities = _compute_attention_probabilities(model, batch, match_head)
    in_a, in_b = torch.arange(10, 20), torch.arange(60, 70)
    assert probabilities[in_a, in_b].mean() > 0.6
    assert probabilities[in_b, in_a].mean() > 0.6
    # Neither the token itself nor the same token in the same segment counts as a match.
    unmatched = torch.tensor([*range(1, 10), *range(20, 60), *range(70, 100)])
    assert probabilities[unmatched, 0].median() > 0.3
    assert probabilities[torch.arange(30, 35), torch.arange(40, 45)].mean() < 0.3
    # Small changes during training do not break the head.
    layer = next(module for module in model.modules() if isinstance(module, SelfAttention))
    with torch.no_grad():
        layer.query_key_value.weight += 0.03 * torch.randn_like(layer.query_key_value.weight)
    probabilities = _compute_attention_probabilities(model, batch, match_head)
    assert probabilities[in_a, in_b].mean() > 0.6
    assert probabilities[in_b, in_a].mean() > 0.6


@pytest.mark.parametrize("heads", [2, 4])
def test_cross_segment_initialization_includes_neighbor_heads(heads: int) -> None:
    """The two neighbor heads are in the first layer, or in the first and second with two heads."""
    torch.manual_seed(3)
    config = WIDE_CONFIG.model_copy(update={"layers": 2, "heads": heads})
    model = BertForPreTraining(config).eval()
    batch = pack_sequences([(torch.randint(997, (100,)).tolist(), [0] * 50 + [1] * 50)])
    init_cross_segment_heads(model, CLS)
    token_indices = torch.arange(2, 98)
    previous = _compute_attention_probabilities(model, batch, 0)[token_indices, token_indices - 1]
    layer, head = (1, 0) if heads == 2 else (0, 1)
    next_probabilities = _compute_attention_probabilities(model, batch, head, layer)
    following = next_probabilities[token_indices, token_indices + 1]
    assert previous.mean() > 0.8
    # The second layer's input also contains the first layer's output, which is noise here.
    assert following.mean() > (0.2 if layer else 0.8)


@pytest.mark.parametrize("heads", [2, 4])
def test_match_heads_do_not_include_neighbor_heads(heads: int) -> None:
    """Without neighbor heads, no head of the two layers attends to the previous or next token."""
    torch.manual_seed(3)
    config = WIDE_CONFIG.model_copy(update={"layers": 2, "heads": heads})
    model = BertForPreTraining(config).eval()
    batch = pack_sequences([(torch.randint(997, (100,)).tolist(), [0] * 50 + [1] * 50)])
    init_cross_segment_heads(model, CLS, neighbor_heads=False)
    token_indices = torch.arange(2, 98)
    for layer in range(2):
        for head in range(heads):
            probabilities = _compute_attention_probabilities(model, batch, head, layer)
            for shift in (-1, 1):
                assert probabilities[token_indices, token_indices + shift].mean() < 0.05


@pytest.mark.parametrize("norm", ["post", "pre", "none"])
def test_head_outputs_have_the_intended_size(norm: str) -> None:
    """The RMS of the output is 0.5 (neighbor heads) or 1 (match head) times that of the input."""
    torch.manual_seed(3)
    changes = {"layers": 2, "heads": 4, "nsp": True, "norm": norm}
    model = BertForPreTraining(WIDE_CONFIG.model_copy(update=changes)).eval()
    init_cross_segment_heads(model, CLS)
    layer = next(module for module in model.modules() if isinstance(module, SelfAttention))
    batch = pack_sequences([([CLS, *range(101, 200)], [0] * 50 + [1] * 50)])
    input_rms = 1.0
    if norm == "none":
        embeddings = next(model.bert.iter_hidden_states(batch)).detach()
        input_rms = float(embeddings.std())
    relative_rms = []
    for head in range(3):
        probabilities = _compute_attention_probabilities(model, batch, head)
        values = _compute_head_values(model, batch, head)
        output_weight = torch.split(layer.output.weight.detach(), layer.head_dim, dim=1)[head]
        if head == 2:
            # Only the first value dimension marks [CLS]; the other dimensions are random.
            all_outputs = probabilities @ values[:, :1] @ output_weight[:, :1].T
            outputs = all_outputs[probabilities[:, 0] > 0.98]
            assert len(outputs) > 5
            assert (outputs - outputs.mean(0)).norm(dim=1).max() < 0.2 * outputs.mean(0).norm()
        else:
            outputs = values[1:] @ output_weight.T
        relative_rms.append(float(outputs.pow(2).mean().sqrt()) / input_rms)
    assert relative_rms == pytest.approx([0.5, 0.5, 1.0], rel=0.2)


@pytest.mark.parametrize("neighbor_heads", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{"layers": layers, "heads": heads, "norm": norm}
     for heads, layers in ((2, 2), (4, 2), (4, 4)) for norm in ("post", "pre", "none")]
    + [{"layers": 4, "heads": 4, "attention": "causal", "nsp": False}],
    ids=str,
)  # fmt: skip
def test_count_head_reports_the_number_of_shared_words(
    changes: dict[str, Any], neighbor_heads: bool
) -> None:
    """The main direction of the pooled states correlates with the number of shared words."""
    torch.manual_seed(3)
    model = BertForPreTraining(WIDE_CONFIG.model_copy(update={"nsp": True} | changes)).eval()
    init_cross_segment_heads(model, CLS, neighbor_heads=neighbor_heads)
    num_shared = torch.arange(0, 45, 3).repeat(4)
    states = torch.stack([_compute_pooled_state(model, int(count)) for count in num_shared])
    centered = states - states.mean(0)
    main_direction = torch.linalg.svd(centered, full_matrices=False).Vh[0]
    variables = torch.stack([centered @ main_direction, num_shared.float()])
    assert torch.corrcoef(variables)[0, 1].abs() > 0.8


def test_next_sentence_logits_start_at_zero() -> None:
    """The NSP logits start at 0: random logits would disturb the initialized attention heads."""
    model = BertForPreTraining(WIDE_CONFIG.model_copy(update={"layers": 2, "nsp": True}))
    init_cross_segment_heads(model, CLS)
    batch = pack_sequences([([CLS, *range(101, 120)], [0] * 10 + [1] * 10)])
    hidden = list(model.bert.iter_hidden_states(batch))[-1]
    assert not model.compute_nsp_logits(hidden, batch).any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "initialize", [partial(init_cross_segment_heads, cls_id=CLS), init_neighbor_heads]
)
def test_initialization_works_on_cuda(initialize: Callable[[BertForPreTraining], None]) -> None:
    """On CUDA all weights are finite, and the position embeddings equal those on the CPU."""
    changes = {"layers": 2, "heads": 4, "nsp": True}
    model = BertForPreTraining(WIDE_CONFIG.model_copy(update=changes))
    cuda_model = BertForPreTraining(WIDE_CONFIG.model_copy(update=changes)).cuda()
    cuda_model.load_state_dict(model.state_dict())
    initialize(model)
    initialize(cuda_model)
    for name, tensor in cuda_model.state_dict().items():
        assert tensor.isfinite().all()
        if name.endswith("positions.weight"):
            torch.testing.assert_close(tensor.cpu(), model.state_dict()[name])


@pytest.mark.parametrize(
    "changes",
    [{"layers": 1}, {"layers": 2, "heads": 1}, {"layers": 2, "segments": 1}],
)
def test_models_too_small_for_cross_segment_heads_get_neighbor_heads(
    changes: dict[str, int],
) -> None:
    """With one layer, head or segment, only neighbor heads are initialized."""
    state_dicts = []
    for initialize in (partial(init_cross_segment_heads, cls_id=CLS), init_neighbor_heads):
        torch.manual_seed(3)
        model = BertForPreTraining(WIDE_CONFIG.model_copy(update=changes))
        initialize(model)
        state_dicts.append(model.state_dict())
    assert all(torch.equal(tensor, state_dicts[1][name]) for name, tensor in state_dicts[0].items())


@pytest.mark.parametrize(
    "changes",
    [{"layers": 1}, {"layers": 2, "heads": 1}, {"layers": 2, "segments": 1}],
)
def test_models_too_small_for_match_heads_are_not_changed(changes: dict[str, int]) -> None:
    """Without neighbor heads, a model with one layer, head or segment keeps its weights."""
    model = BertForPreTraining(WIDE_CONFIG.model_copy(update=changes))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    init_cross_segment_heads(model, CLS, neighbor_heads=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _compute_pooled_state(model: BertForPreTraining, num_shared: int) -> torch.Tensor:
    """Return the hidden state that is pooled, for two segments of 49 words that share words.

    The pooled token is [CLS], or the last token with causal attention.

    Args:
        model: The model.
        num_shared: Number of words that are in both segments.
    """
    words = torch.randperm(900)[: 98 - num_shared] + 50
    second = torch.cat([words[:num_shared], words[49:]])
    ids = [CLS, *words[:49].tolist(), *second.tolist(), SEP]
    batch = pack_sequences([(ids, [0] * 50 + [1] * 50)])
    with torch.no_grad():
        hidden = list(model.bert.iter_hidden_states(batch))[-1]
    return hidden[-1 if model.config.attention == "causal" else 0]


def _compute_attention_probabilities(
    model: BertForPreTraining, batch: PackedBatch, head: int, layer: int = 0
) -> torch.Tensor:
    """Return the attention probabilities of a head, without an attention mask, [T, T]."""
    query, key, _ = _compute_query_key_value(model, batch, head, layer)
    scores = query @ key.T / float(query.shape[1]) ** 0.5
    return torch.softmax(scores, -1)


def _compute_head_values(model: BertForPreTraining, batch: PackedBatch, head: int) -> torch.Tensor:
    """Return the values of a head in the first layer, [T, H]."""
    return _compute_query_key_value(model, batch, head, 0)[2]


def _compute_query_key_value(
    model: BertForPreTraining, batch: PackedBatch, head: int, layer: int
) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values of a head, each [T, H]."""
    attention = [module for module in model.modules() if isinstance(module, SelfAttention)][layer]
    hidden = list(model.bert.iter_hidden_states(batch))[layer]
    if model.config.norm == "pre":
        hidden = model.bert.encoder.layers[layer].attention_norm(hidden)  # type: ignore[operator]
    qkv = attention.query_key_value(hidden).view(-1, 3, attention.num_heads, attention.head_dim)
    return tuple(tensor[:, head].detach() for tensor in qkv.unbind(1))
