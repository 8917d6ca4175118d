"""Tests of micro-batches that are filled up to a constant shape."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bertsmith.data.packing import ExampleBatch
from bertsmith.data.store import Store
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime import device
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining.device_settings import needs_static_shapes, select_for_device
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch
from bertsmith.train.pretraining.objective import compute_mean_losses
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from bertsmith.train.pretraining.static_shapes import IGNORED_LABEL, StaticShape
from tests.train.conftest import make_assignments

BATCH_SIZE = 9


@pytest.fixture
def session(store: Path) -> Session:
    """A float64 model, for which the CPU ignores labels as a GPU does, and its data."""
    options = make_assignments(data__batch_size=BATCH_SIZE, model__dropout=0.0)
    session = Session(
        resolve_settings(Overrides(data=store, assignments=options), Store.open(store)),
        Store.open(store),
    )
    session.model.double()
    return session


def read_batches(session: Session, num_batches: int) -> list[ExampleBatch]:
    """Return the first training batches."""
    stream = build_heldout_stream(session.train_split, session.vocabulary, session.settings.data)
    return [stream.batch(BATCH_SIZE * i, BATCH_SIZE) for i in range(num_batches)]


def compute_gradients(
    session: Session, micro_batches: list[PretrainingMicroBatch]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the mean losses of a batch and the gradients of all weights."""
    session.model.zero_grad()
    totals: dict[str, Tensor] = {}
    for micro_batch in micro_batches:
        losses = compute_mean_losses(
            session.model, micro_batch, micro_batches, DropoutSeed(torch.tensor(0))
        )
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, loss in losses.items():
            totals[name] = totals.get(name, torch.zeros(())) + loss.detach()
    gradients = [p.grad.clone() for p in session.model.parameters() if p.grad is not None]
    return totals, gradients


