"""A batch in pieces is the batch: the same losses and the same gradients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.data.store import Store
from bertsmith.model.dropout import Noise
from bertsmith.train.pieces import Piece, cut, ranges
from bertsmith.train.resolve import Wishes, resolve
from bertsmith.train.schedule import Phase
from bertsmith.train.session import Session
from bertsmith.train.step import take_step
from tests.train.conftest import assignments


@pytest.fixture(scope="module")
def session(store: Path) -> Session:
    """A session without dropout, with batches of 24 sequences."""
    chosen = assignments(
        data__batch=24, model__dropout=0, model__attention_dropout=0, model__init_range=0.3
    )
    return Session(
        resolve(Wishes(data=store, assignments=chosen), Store.open(store)), Store.open(store)
    )


def _gradients(session: Session, most_tokens: int) -> tuple[int, Any, Any]:
    """Return the number of pieces, the loss terms and the gradients of the first batch."""
    run = session.settings.run.model_copy(update={"micro_tokens": most_tokens})
    session.settings = session.settings.model_copy(update={"run": run})
    work = session.work([Phase(0, 1, 32)])
    (whole,) = work.pieces(0)
    session.model.zero_grad()
    session.model.train()
    sums: dict[str, float] = {}
    for piece in whole:
        terms = work.losses(piece, whole, Noise(torch.tensor(0)))
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
    stream = session.work([Phase(0, 1, 32)])._stream
    batch = stream.batch(0, 8)
    for most in (1, 40, 64, 97, len(batch.ids) - 1, len(batch.ids)):
        pieces = cut(batch, most)
        assert sum(len(piece) for piece in pieces) == len(batch)
        assert [i for piece in pieces for i in piece.ids.tolist()] == batch.ids.tolist()
        assert all(len(piece.ids) <= most or len(piece) == 1 for piece in pieces)
        labels = [label for piece in pieces for label in piece.masked_labels.tolist()]
        assert labels == batch.masked_labels.tolist()
        # No two neighbours would fit together: the pieces are as few as in order they can be.
        sizes = [len(piece.ids) for piece in pieces]
        assert all(a + int(p.boundaries[1]) > most for a, p in zip(sizes, pieces[1:], strict=False))


def test_pieces_at_once_are_of_like_size() -> None:
    """From 512 tokens a piece on; together they have at most the limit's tokens."""
    chance = np.random.default_rng(0)
    for _ in range(100):
        sizes = chance.integers(3, 129, 64).tolist()
        for most in (sum(sizes) * 2, sum(sizes), 2000, 1000, 300):
            found = ranges(sizes, most, 2)
            assert [one for own in found for one in own] == list(range(64))
            tokens = [sum(sizes[own.start : own.stop]) for own in found]
            assert max(tokens) <= most // 2
            if most == sum(sizes) * 2:
                assert len(tokens) == 2
            if most >= 1000:
                assert len(tokens) % 2 == 0
                assert max(tokens) - min(tokens) <= 2 * max(sizes)
    assert [len(own) for own in ranges([128] * 144, 16384, 2)] == [36] * 4
    assert ranges([511, 512], 10**6, 2) == [range(2)]
    assert ranges([512, 512, 3], 10**6, 2) == [range(1), range(1, 3)]
    assert ranges([2000, 3], 10**6, 2) == [range(1), range(1, 2)]
    assert ranges([2000], 10**6, 2) == [range(1)]
    assert ranges([600, 700, 800], 100, 2) == [range(1), range(1, 2), range(2, 3)]


def _at_once(store: Path, together: int, **changes: Any) -> tuple[int, list[torch.Tensor]]:
    """Return how many pieces two steps have, and the weights after them."""
    chosen = assignments(data__batch=64, model__init_range=0.3, run__threads=2, **changes)
    opened = Store.open(store)
    session = Session(resolve(Wishes(data=store, assignments=chosen), opened), opened)
    work = session.work([Phase(0, 9, 32)])
    batches, count = work.pieces(0), 0
    assert work.together == 2
    session.model.train()
    for step in range(2):
        whole = next(batches)
        take_step(work.losses, whole, session.model, session.optimizer, session.machine,
                  step=step, seed=0, rate=1e-3, clip=1.0, together=together)  # fmt: skip
        count += len(whole)
    return count, [own.detach().clone() for own in session.model.parameters()]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads of PyTorch's, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("limit", [16384, 1024])
def test_two_pieces_at_once_are_one_after_the_other(store: Path, limit: int) -> None:
    """The same weights, dropout and all; and the same to the bit each time."""
    count, alone = _at_once(store, 1, run__micro_tokens=limit)
    assert count == 4 if limit == 16384 else count >= 8
    once, again = (_at_once(store, 2, run__micro_tokens=limit)[1] for _ in range(2))
    for expected, first, second in zip(alone, once, again, strict=True):
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(first, second)


@pytest.mark.usefixtures("two_threads")
def test_what_is_one_after_the_other_stays_so(store: Path) -> None:
    """Batch norm's statistics, a compiled graph, a single thread: one piece at a time."""
    opened = Store.open(store)
    for chosen, together in (({}, 2), ({"model__norm": "batch"}, 1), ({"run__threads": 1}, 1),
                             ({"run__threads": 3}, 1), ({"run__threads": 4}, 2)):  # fmt: skip
        own = {"run__threads": 2} | chosen
        settings = resolve(Wishes(data=store, assignments=assignments(**own)), opened)
        session = Session(settings, opened)
        assert session.work([Phase(0, 1, 32)]).together == together
    session.compute = nn.Identity()
    torch.set_num_threads(2)
    assert session.work([Phase(0, 1, 32)]).together == 1


def test_the_terms_are_means_over_the_whole_batch(session: Session) -> None:
    """With one piece of many, a term is a part: the parts add up to the mean loss of all words."""
    work = session.work([Phase(0, 1, 32)])
    (whole,) = work.pieces(0)
    session.model.eval()
    with torch.no_grad():
        parts: list[Any] = [work.losses(piece, whole, Noise(torch.tensor(0))) for piece in whole]
        words, total = 0, 0.0
        for piece in whole:
            assert isinstance(piece, Piece)
            losses = session.model(
                piece.packed, piece.masked_positions, piece.masked_labels, piece.not_next
            )
            words += len(piece.masked_labels)
            total += float(losses.masked)
    assert sum(float(part["masked_lm"]) for part in parts) == pytest.approx(total / words)
