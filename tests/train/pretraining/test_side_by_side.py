"""benchmarks/side_by_side.py: both libraries train on the same batches with the same settings."""

import argparse
import sys
from pathlib import Path

import pytest
import side_by_side


def _make_options(store: Path, *, same_recipe: bool, **settings: str) -> argparse.Namespace:
    assignments = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    assignments += ["run.threads=1", "data.batch_size=4", "run.max_eval_sequences=8"]
    return argparse.Namespace(store=store, size="tiny", set=assignments, same_recipe=same_recipe)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("nsp", ["false", "true"])
def test_same_recipe_has_the_same_losses(store: Path, nsp: str, precision: str) -> None:
    """Both libraries compute the same losses of the first batch and of the held-out text."""
    options = _make_options(store, same_recipe=True, data__nsp=nsp, run__precision=precision)
    first_session, second_session = side_by_side.build_sessions(options)
    first = side_by_side.make_bertsmith_trainer(first_session)
    second = side_by_side.make_transformers_trainer(second_session)
    tolerance = 1e-4 if precision == "fp32" else 0.02
    assert first._evaluate() == pytest.approx(second._evaluate(), abs=tolerance)
    first_loss, second_loss = (
        trainer._step(0, 0.0, next(trainer._batches)) for trainer in (first, second)
    )
    # The loss of transformers includes that of next-sentence prediction.
    assert (first_loss == pytest.approx(second_loss, abs=tolerance)) == (nsp == "false")


def test_transformers_has_adamw_and_random_weights(store: Path) -> None:
    """Without --same-recipe, only Bertsmith has Muon, an initialization and an attention bias."""
    options = _make_options(store, same_recipe=False)
    first, second = (session.settings for session in side_by_side.build_sessions(options))
    assert first.optim.optimizer == "muon"
    assert first.schedule.neighbor_bias_steps > 0
    assert second.optim.optimizer == "adamw"
    assert second.run.initialization == "random"
    assert second.schedule.neighbor_bias_steps == 0
    assert first.data == second.data
    assert first.run.dropout == second.run.dropout == 0.0


def test_both_trainers_finish_their_time(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes the losses of both libraries, a summary and a plot."""
    monkeypatch.setattr(side_by_side, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(side_by_side, "PROBE_SECONDS", 0.0)
    arguments = ["--store", str(store), "--size", "tiny", "--minutes", "0.01"]
    arguments += ["--set", "data.batch_size=4", "--set", "run.max_eval_sequences=8"]
    arguments += ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *arguments])
    side_by_side.main()
    names = ["bertsmith.jsonl", "curves.png", "result.json", "transformers.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