@pytest.mark.parametrize("max_tokens", [10**6, 100])
@pytest.mark.parametrize("kernel", ["reference", "padded"])
def test_filling_up_changes_no_loss_and_no_gradient(
    session: Session, kernel: Any, max_tokens: int
) -> None:
    """Filled-up micro-batches have the losses and gradients of the batch."""
    session.model.bert.kernel = kernel
    (batch,) = read_batches(session, 1)
    shape = StaticShape.choose(BATCH_SIZE, session.settings.data.max_seqlen, max_tokens)
    parts = [PretrainingMicroBatch.build(part, shape) for part in shape.split(batch)]
    assert len(parts) == shape.num_parts == (1 if max_tokens == 10**6 else 3)
    losses, gradients = compute_gradients(session, parts)
    expected = compute_gradients(session, [PretrainingMicroBatch.build(batch)])
    torch.testing.assert_close((losses, gradients), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_tokens", [10**6, 100])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_all_micro_batches_have_the_same_shape(
    session: Session, max_tokens: int, num_processes: int
) -> None:
    """The shapes of all tensors are constant, except for steps in the number of predictions."""
    max_seqlen = session.settings.data.max_seqlen
    shape = StaticShape.choose(BATCH_SIZE, max_seqlen, max_tokens, num_processes)
    assert shape.num_parts % num_processes == 0
    for batch in read_batches(session, 3):
        parts = shape.split(batch)
        assert len(parts) == shape.num_parts
        assert sum(len(part) for part in parts) == BATCH_SIZE
        for part in parts:
            filled = shape.fill_up(part)
            assert len(filled) == shape.num_sequences
            assert len(filled.ids) == len(filled.positions) == filled.cu_seqlens[-1]
            assert len(filled.ids) == shape.num_tokens
            assert filled.max_seqlen == max_seqlen
            lengths = np.diff(filled.cu_seqlens)
            assert 1 <= lengths.min() <= lengths.max() <= max_seqlen
            assert len(filled.masked_labels) % (shape.num_tokens // 16) == 0
            assert (filled.masked_labels[len(part.masked_labels) :] == IGNORED_LABEL).all()


def test_short_sequences_get_more_filler_sequences() -> None:
    """If the sequences fill little of the shape, no filler sequence exceeds the maximum length."""
    shape = StaticShape.choose(8, 64, 10**6)
    ids = np.zeros(16, np.int64)
    batch = ExampleBatch(
        ids=ids, segments=ids, positions=np.tile([0, 1], 8), max_seqlen=2,
        cu_seqlens=np.arange(0, 17, 2, dtype=np.int32), masked_positions=ids[:1],
        masked_labels=ids[:1], nsp_labels=None,
    )  # fmt: skip
    filled = shape.fill_up(batch)
    assert np.diff(filled.cu_seqlens).max() <= 64
    assert len(filled.ids) == shape.num_tokens
    assert len(filled) > shape.num_sequences


def test_one_graph_is_compiled_for_all_batches(session: Session) -> None:
    """With static shapes, the compiler generates one graph for many batches."""
    graphs: list[int] = []

    def record_graph(graph: Any, example_inputs: Any) -> Any:
        graphs.append(len(example_inputs))
        return graph.forward

    torch.compiler.reset()
    session.model.train()
    compiled: Any = torch.compile(session.model, backend=record_graph, dynamic=False)
    shape = StaticShape.choose(BATCH_SIZE, session.settings.data.max_seqlen, 10**6)
    for batch in read_batches(session, 4):
        part = PretrainingMicroBatch.build(batch, shape)
        compute_mean_losses(compiled, part, [part], DropoutSeed(torch.tensor(1)))
    assert len(graphs) == 1


def test_a_run_with_static_shapes_counts_only_real_tokens(session: Session) -> None:
    """The counts of tokens and multiply-adds, and the losses, do not include filler sequences."""
    objectives = []
    for has_static_shapes in (False, True):
        session.has_static_shapes = has_static_shapes
        objectives.append(session.build_objective(StepDuration(2)))
    plain, static = (next(objective.iter_batches(0)) for objective in objectives)
    assert len(static[0].packed.ids) > len(plain[0].packed.ids)
    assert objectives[0].count_tokens(plain) == objectives[1].count_tokens(static)
    assert objectives[0].count_macs(plain) == objectives[1].count_macs(static)
    torch.testing.assert_close(
        compute_gradients(session, static)[0], compute_gradients(session, plain)[0]
    )


def test_gpus_have_compiled_models_with_static_shapes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unset settings depend on the device: a GPU has larger micro-batches and static shapes.

    Batches that grow and batch norm have dynamic shapes.
    """
    settings, cpu = session.settings, session.machine
    assert (settings.run.compile, settings.run.micro_batch_tokens) == (False, 16384)
    assert not session.has_static_shapes
    unset = settings.run.model_copy(update={"compile": None, "micro_batch_tokens": None})
    settings = settings.model_copy(update={"run": unset})
    gpu = replace(cpu, device=torch.device("cuda"))
    total_memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total_memory)
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    base = ModelConfig.parse({"vocab_size": 30522, **get_size_preset("base")}, "base")
    for model, num_tokens in ((settings.model, 131072), (base, 65536)):
        run = select_for_device(settings.model_copy(update={"model": model}), gpu)
        assert (run.compile, run.micro_batch_tokens) == (True, num_tokens)
    # The logits of many words need memory too.
    words = settings.model.model_copy(update={"vocab_size": 500_000})
    run = select_for_device(settings.model_copy(update={"model": words}), gpu)
    assert run.micro_batch_tokens == 32768
    total_memory.total_memory = 2**30
    assert select_for_device(settings.model_copy(update={"model": base}), gpu) == run.model_copy(
        update={"micro_batch_tokens": 16384}
    )
    compiled = settings.model_copy(update={"run": run})
    assert needs_static_shapes(compiled, gpu)
    assert not needs_static_shapes(settings, gpu)
    assert not needs_static_shapes(compiled, cpu)
    data = compiled.data.model_copy(update={"initial_batch_size": 2})
    assert not needs_static_shapes(compiled.model_copy(update={"data": data}), gpu)
    model = compiled.model.model_copy(update={"norm": "batch"})
    assert not needs_static_shapes(compiled.model_copy(update={"model": model}), gpu)
