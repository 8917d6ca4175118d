"""What a compiled model meets first: enough for every batch of a run, and always the same."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.data.packing import Batch, concat_batches
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.train.engine.compile_warmup import warmup_batches
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import compute_mean_losses
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import assignments


@pytest.mark.parametrize(("batch", "length", "micro"), [(2, 8, 10**6), (32, 128, 500), (6, 9, 64)])
def test_no_two_sizes_are_equal_by_accident(batch: int, length: int, micro: int) -> None:
    """Tokens, sequences, borders, longest and predictions of the batch of many all differ."""
    many = warmup_batches(DataSettings(batch=batch, length=length), length, micro)[0]
    borders = len(many.cu_seqlens)
    sizes = [len(many), borders, many.max_seqlen, len(many.ids), len(many.masked_labels)]
    assert len(set(sizes)) == len(sizes)
    assert len(many) >= 2


def test_a_single_sequence_where_one_can_come() -> None:
    """A batch of one has one graph; one that is cut may leave a single one; others need none."""

    def counts(batch: int, longest: int, micro: int) -> list[int]:
        settings = DataSettings(batch=batch, length=32)
        return [min(len(one), 2) for one in warmup_batches(settings, longest, micro)]

    assert counts(1, 32, 10**6) == [1]
    assert counts(8, 32, 10**6) == [2]
    assert counts(8, 32, 255) == [2, 1]
    assert counts(8, 64, 256) == [2, 1]


def test_no_batch_of_a_run_needs_another_graph(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first batches, ragged and equal, single and long ones compile nothing more."""
    graphs: list[int] = []

    def count(graph: Any, examples: Any) -> Any:
        graphs.append(len(examples))
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    chosen = assignments(run__compile="true", data__batch=8, run__micro_batch_tokens=128)
    settings = resolve_settings(Overrides(data=store, assignments=chosen), Store.open(store))
    session = Session(settings, Store.open(store))
    made = len(graphs)
    assert made == 2
    session.model.train()

    def run(batch: Batch) -> None:
        piece = to_device(batch, torch.device("cpu"))
        compute_mean_losses(session.compiled_model, piece, [piece], DropoutSeed(torch.tensor(3)))

    stream = build_heldout_stream(session.heldout_split, session.token_facts, settings.data)
    for count_of in (1, 2, 3, 5, 11):
        for first in (0, 4):
            run(stream.batch(first, count_of))
    one = stream.batch(0, 1)
    run(concat_batches([one, one]))
    run(concat_batches([one, one, one, one]))
    longer = settings.data.model_copy(update={"length": 64})
    run(build_heldout_stream(session.heldout_split, session.token_facts, longer).batch(0, 6))
    assert len(graphs) == made
