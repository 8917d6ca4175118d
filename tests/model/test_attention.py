"""The kernels of attention, against plain loops and against each other."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bertsmith.model import attention as attending
from bertsmith.model.attention import Kernel, SelfAttention, build_layout, reference_attention
from bertsmith.model.bert import BertModel
from bertsmith.model.ops import bucketing
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from tests.model.examples import EQUAL, RAGGED, prime_config, random_batch

SHAPES = pytest.mark.parametrize("lengths", [RAGGED, EQUAL, (7,)], ids=["ragged", "equal", "one"])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


def packed_of(lengths: tuple[int, ...]) -> PackedBatch:
    """Pack sequences of zeros."""
    return pack_sequences([([0] * length, [0] * length) for length in lengths])


def by_loops(
    qkv: Tensor, lengths: tuple[int, ...], causal: bool, kept: Tensor | None
) -> list[list[list[float]]]:
    """Attend with nothing but Python's floats: qkv [T, 3, N, H] -> [T][N][H]."""
    _, _, heads, width = qkv.shape
    rows = qkv.tolist()
    result, first = [], 0
    for number, length in enumerate(lengths):
        for i in range(length):
            row = []
            for head in range(heads):
                query = rows[first + i][0][head]
                seen = range(i + 1 if causal else length)
                scores = [
                    sum(a * b for a, b in zip(query, rows[first + j][1][head], strict=True))
                    / math.sqrt(width)
                    for j in seen
                ]
                total = sum(math.exp(score) for score in scores)
                mixed = [0.0] * width
                for j in seen:
                    weight = math.exp(scores[j]) / total
                    if kept is not None:
                        weight *= float(kept[number, head, i, j])
                    for h in range(width):
                        mixed[h] += weight * rows[first + j][2][head][h]
                row.append(mixed)
            result.append(row)
        first += length
    return result


