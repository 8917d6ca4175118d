"""Gradient accumulation: several micro-batches give the losses and gradients of one batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith.data.store import Store
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import split_batch
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import make_assignments


@pytest.fixture(scope="module")
def session(store: Path) -> Session:
    """A session without dropout, with batches of 24 sequences."""
    options = make_assignments(
        data__batch_size=24, model__dropout=0, model__attention_dropout=0, model__init_range=0.3
    )
    settings = resolve_settings(Overrides(data=store, assignments=options), Store.open(store))
    return Session(settings, Store.open(store))


def _compute_gradients(
    session: Session, micro_batch_tokens: int
) -> tuple[int, dict[str, float], dict[str, torch.Tensor]]:
    """Return the number of micro-batches, the losses and the gradients of the first batch."""
    run = session.settings.run.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    session.settings = session.settings.model_copy(update={"run": run})
    objective = session.build_objective(StepDuration(1))
    (micro_batches,) = objective.iter_batches(0)
    session.model.zero_grad()
    session.model.train()
    totals: dict[str, float] = {}
    for micro_batch in micro_batches:
        dropout_seed = DropoutSeed(torch.tensor(0))
        losses = objective.compute_losses(micro_batch, micro_batches, dropout_seed)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in losses.items():
            totals[name] = totals.get(name, 0.0) + float(value.detach())
    gradients = {
        name: p.grad.clone() for name, p in session.model.named_parameters() if p.grad is not None
    }
    return len(micro_batches), totals, gradients


@pytest.mark.parametrize("micro_batch_tokens", [64, 100, 333])
def test_micro_batches_equal_one_batch(session: Session, micro_batch_tokens: int) -> None:
    """Split and unsplit batches have the same losses and gradients.

    Micro-batches have different numbers of predictions, so averaging their means would be wrong.
    """
    num_micro_batches, losses, gradients = _compute_gradients(session, 10**6)
    assert num_micro_batches == 1
    num_micro_batches, accumulated_losses, accumulated = _compute_gradients(
        session, micro_batch_tokens
    )
    assert num_micro_batches >= 2
    for name, value in losses.items():
        assert accumulated_losses[name] == pytest.approx(value, rel=1e-6), name
    assert gradients.keys() == accumulated.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-6)


def test_split_batch_keeps_every_sequence_once(session: Session) -> None:
    """Parts have at most ``max_tokens`` tokens or one sequence, and add up to the batch."""
    stream = build_heldout_stream(session.heldout_split, session.vocabulary, session.settings.data)
    batch = stream.batch(0, 8)
    for max_tokens in (1, 40, 64, 97, len(batch.ids) - 1, len(batch.ids)):
        parts = split_batch(batch, max_tokens)
        assert sum(len(part) for part in parts) == len(batch)
        token_ids = [token_id for part in parts for token_id in part.ids.tolist()]
        assert token_ids == batch.ids.tolist()
        assert all(len(part.ids) <= max_tokens or len(part) == 1 for part in parts)
        labels = [label for part in parts for label in part.masked_labels.tolist()]
        assert labels == batch.masked_labels.tolist()
        # The split is greedy: no part has room for the first sequence of the next one.
        sizes = [len(part.ids) for part in parts]
        for size, next_part in zip(sizes, parts[1:], strict=False):
            assert size + int(next_part.cu_seqlens[1]) > max_tokens


def test_split_for_processes_is_balanced_and_complete(session: Session) -> None:
    """Every process has a part, and their numbers of tokens differ by at most a few sequences."""
    stream = build_heldout_stream(session.heldout_split, session.vocabulary, session.settings.data)
    batch = stream.batch(0, 16)
    longest = int(np.diff(batch.cu_seqlens).max())
    for num_processes in (1, 2, 3, 5, 16, 20):
        for max_tokens in (40, 97, 200, 10**6):
            parts = split_batch(batch, max_tokens, num_processes)
            token_ids = [token_id for part in parts for token_id in part.ids.tolist()]
            assert token_ids == batch.ids.tolist()
            assert all(len(part.ids) <= max_tokens or len(part) == 1 for part in parts)
            assert len(parts) >= min(num_processes, len(batch))
            shares = [
                sum(len(part.ids) for part in parts[rank::num_processes])
                for rank in range(num_processes)
            ]
            assert max(shares) <= 1.2 * len(batch.ids) / num_processes + 2 * longest


def test_balanced_micro_batches_do_not_depend_on_the_number_of_processes(session: Session) -> None:
    """Parts that divide evenly among the processes are those of a single process."""
    stream = build_heldout_stream(session.heldout_split, session.vocabulary, session.settings.data)
    batch = stream.batch(0, 16)
    single = split_batch(batch, 40)
    assert len(single) >= 12
    parallel = split_batch(batch, 40, 2)
    assert [part.ids.tolist() for part in parallel] == [part.ids.tolist() for part in single]


def test_losses_of_micro_batches_add_up_to_the_batch_mean(session: Session) -> None:
    """The sum of the micro-batches' masked LM losses is the mean over all predictions."""
    objective = session.build_objective(StepDuration(1))
    (micro_batches,) = objective.iter_batches(0)
    session.model.eval()
    with torch.no_grad():
        contributions: list[dict[str, Any]] = [
            objective.compute_losses(micro_batch, micro_batches, DropoutSeed(torch.tensor(0)))
            for micro_batch in micro_batches
        ]
        num_predictions = 0
        loss_sum = 0.0
        for micro_batch in micro_batches:
            losses = session.model(
                micro_batch.packed,
                micro_batch.masked_positions,
                micro_batch.masked_labels,
                micro_batch.nsp_labels,
            )
            num_predictions += len(micro_batch.masked_labels)
            loss_sum += float(losses.mlm_loss)
    mean_loss = sum(float(losses["mlm_loss"]) for losses in contributions)
    assert mean_loss == pytest.approx(loss_sum / num_predictions)
