"""Evaluations of runs with a second phase, at the sequence lengths of both phases."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.train.engine.metrics_log import TIMING_KEYS, read_metrics
from bertsmith.train.pretraining import evaluation, speed
from bertsmith.train.pretraining.evaluation import build_heldout_stream, evaluate
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import TrainFunction, copy_interrupted_run, make_assignments

#: The second phase is the last half of 8 steps, with sequences of 48 instead of 32 tokens.
TWO_PHASES: dict[str, Any] = {
    "schedule__phase2_max_seqlen": 48,
    "schedule__phase2_fraction": 0.5,
    "run__eval_every": 2,
    "checkpoint__steps": 2,
    "checkpoint__keep": 9,
    "checkpoint__keep_optimizer": "true",
}


def read_heldout_lines(run: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run without times."""
    return [
        {name: value for name, value in line.items() if name not in TIMING_KEYS}
        for line in read_metrics(run)
        if line["kind"] == "heldout"
    ]


def build_session(store: Path, **changes: Any) -> Session:
    """Return a session of the small model."""
    opened_store = Store.open(store)
    overrides = Overrides(data=store, assignments=make_assignments(**changes))
    return Session(resolve_settings(overrides, opened_store), opened_store)


def test_second_phase_is_evaluated_at_its_length(
    train: TrainFunction, store: Path, tmp_path: Path
) -> None:
    """Each evaluation has the loss at both lengths; a resumed run has the same evaluations."""
    result = train("run", steps=8, **TWO_PHASES)
    assert result.model is not None
    lines = read_heldout_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    # 8 sequences of 32 tokens have about as many tokens as 5 of 48.
    assert [(line["num_sequences"], line["phase2_num_sequences"]) for line in lines] == [(8, 5)] * 4
    session = build_session(store, **TWO_PHASES)
    data = session.settings.data
    model = bundle.load(result.model).model.eval()
    for prefix, max_seqlen, num_sequences in (("", 32, 8), ("phase2_", 48, 5)):
        settings = data.model_copy(update={"max_seqlen": max_seqlen})
        stream = build_heldout_stream(session.heldout_split, session.vocabulary, settings)
        batch = stream.batch(0, num_sequences)
        assert (max_seqlen == 48) == (batch.max_seqlen > 32)
        expected = evaluate(model, stream, num_sequences, session.machine).to_metrics()
        for name in ("mlm_loss", "mlm_accuracy"):
            assert lines[-1][prefix + name] == pytest.approx(expected[name], rel=1e-5)
    for last_step in (2, 6):
        run = tmp_path / f"resumed-{last_step}"
        copy_interrupted_run(tmp_path / "run", run, last_step)
        train(run.name, steps=8, **TWO_PHASES)
        assert read_heldout_lines(run) == lines
    # An evaluation after the last step, because the log is missing.
    copy_interrupted_run(tmp_path / "run", tmp_path / "finished", 8)
    (tmp_path / "finished" / "metrics.jsonl").unlink()
    train("finished", steps=8, **TWO_PHASES)
    assert read_heldout_lines(tmp_path / "finished") == lines[-1:]
    assert "| phase2_mlm_loss | " in (result.model / "README.md").read_text()


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"schedule__phase2_max_seqlen": 32},
        {"schedule__phase2_max_seqlen": 48, "schedule__phase2_fraction": 0.0},
    ],
)
def test_run_with_one_length_is_evaluated_at_one_length(
    store: Path, schedule: dict[str, Any]
) -> None:
    """Without a second phase of longer sequences, there are no metrics for it."""
    session = build_session(store, **schedule)
    evaluator = session.build_evaluator()
    assert "phase2_mlm_loss" not in evaluator.evaluate(session.model.eval(), session.machine)


def test_estimated_time_includes_the_second_length(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of an evaluation, which limits it in a time budget, is that of both lengths."""
    session = build_session(store, **TWO_PHASES)
    evaluated: list[tuple[bool, int]] = []

    def record(_model: Any, stream: Any, max_sequences: int, *arguments: Any) -> Any:
        evaluated.append((stream.batch(0, 8).max_seqlen > 32, max_sequences))
        return evaluate(_model, stream, max_sequences, *arguments)

    monkeypatch.setattr(evaluation, "evaluate", record)
    _, num_sequences = speed.time_evaluation(session)
    assert num_sequences == 8
    assert set(evaluated) == {(False, 8), (True, 5)}