@SHAPES
@DIRECTIONS
@pytest.mark.parametrize("dropped", [False, True])
def test_reference_equals_plain_loops(
    lengths: tuple[int, ...], causal: bool, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reference` is softmax(q k / sqrt(H)) v inside each sequence, dropout on probabilities."""
    torch.manual_seed(1)
    qkv = torch.randn(sum(lengths), 3, 3, 7)
    kept = None
    if dropped:
        kept = (torch.rand(len(lengths), 3, max(lengths), max(lengths)) > 0.4) / 0.6
        monkeypatch.setattr(attending, "grouped", lambda _: None)
        monkeypatch.setattr(bucketing, "_edge", lambda: 1)
    where = build_layout(packed_of(lengths), "reference", causal=causal, dtype=torch.float32)
    q, k, v = qkv.unbind(1)
    keep = None if kept is None else lambda _: kept
    found, probabilities = reference_attention(q, k, v, where, keep)
    expected = torch.tensor(by_loops(qkv, lengths, causal, kept))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert [p.shape for p in probabilities] == [(3, length, length) for length in lengths]
    for p in probabilities:
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:2]))
        assert not causal or not p.triu(1).any()


def run(
    lengths: tuple[int, ...], kernel: Kernel, causal: bool, train: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return a layer's attention and its gradients with respect to input and weights."""
    torch.manual_seed(2)
    config = prime_config(attention="causal" if causal else "bidirectional", attention_dropout=0.3)
    attention = SelfAttention(config, dropout_index=5).train(train)
    hidden = torch.randn(sum(lengths), config.width, requires_grad=True)
    where = build_layout(packed_of(lengths), kernel, causal=causal, dtype=torch.float32)
    output = attention(hidden, where, DropoutSeed(torch.tensor(11)))
    weights = [hidden, *attention.parameters()]
    return output, list(torch.autograd.grad((output * torch.randn(output.shape)).sum(), weights))


@SHAPES
@DIRECTIONS
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_padded_equals_reference(lengths: tuple[int, ...], causal: bool, train: bool) -> None:
    """`padded` gives what `reference` does, forward and backward, by the same decisions."""
    expected, slopes = run(lengths, "reference", causal, train)
    found, found_slopes = run(lengths, "padded", causal, train)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for ours, theirs in zip(found_slopes, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    still = run(lengths, "reference", causal, not train)[0]
    assert not torch.allclose(found, still, atol=1e-2), "dropout does nothing here"


#: Lengths far enough apart for groups, some of them equal, in no order.
UNLIKE = (61, 5, 5, 130, 7, 64, 128, 5, 33)


@DIRECTIONS
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_groups_of_like_lengths_change_nothing(
    causal: bool, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded by groups, `padded` gives what `reference` does, by the same decisions of dropout."""
    where = build_layout(packed_of(UNLIKE), "padded", causal=causal, dtype=torch.float32)
    assert len(where.buckets) > 2
    places = sum(own.num_sequences * own.max_seqlen for own in where.buckets)
    assert places < 0.6 * len(UNLIKE) * max(UNLIKE)
    assert where.unpad_indices is not None
    assert len(set(where.unpad_indices.tolist())) == sum(UNLIKE)
    expected, slopes = run(UNLIKE, "reference", causal, train)
    found, found_slopes = run(UNLIKE, "padded", causal, train)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for ours, theirs in zip(found_slopes, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    if not train:
        monkeypatch.setattr(attending, "grouped", lambda _: None)
        together, _ = run(UNLIKE, "padded", causal, train)
        torch.testing.assert_close(found, together, rtol=0, atol=1e-5)


@pytest.mark.parametrize("edge", [8, 16])
def test_groups_end_where_the_cpu_likes_it(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded groups have a multiple of its numbers if one is near, else their longest length."""
    monkeypatch.setattr(bucketing, "_edge", lambda: edge)
    for lengths, rounded in ((UNLIKE, None), ((3, edge - 2, 1), edge), ((3, edge + 1), edge + 1)):
        where = build_layout(packed_of(lengths), "padded", causal=False, dtype=torch.float32)
        for own in where.buckets:
            least = max(lengths[number] for number in own.sequence_indices or range(len(lengths)))
            assert own.max_seqlen in (least, rounded or -(-least // edge) * edge)
            assert 0 <= own.max_seqlen - least <= edge // 2
        assert rounded in (None, where.buckets[0].max_seqlen)
    equal = build_layout(packed_of((9, 9)), "padded", causal=False, dtype=torch.float32)
    assert (equal.unpad_indices, equal.buckets[0].max_seqlen) == (None, 9)


@DIRECTIONS
def test_what_is_not_finite_stays_in_its_sequence(causal: bool) -> None:
    """The fillers of a padded sequence hold none of another one's numbers."""
    attention = SelfAttention(prime_config(attention_dropout=0.0), dropout_index=0).eval()
    torch.manual_seed(3)
    where = build_layout(packed_of(RAGGED), "padded", causal=causal, dtype=torch.float32)
    assert where.unpad_indices is not None
    hidden = torch.randn(sum(RAGGED), 21)
    for first, last in itertools.pairwise(itertools.accumulate(RAGGED, initial=0)):
        broken = hidden.clone()
        broken[first:last] = math.inf
        found = attention(broken, where, None).isfinite().all(1)
        assert found.tolist() == [not first <= place < last for place in range(len(found))]


def test_groups_draw_unlike_decisions() -> None:
    """Two groups of equal contents get decisions of their own: no bits are shared."""
    torch.manual_seed(3)
    attention = SelfAttention(prime_config(attention_dropout=0.5), dropout_index=0).train()
    one = torch.randn(100, 21)
    hidden = torch.cat([one[:1], one, one, one[:1]])
    where = build_layout(packed_of((1, 100, 100, 1)), "padded", causal=False, dtype=torch.float32)
    assert [own.sequence_indices for own in where.buckets] == [[1, 2], [0, 3]]
    found = attention(hidden, where, DropoutSeed(torch.tensor(1)))
    assert not torch.allclose(found[1:101], found[101:201], atol=1e-3)


def test_grouping_is_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other way to part sequences in order of length costs less; like ones stay together."""
    monkeypatch.setattr(bucketing, "_edge", lambda: 8)
    assert bucketing.bucket_sequences([9] * 50) is None
    assert bucketing.bucket_sequences([8, 16, 8, 16]) is None
    lengths = [128, 8, 120, 16, 64, 8, 300, 72]
    parts = bucketing.bucket_sequences(lengths)
    assert parts is not None

    def cost(own: list[list[int]]) -> int:
        sizes = [max(-(-lengths[n] // 8) * 8 for n in part) for part in own]
        pairs = zip(own, sizes, strict=True)
        return sum(len(part) * size**2 + bucketing._GROUP_COST for part, size in pairs)

    order = sorted(range(8), key=lambda number: -lengths[number])
    every = []
    for cuts in range(2**7):
        own: list[list[int]] = [[]]
        for place, number in enumerate(order):
            own[-1].append(number)
            if place < 7 and cuts >> place & 1:
                own.append([])
        every.append(cost(own))
    assert cost(parts) == min(every)
    assert sorted(number for part in parts for number in part) == list(range(8))


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL, UNLIKE], ids=["ragged", "equal", "unlike"])
@DIRECTIONS
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_bf16_is_multiplied_out(
    lengths: tuple[int, ...], causal: bool, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 on a CPU `padded` is float32's up to rounding, and PyTorch's kernel is not asked."""
    expected, slopes = run(lengths, "reference", causal, train)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    with torch.autocast("cpu", torch.bfloat16):
        found, found_slopes = run(lengths, "padded", causal, train)
    assert found.dtype == torch.bfloat16
    for ours, theirs in zip([found, *found_slopes], [expected, *slopes], strict=True):
        assert (ours - theirs).norm() < 0.015 * theirs.norm()


def test_long_sequences_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all probabilities at once would take much memory, bf16 goes the way of float32."""
    monkeypatch.setattr(attending, "MATH_ATTENTION_MAX_SEQLEN", max(EQUAL))
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    with torch.autocast("cpu", torch.bfloat16):
        run(EQUAL, "padded", causal=False, train=False)
        with pytest.raises(TypeError, match="not callable"):
            run((max(EQUAL) + 1,), "padded", causal=False, train=False)
        # And what needs no gradient, as in use.
        with torch.no_grad(), pytest.raises(TypeError, match="not callable"):
            run(EQUAL, "padded", causal=False, train=False)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_sequences_of_one_length_are_dropped_differently(kernel: Kernel) -> None:
    """Two equal sequences of one batch get decisions of their own in training."""
    torch.manual_seed(3)
    attention = SelfAttention(prime_config(attention_dropout=0.5), dropout_index=0).train()
    hidden = torch.randn(19, 21).repeat(2, 1)
    where = build_layout(packed_of((19, 19)), kernel, causal=False, dtype=torch.float32)
    first, second = attention(hidden, where, DropoutSeed(torch.tensor(1))).chunk(2)
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@DIRECTIONS
def test_neighbours_change_nothing(kernel: Kernel, norm: str, causal: bool) -> None:
    """A sequence has the same hidden states alone, and packed behind and before any others."""
    torch.manual_seed(4)
    config = prime_config(
        norm=norm, attention="causal" if causal else "bidirectional", init_range=0.3
    )
    model = BertModel(config, kernel).eval()
    chance = torch.Generator().manual_seed(4)

    def draw(length: int) -> tuple[list[int], list[int]]:
        ids = torch.randint(config.vocab_size, (length,), generator=chance).tolist()
        return ids, [0] * (length // 2) + [1] * (length - length // 2)

    own = draw(17)
    with torch.no_grad():
        alone = model(pack_sequences([own]))
        for before, behind in (((), (41, 3)), ((41, 3), ()), ((17, 1), (29,)), ((17,), (17,))):
            batch = [*(draw(n) for n in before), own, *(draw(n) for n in behind)]
            first = sum(before)
            found = model(pack_sequences(batch))[first : first + 17]
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_causal_attention_never_sees_what_follows(kernel: Kernel) -> None:
    """A change of the last word moves no earlier hidden state; without causal it moves them all."""
    config = prime_config(attention="causal")
    other = prime_config()
    ids = list(range(1, 24))
    changed = [*ids[:-1], 99]
    segments = [0] * len(ids)
    moved = {}
    for name, choice in (("causal", config), ("both", other)):
        torch.manual_seed(5)
        model = BertModel(choice, kernel).eval()
        with torch.no_grad():
            before, after = (model(pack_sequences([(words, segments)])) for words in (ids, changed))
        moved[name] = (before - after)[:-1].abs().max(1).values
    assert moved["causal"].max() == 0.0
    assert moved["both"].min() > 0.0


def test_all_hidden_states_can_be_had() -> None:
    """``hidden_states`` gives embeddings and every layer; the last is what ``forward`` gives."""
    for norm in ("post", "pre"):
        config = prime_config(layers=3, norm=norm)
        model = BertModel(config).eval()
        batch = random_batch(config)
        states = list(model.hidden_states(batch.packed))
        assert len(states) == 4
        torch.testing.assert_close(states[-1], model(batch.packed), rtol=0, atol=0)
        assert not torch.allclose(states[-1], states[-2], atol=1e-2)


def test_varlen_is_refused_where_it_cannot_run() -> None:
    """On the CPU, and in training with attention dropout, `varlen` says what to do instead."""
    config = prime_config()
    model = BertModel(config, "varlen")
    batch = random_batch(config).packed
    with pytest.raises(ValueError, match="CUDA only; use the padded kernel"):
        model.eval()(batch)
    with pytest.raises(ValueError, match="set attention_dropout to 0"):
        model.train()(batch, DropoutSeed(torch.tensor(0)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SHAPES
@DIRECTIONS
def test_varlen_is_as_exact_as_padded(
    lengths: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    """On the same 16-bit inputs, `varlen` errs at most twice as much as `padded`, both ways."""
    torch.manual_seed(6)
    choice: Any = "causal" if causal else "bidirectional"
    # Head width 64: flash attention takes multiples of 8 only.
    config = prime_config(width=192, attention=choice, attention_dropout=0.0)
    exact = SelfAttention(config, dropout_index=0).cuda().to(dtype).eval()
    hidden = torch.randn(sum(lengths), 192, device="cuda").to(dtype)
    upstream = torch.randn(sum(lengths), 192, device="cuda").to(dtype)
    packed = packed_of(lengths).to(torch.device("cuda"))

    def attend(kernel: Kernel, kind: torch.dtype) -> list[Tensor]:
        layer = SelfAttention(config, dropout_index=0).cuda().to(kind).eval()
        layer.load_state_dict(exact.state_dict())
        own = hidden.to(kind).requires_grad_()
        where = build_layout(packed, kernel, causal=causal, dtype=kind)
        output = layer(own, where, None)
        slopes = torch.autograd.grad(output, [own, *layer.parameters()], upstream.to(kind))
        return [value.detach().float() for value in (output, *slopes)]

    # The truth: the same 16-bit inputs and weights, worked out in float32.
    truth = attend("reference", torch.float32)
    found, padded = attend("varlen", dtype), attend("padded", dtype)
    for a, b, c in zip(found, padded, truth, strict=True):
        least = 2e-3 * float(c.abs().max())
        assert (a - c).abs().max() <= max(2 * float((b - c).abs().max()), least)
