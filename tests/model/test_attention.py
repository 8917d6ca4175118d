"""Attention kernels: equal outputs and gradients, bucketing, dropout masks and independence."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bertsmith.model.attention import SelfAttention, reference_attention
from bertsmith.model.bert import BertModel
from bertsmith.model.ops import attention_layout, bucketing, padded_attention, varlen
from bertsmith.model.ops.attention_layout import AttentionLayout, Kernel, build_attention_layout
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.runtime.device import seed_dropout
from tests.model.examples import (
    EQUAL_LENGTHS,
    RAGGED_LENGTHS,
    WIDTH,
    draw_batch,
    make_prime_size_config,
)

SHAPES = pytest.mark.parametrize(
    "lengths", [RAGGED_LENGTHS, EQUAL_LENGTHS, (7,)], ids=["ragged", "equal", "one"]
)
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
MODES = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def pack_zeros(lengths: tuple[int, ...]) -> PackedBatch:
    """Return a batch of sequences with these lengths, in which all token ids are 0."""
    return pack_sequences([([0] * length, [0] * length) for length in lengths])


def build_layout(lengths: tuple[int, ...], kernel: Kernel, *, is_causal: bool) -> AttentionLayout:
    """Return the float32 attention layout of a batch of sequences with these lengths."""
    return build_attention_layout(
        pack_zeros(lengths), kernel, is_causal=is_causal, dtype=torch.float32
    )


def compute_attention_with_loops(
    qkv: Tensor, lengths: tuple[int, ...], causal: bool, dropout_mask: Tensor | None
) -> list[list[list[float]]]:
    """Compute attention with Python floats: qkv [T, 3, N, H] -> [T][N][H]."""
    _, _, heads, head_dim = qkv.shape
    rows = qkv.tolist()
    outputs = []
    start = 0
    for sequence, length in enumerate(lengths):
        for i in range(length):
            head_outputs = []
            for head in range(heads):
                query = rows[start + i][0][head]
                visible = range(i + 1 if causal else length)
                scores = [
                    sum(a * b for a, b in zip(query, rows[start + j][1][head], strict=True))
                    / math.sqrt(head_dim)
                    for j in visible
                ]
                total = sum(math.exp(score) for score in scores)
                output = [0.0] * head_dim
                for j in visible:
                    probability = math.exp(scores[j]) / total
                    if dropout_mask is not None:
                        probability *= float(dropout_mask[sequence, head, i, j])
                    for h in range(head_dim):
                        output[h] += probability * rows[start + j][2][head][h]
                head_outputs.append(output)
            outputs.append(head_outputs)
        start += length
    return outputs


@SHAPES
@DIRECTIONS
@pytest.mark.parametrize("use_dropout", [False, True])
def test_reference_equals_plain_loops(
    lengths: tuple[int, ...], causal: bool, use_dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reference` is softmax(q k / sqrt(H)) v in each sequence, with dropout after softmax."""
    torch.manual_seed(1)
    qkv = torch.randn(sum(lengths), 3, 3, 7)
    dropout_mask = None
    if use_dropout:
        dropout_mask = (torch.rand(len(lengths), 3, max(lengths), max(lengths)) > 0.4) / 0.6
        # With one bucket and without rounding, the layout needs a mask of this shape.
        monkeypatch.setattr(attention_layout, "bucket_sequences", lambda _: None)
        monkeypatch.setattr(bucketing, "_simd_width", lambda: 1)
    layout = build_layout(lengths, "reference", is_causal=causal)
    q, k, v = qkv.unbind(1)
    draw_mask = None if dropout_mask is None else lambda _: dropout_mask
    output, probabilities = reference_attention(q, k, v, layout, draw_mask)
    expected = torch.tensor(compute_attention_with_loops(qkv, lengths, causal, dropout_mask))
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
    assert [p.shape for p in probabilities] == [(3, length, length) for length in lengths]
    for p in probabilities:
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:2]))
        assert not causal or not p.triu(1).any()


