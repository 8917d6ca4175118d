"""Compiler warm-up: the warm-up batches compile all graphs that a run needs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.data.packing import ExampleBatch, concat_batches
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.train.pretraining.compile_warmup import build_warmup_batches
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import compute_mean_losses
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import make_assignments


@pytest.mark.parametrize(
    ("batch_size", "max_seqlen", "micro_batch_tokens"), [(2, 8, 10**6), (32, 128, 500), (6, 9, 64)]
)
def test_all_sizes_of_a_warmup_batch_differ(
    batch_size: int, max_seqlen: int, micro_batch_tokens: int
) -> None:
    """All sizes of the first batch, such as the numbers of tokens and predictions, differ."""
    settings = DataSettings(batch_size=batch_size, max_seqlen=max_seqlen)
    batches = build_warmup_batches(
        settings, max_seqlen, micro_batch_tokens, has_causal_phase=True, has_neighbor_bias=True
    )
    masked, biased, causal = (batch for batch in batches if len(batch) >= 2)
    assert (masked.is_causal, biased.is_causal, causal.is_causal) == (False, False, True)
    assert (masked.neighbor_bias, biased.neighbor_bias, causal.neighbor_bias) == (0, 1, 0)
    for batch in (masked, biased, causal):
        sizes = [
            len(batch),
            len(batch.cu_seqlens),
            batch.max_seqlen,
            len(batch.ids),
            len(batch.masked_labels),
        ]
        assert len(set(sizes)) == len(sizes)


def test_single_sequence_is_compiled_only_if_needed() -> None:
    """A batch of one sequence is compiled if a micro-batch of the run can have one sequence."""

    def count_sequences_per_batch(
        batch_size: int, max_seqlen: int, micro_batch_tokens: int
    ) -> list[int]:
        # The first phase has sequences of 32 tokens, and ``max_seqlen`` is that of all phases.
        settings = DataSettings(batch_size=batch_size, max_seqlen=32)
        # A count of 2 stands for 2 or more sequences.
        return [
            min(len(batch), 2)
            for batch in build_warmup_batches(settings, max_seqlen, micro_batch_tokens)
        ]

    assert count_sequences_per_batch(1, 32, 10**6) == [1]
    assert count_sequences_per_batch(8, 32, 10**6) == [2]
    assert count_sequences_per_batch(8, 32, 255) == [2, 1]
    assert count_sequences_per_batch(8, 64, 256) == [2, 1]


@pytest.mark.parametrize("causal_fraction", [0.0, 0.5])
def test_later_batches_compile_no_graph(
    store: Path, monkeypatch: pytest.MonkeyPatch, causal_fraction: float
) -> None:
    """After the warm-up, no batch compiles a graph, whatever its number and length of sequences.

    This includes left-to-right batches, or batches with a bias of attention, if the run has them.
    """
    graphs: list[int] = []

    def record_graph(graph: Any, example_inputs: Any) -> Any:
        graphs.append(len(example_inputs))
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record_graph))
    # With random weights, the attention of the first layer has a bias too.
    options = make_assignments(
        run__compile="true",
        run__initialization="random",
        data__batch_size=8,
        run__micro_batch_tokens=128,
        schedule__causal_fraction=causal_fraction,
    )
    settings = resolve_settings(Overrides(data=store, assignments=options), Store.open(store))
    session = Session(settings, Store.open(store))
    num_graphs = len(graphs)
    assert num_graphs == 4
    session.model.train()

    def compute_losses(batch: ExampleBatch) -> None:
        micro_batch = to_device(batch, torch.device("cpu"))
        dropout_seed = DropoutSeed(torch.tensor(3))
        compute_mean_losses(session.compiled_model, micro_batch, [micro_batch], dropout_seed)

    stream = build_heldout_stream(session.heldout_split, session.vocabulary, settings.data)
    for batch_size in (1, 2, 3, 5, 11):
        for first in (0, 4):
            compute_losses(stream.batch(first, batch_size))
            if causal_fraction:
                compute_losses(stream.batch(first, batch_size, is_causal=True))
            else:
                compute_losses(replace(stream.batch(first, batch_size), neighbor_bias=0.5))
    single = stream.batch(0, 1)
    compute_losses(concat_batches([single, single]))
    compute_losses(concat_batches([single, single, single, single]))
    longer = settings.data.model_copy(update={"max_seqlen": 64})
    long_stream = build_heldout_stream(session.heldout_split, session.vocabulary, longer)
    compute_losses(long_stream.batch(0, 6))
    assert len(graphs) == num_graphs
