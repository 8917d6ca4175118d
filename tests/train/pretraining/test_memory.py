"""A model can learn: one batch, by heart."""

from pathlib import Path

from bertsmith.data.store import Store
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import assignments, make_store

STEPS = 400


def test_one_batch_is_memorized(tmp_path: Path) -> None:
    """After 400 steps on one batch of random words both losses are nearly 0, from ln V and ln 2.

    Nothing but memory helps here: the words follow no rule.
    """
    store = Store.open(make_store(tmp_path, documents=40))
    chosen = assignments(
        model__width=48, model__feed_forward=96, model__dropout=0, data__batch=16, data__length=24
    )
    settings = resolve_settings(Overrides(data=store.path, assignments=chosen), store)
    session = Session(settings, store)
    work = session.build_objective([Phase(0, 1, 24)])
    (whole,) = work.iter_batches(0)
    session.model.train()
    terms = []
    for step in range(STEPS):
        result = take_step(
            work.compute_losses, whole, session.model, session.optimizer, session.machine,
            step=step, seed=0, lr=4e-3, max_grad_norm=1.0,
        )  # fmt: skip
        terms.append(result.losses)
    assert 3.5 < terms[0]["masked_lm"] < 5.0
    assert 0.5 < terms[0]["next_sentence"] < 1.0
    assert terms[-1]["masked_lm"] < 0.02
    assert terms[-1]["next_sentence"] < 0.02