def run_attention_layer(
    lengths: tuple[int, ...], kernel: Kernel, causal: bool, train: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of an attention layer, and the gradients of its input and weights.

    Args:
        lengths: Length of each sequence.
        kernel: The attention kernel.
        causal: Whether attention is causal.
        train: Whether the layer is in train mode, with dropout.
    """
    torch.manual_seed(2)
    config = make_prime_size_config(
        attention="causal" if causal else "bidirectional", attention_dropout=0.3
    )
    attention = SelfAttention(config, dropout_index=5).train(train)
    hidden = torch.randn(sum(lengths), config.width, requires_grad=True)
    layout = build_layout(lengths, kernel, is_causal=causal)
    output = attention(hidden, layout, DropoutSeed(torch.tensor(11)))
    inputs = [hidden, *attention.parameters()]
    return output, list(torch.autograd.grad((output * torch.randn(output.shape)).sum(), inputs))


@SHAPES
@DIRECTIONS
@MODES
def test_padded_equals_reference(lengths: tuple[int, ...], causal: bool, train: bool) -> None:
    """`padded` and `reference` have the same outputs, gradients and dropout masks."""
    expected, expected_grads = run_attention_layer(lengths, "reference", causal, train)
    output, grads = run_attention_layer(lengths, "padded", causal, train)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)
    other_mode = run_attention_layer(lengths, "reference", causal, not train)[0]
    assert not torch.allclose(output, other_mode, atol=1e-2), "dropout has no effect"


#: Lengths that need several buckets, unordered and with duplicates.
VARIED_LENGTHS = (61, 5, 5, 130, 7, 64, 128, 5, 33)


@DIRECTIONS
@MODES
def test_bucketing_does_not_change_the_output(
    causal: bool, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several buckets, `padded` equals `reference` in outputs, gradients and dropout masks."""
    layout = build_layout(VARIED_LENGTHS, "padded", is_causal=causal)
    assert len(layout.buckets) > 2
    num_rows = sum(bucket.num_sequences * bucket.max_seqlen for bucket in layout.buckets)
    assert num_rows < 0.6 * len(VARIED_LENGTHS) * max(VARIED_LENGTHS)
    assert layout.unpad_indices is not None
    assert len(set(layout.unpad_indices.tolist())) == sum(VARIED_LENGTHS)
    expected, expected_grads = run_attention_layer(VARIED_LENGTHS, "reference", causal, train)
    output, grads = run_attention_layer(VARIED_LENGTHS, "padded", causal, train)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=2e-5)
    if not train:
        monkeypatch.setattr(attention_layout, "bucket_sequences", lambda _: None)
        one_bucket, _ = run_attention_layer(VARIED_LENGTHS, "padded", causal, train)
        torch.testing.assert_close(output, one_bucket, rtol=0, atol=1e-5)


