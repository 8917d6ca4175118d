"""A model can memorize one batch."""

from pathlib import Path

from bertsmith.data.store import Store
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import make_assignments, make_store

STEPS = 400


def test_one_batch_is_memorized(tmp_path: Path) -> None:
    """After 400 steps on one batch, the masked LM loss and the NSP loss are near 0.

    They start near ln V and ln 2. The text is random, so they can only fall by memorizing it.
    """
    store = Store.open(make_store(tmp_path, num_documents=40))
    options = make_assignments(
        model__width=48,
        model__feed_forward=96,
        model__dropout=0,
        data__batch_size=16,
        data__max_seqlen=24,
    )
    settings = resolve_settings(Overrides(data=store.path, assignments=options), store)
    session = Session(settings, store)
    objective = session.build_objective(StepDuration(1))
    (micro_batches,) = objective.iter_batches(0)
    session.model.train()
    losses = []
    for step in range(STEPS):
        result = take_step(
            objective.compute_losses,
            micro_batches,
            session.model,
            session.optimizer,
            session.machine,
            step=step,
            seed=0,
            lr=4e-3,
            max_grad_norm=1.0,
        )
        losses.append(result.read().losses)
    # The vocabulary has 66 tokens, and ln 66 is 4.2.
    assert 3.5 < losses[0]["mlm_loss"] < 5.0
    assert 0.5 < losses[0]["nsp_loss"] < 1.0
    assert losses[-1]["mlm_loss"] < 0.02
    assert losses[-1]["nsp_loss"] < 0.02
