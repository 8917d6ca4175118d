"""A batch in pieces is the batch: the same losses and the same gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.data.store import Store
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.pretraining.micro_batches import MicroBatch, split_batch
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import assignments


@pytest.fixture(scope="module")
def session(store: Path) -> Session:
    """A session without dropout, with batches of 24 sequences."""
    chosen = assignments(
        data__batch=24, model__dropout=0, model__attention_dropout=0, model__init_range=0.3
    )
    return Session(
        resolve_settings(Overrides(data=store, assignments=chosen), Store.open(store)),
        Store.open(store),
    )


def _gradients(session: Session, most_tokens: int) -> tuple[int, Any, Any]:
    """Return the number of pieces, the loss terms and the gradients of the first batch."""
    run = session.settings.run.model_copy(update={"micro_batch_tokens": most_tokens})
    session.settings = session.settings.model_copy(update={"run": run})
    work = session.build_objective([Phase(0, 1, 32)])
    (whole,) = work.iter_batches(0)
    session.model.zero_grad()
    session.model.train()
    sums: dict[str, float] = {}
    for piece in whole:
        terms = work.compute_losses(piece, whole, DropoutSeed(torch.tensor(0)))
        torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    named = session.model.named_parameters()
    return len(whole), sums, {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("most_tokens", [64, 100, 333])
def test_micro_batches_equal_one_batch(session: Session, most_tokens: int) -> None:
    """Whatever its cuts, a ragged batch has the same two losses and gradients, to 1e-6.

    Predictions and sequences are unlike in number from piece to piece, so a mean of means fails.
    """
    one, terms, gradients = _gradients(session, 10**6)
    assert one == 1
    pieces, sums, accumulated = _gradients(session, most_tokens)
    assert pieces >= 2
    for name, value in terms.items():
        assert sums[name] == pytest.approx(value, rel=1e-6), name
    assert gradients.keys() == accumulated.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-6)


def test_cuts_keep_every_sequence_once(session: Session, store: Path) -> None:
    """Pieces have at most so many tokens (or one sequence), and together they are the batch."""
    stream = session.build_objective([Phase(0, 1, 32)])._stream
    batch = stream.batch(0, 8)
    for most in (1, 40, 64, 97, len(batch.ids) - 1, len(batch.ids)):
        pieces = split_batch(batch, most)
        assert sum(len(piece) for piece in pieces) == len(batch)
        assert [i for piece in pieces for i in piece.ids.tolist()] == batch.ids.tolist()
        assert all(len(piece.ids) <= most or len(piece) == 1 for piece in pieces)
        labels = [label for piece in pieces for label in piece.masked_labels.tolist()]
        assert labels == batch.masked_labels.tolist()
        # No two neighbours would fit together: the pieces are as few as in order they can be.
        sizes = [len(piece.ids) for piece in pieces]
        assert all(a + int(p.cu_seqlens[1]) > most for a, p in zip(sizes, pieces[1:], strict=False))


def test_the_terms_are_means_over_the_whole_batch(session: Session) -> None:
    """With one piece of many, a term is a part: the parts add up to the mean loss of all words."""
    work = session.build_objective([Phase(0, 1, 32)])
    (whole,) = work.iter_batches(0)
    session.model.eval()
    with torch.no_grad():
        parts: list[Any] = [
            work.compute_losses(piece, whole, DropoutSeed(torch.tensor(0))) for piece in whole
        ]
        words, total = 0, 0.0
        for piece in whole:
            assert isinstance(piece, MicroBatch)
            losses = session.model(
                piece.packed, piece.masked_positions, piece.masked_labels, piece.nsp_labels
            )
            words += len(piece.masked_labels)
            total += float(losses.masked)
    assert sum(float(part["masked_lm"]) for part in parts) == pytest.approx(total / words)