@pytest.mark.parametrize("simd_width", [8, 16])
def test_bucket_lengths_are_rounded_to_the_simd_width(
    simd_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket's length is rounded up to the SIMD width if this adds at most half a width."""
    monkeypatch.setattr(bucketing, "_simd_width", lambda: simd_width)
    for lengths, expected in (
        ((3, simd_width - 2, 1), simd_width),
        ((3, simd_width + 1), simd_width + 1),
    ):
        layout = build_layout(lengths, "padded", is_causal=False)
        assert [bucket.max_seqlen for bucket in layout.buckets] == [expected]
    for bucket in build_layout(VARIED_LENGTHS, "padded", is_causal=False).buckets:
        assert bucket.sequence_indices is not None
        longest = max(VARIED_LENGTHS[index] for index in bucket.sequence_indices)
        rounded_up = math.ceil(longest / simd_width) * simd_width
        assert bucket.max_seqlen in (longest, rounded_up)
        assert bucket.max_seqlen - longest <= simd_width // 2
    # Sequences of equal length are not padded.
    equal = build_layout((9, 9), "padded", is_causal=False)
    assert (equal.unpad_indices, equal.buckets[0].max_seqlen) == (None, 9)


@DIRECTIONS
def test_non_finite_values_stay_in_their_sequence(causal: bool) -> None:
    """An infinite value in one sequence does not reach others through padding."""
    attention = SelfAttention(make_prime_size_config(attention_dropout=0.0), dropout_index=0).eval()
    torch.manual_seed(3)
    layout = build_layout(RAGGED_LENGTHS, "padded", is_causal=causal)
    assert layout.unpad_indices is not None
    hidden = torch.randn(sum(RAGGED_LENGTHS), WIDTH)
    for start, end in itertools.pairwise(itertools.accumulate(RAGGED_LENGTHS, initial=0)):
        with_inf = hidden.clone()
        with_inf[start:end] = math.inf
        is_finite = attention(with_inf, layout, None).isfinite().all(1)
        assert is_finite.tolist() == [not start <= row < end for row in range(len(is_finite))]


def test_buckets_have_different_dropout_masks() -> None:
    """Two buckets with the same content get different dropout masks."""
    torch.manual_seed(3)
    attention = SelfAttention(
        make_prime_size_config(attention_dropout=0.5), dropout_index=0
    ).train()
    sequence = torch.randn(100, WIDTH)
    hidden = torch.cat([sequence[:1], sequence, sequence, sequence[:1]])
    layout = build_layout((1, 100, 100, 1), "padded", is_causal=False)
    assert [bucket.sequence_indices for bucket in layout.buckets] == [[1, 2], [0, 3]]
    output = attention(hidden, layout, DropoutSeed(torch.tensor(1)))
    _, first, second, _ = output.split([1, 100, 100, 1])
    assert not torch.allclose(first, second, atol=1e-3)


def test_bucketing_has_the_least_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all partitions in order of length, the chosen buckets have the least cost."""
    monkeypatch.setattr(bucketing, "_simd_width", lambda: 8)
    # One bucket is best for equal lengths and for lengths that differ little.
    assert bucketing.bucket_sequences([9] * 50) is None
    assert bucketing.bucket_sequences([8, 16, 8, 16]) is None
    lengths = [128, 8, 120, 16, 64, 8, 300, 72]
    buckets = bucketing.bucket_sequences(lengths)
    assert buckets is not None

    def compute_cost(partition: list[list[int]]) -> int:
        cost = 0
        for bucket in partition:
            padded_length = max(math.ceil(lengths[index] / 8) * 8 for index in bucket)
            cost += len(bucket) * padded_length**2 + bucketing._BUCKET_COST
        return cost

    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    all_costs = []
    # A partition is determined by whether a new bucket starts at each index except the first.
    for starts_bucket in itertools.product([False, True], repeat=len(lengths) - 1):
        partition = [[order[0]]]
        for index, is_start in zip(order[1:], starts_bucket, strict=True):
            if is_start:
                partition.append([])
            partition[-1].append(index)
        all_costs.append(compute_cost(partition))
    assert compute_cost(buckets) == min(all_costs)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))


@pytest.mark.parametrize(
    "lengths", [RAGGED_LENGTHS, EQUAL_LENGTHS, VARIED_LENGTHS], ids=["ragged", "equal", "varied"]
)
@DIRECTIONS
@MODES
def test_bf16_attention_with_gradients_is_unfused(
    lengths: tuple[int, ...], causal: bool, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, bf16 attention on the CPU is unfused and equals float32 up to rounding."""
    expected, expected_grads = run_attention_layer(lengths, "reference", causal, train)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    with torch.autocast("cpu", torch.bfloat16):
        output, grads = run_attention_layer(lengths, "padded", causal, train)
    assert output.dtype == torch.bfloat16
    for actual, exact in zip([output, *grads], [expected, *expected_grads], strict=True):
        assert (actual - exact).norm() < 0.015 * exact.norm()


def test_long_sequences_use_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's fused kernel is used for bf16 inference and for long sequences."""
    monkeypatch.setattr(padded_attention, "UNFUSED_ATTENTION_MAX_SEQLEN", max(EQUAL_LENGTHS))
    # Without the fused kernel, calling it raises a TypeError.
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    with torch.autocast("cpu", torch.bfloat16):
        run_attention_layer(EQUAL_LENGTHS, "padded", causal=False, train=False)
        with pytest.raises(TypeError, match="not callable"):
            run_attention_layer((max(EQUAL_LENGTHS) + 1,), "padded", causal=False, train=False)
        # Inference, without gradients.
        with torch.no_grad(), pytest.raises(TypeError, match="not callable"):
            run_attention_layer(EQUAL_LENGTHS, "padded", causal=False, train=False)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_sequences_have_different_dropout_masks(kernel: Kernel) -> None:
    """Two equal sequences in a batch get different dropout masks."""
    torch.manual_seed(3)
    attention = SelfAttention(
        make_prime_size_config(attention_dropout=0.5), dropout_index=0
    ).train()
    hidden = torch.randn(19, WIDTH).repeat(2, 1)
    layout = build_layout((19, 19), kernel, is_causal=False)
    first, second = attention(hidden, layout, DropoutSeed(torch.tensor(1))).chunk(2)
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@DIRECTIONS
def test_hidden_states_do_not_depend_on_the_batch(kernel: Kernel, norm: str, causal: bool) -> None:
    """A sequence has the same hidden states alone and in a batch with other sequences."""
    torch.manual_seed(4)
    config = make_prime_size_config(
        norm=norm, attention="causal" if causal else "bidirectional", init_range=0.3
    )
    model = BertModel(config, kernel).eval()
    generator = torch.Generator().manual_seed(4)

    def draw_sequence(length: int) -> tuple[list[int], list[int]]:
        ids = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        return ids, [0] * (length // 2) + [1] * (length - length // 2)

    sequence = draw_sequence(17)
    with torch.no_grad():
        expected = model(pack_sequences([sequence]))
        # Lengths of the sequences before and after this sequence.
        for before, after in (((), (41, 3)), ((41, 3), ()), ((17, 1), (29,)), ((17,), (17,))):
            batch = [
                *(draw_sequence(n) for n in before),
                sequence,
                *(draw_sequence(n) for n in after),
            ]
            start = sum(before)
            hidden = model(pack_sequences(batch))[start : start + 17]
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_causal_attention_does_not_see_later_tokens(kernel: Kernel) -> None:
    """The last token influences all earlier hidden states, or none if attention is causal."""
    causal_config = make_prime_size_config(attention="causal")
    bidirectional_config = make_prime_size_config()
    ids = list(range(1, 24))
    changed_ids = [*ids[:-1], 99]
    segments = [0] * len(ids)
    differences = {}
    for name, config in (("causal", causal_config), ("bidirectional", bidirectional_config)):
        torch.manual_seed(5)
        model = BertModel(config, kernel).eval()
        with torch.no_grad():
            original, changed = (
                model(pack_sequences([(token_ids, segments)])) for token_ids in (ids, changed_ids)
            )
        differences[name] = (original - changed)[:-1].abs().max(1).values
    assert differences["causal"].max() == 0.0
    assert differences["bidirectional"].min() > 0.0


def test_hidden_states_yields_embeddings_and_all_layers() -> None:
    """``iter_hidden_states`` yields L + 1 tensors; the last equals ``forward``'s output."""
    for norm in ("post", "pre"):
        config = make_prime_size_config(layers=3, norm=norm)
        model = BertModel(config).eval()
        batch = draw_batch(config)
        states = list(model.iter_hidden_states(batch.packed))
        assert len(states) == 4
        torch.testing.assert_close(states[-1], model(batch.packed), rtol=0, atol=0)
        assert not torch.allclose(states[-1], states[-2], atol=1e-2)


def test_varlen_is_rejected_where_it_cannot_run() -> None:
    """The `varlen` kernel is an error on the CPU and with attention dropout."""
    config = make_prime_size_config()
    model = BertModel(config, "varlen")
    batch = draw_batch(config).packed
    with pytest.raises(ValueError, match=r"CUDA only.*use the padded kernel"):
        model.eval()(batch)
    with pytest.raises(ValueError, match="set attention_dropout to 0"):
        model.train()(batch, DropoutSeed(torch.tensor(0)))


@DIRECTIONS
def test_varlen_uses_flash_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`varlen` attends to all tokens, or to earlier ones, and PyTorch does not select cuDNN."""
    windows = []

    def record_window(query: Tensor, *_: Any, window_size: tuple[int, int]) -> Tensor:
        windows.append(window_size)
        return query

    monkeypatch.setattr(varlen, "varlen_attn", record_window)
    with FakeTensorMode():
        qkv = torch.empty(300, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        varlen.varlen_attention(qkv, cu_seqlens, 200, is_causal=causal)
        assert windows == [(-1, 0) if causal else (200, 200)]
        # The function exists since PyTorch 2.14.
        can_use_cudnn = getattr(torch.nn.attention.varlen, "_can_use_cudnn", None)
        if can_use_cudnn is not None:
            monkeypatch.setattr(torch.nn.attention.varlen, "_should_use_cudnn", lambda _: True)
            query = qkv[:, 0]
            assert can_use_cudnn(query, query, query, 200, [-1, -1])
            assert not can_use_cudnn(query, query, query, 200, list(windows[0]))


def test_reference_dropout_masks_are_on_the_device_of_the_model() -> None:
    """`reference` multiplies the probabilities by masks on their own device, in train mode."""
    config = make_prime_size_config(attention_dropout=0.4)
    layer = SelfAttention(config, dropout_index=2).to("meta").train()
    layout = build_layout((3, 5), "reference", is_causal=False)
    hidden = torch.empty(8, config.width, device="meta")
    assert layer(hidden, layout, DropoutSeed(torch.tensor(0))).device.type == "meta"


def test_padded_attention_on_cuda_does_not_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, cuDNN is disabled while PyTorch's fused attention runs, and only then."""
    states = []

    def record_backends(query: Tensor, *_: Any, **__: Any) -> Tensor:
        backends: Any = torch.backends.cuda
        names = ("cudnn", "flash", "mem_efficient", "math")
        states.append(tuple(getattr(backends, f"{name}_sdp_enabled")() for name in names))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record_backends)
    layout = build_layout((5, 5), "padded", is_causal=False)
    with FakeTensorMode():
        for device in ("cuda", "cpu"):
            qkv = torch.empty(10, 3, 2, 8, device=device)
            padded_attention.padded_attention(qkv, layout, None, dropout_rate=0.0)
    assert states == [(False, True, True, True), (True, True, True, True)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_attention_dropout_on_cuda_depends_on_the_seed_alone(kernel: Kernel) -> None:
    """On each CUDA device, equal dropout seeds give equal outputs, and other seeds others."""
    config = make_prime_size_config(attention_dropout=0.4)
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        layer = SelfAttention(config, dropout_index=2).to(device).train()
        layout = build_attention_layout(
            pack_zeros((19, 19)).to(device), kernel, is_causal=False, dtype=torch.float32
        )
        hidden = torch.randn(38, config.width, device=device)
        outputs = []
        for seed in (1, 2, 1):
            seed_dropout(device, seed)
            outputs.append(layer(hidden, layout, DropoutSeed(torch.tensor(seed))))
        assert torch.equal(outputs[0], outputs[2])
        assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SHAPES
@DIRECTIONS
def test_varlen_is_as_accurate_as_padded(
    lengths: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    """In 16 bits, outputs and gradients of `varlen` have at most twice the error of `padded`."""
    torch.manual_seed(6)
    direction: Any = "causal" if causal else "bidirectional"
    # Head dimension 64, because flash attention needs a multiple of 8.
    config = make_prime_size_config(width=192, attention=direction, attention_dropout=0.0)
    exact_layer = SelfAttention(config, dropout_index=0).cuda().to(dtype).eval()
    hidden = torch.randn(sum(lengths), 192, device="cuda").to(dtype)
    grad_output = torch.randn(sum(lengths), 192, device="cuda").to(dtype)
    packed = pack_zeros(lengths).to(torch.device("cuda"))

    def run(kernel: Kernel, run_dtype: torch.dtype) -> list[Tensor]:
        layer = SelfAttention(config, dropout_index=0).cuda().to(run_dtype).eval()
        layer.load_state_dict(exact_layer.state_dict())
        layer_input = hidden.to(run_dtype).requires_grad_()
        layout = build_attention_layout(packed, kernel, is_causal=causal, dtype=run_dtype)
        output = layer(layer_input, layout, None)
        grads = torch.autograd.grad(
            output, [layer_input, *layer.parameters()], grad_output.to(run_dtype)
        )
        return [value.detach().float() for value in (output, *grads)]

    # The same 16-bit inputs and weights, computed in float32.
    expected = run("reference", torch.float32)
    varlen, padded = run("varlen", dtype), run("padded", dtype)
    for varlen_value, padded_value, exact in zip(varlen, padded, expected, strict=True):
        min_tolerance = 2e-3 * float(exact.abs().max())
        padded_error = float((padded_value - exact).abs().max())
        assert (varlen_value - exact).abs().max() <= max(2 * padded_error, min_tolerance)
