"""One optimizer step: the seeds of dropout, and results that are read late."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import DivergedError
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.train.engine import step as engine_step
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import PendingStep, StepResult, derive_dropout_seed, take_step


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_each_micro_batch_seeds_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each micro-batch, the generator of the run's device gets the micro-batch's seed."""
    seeded: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(engine_step, "seed_dropout", lambda *arguments: seeded.append(arguments))
    model = nn.Linear(3, 2)
    seeds: list[int] = []

    def compute_loss(_: Any, __: list[Any], dropout_seed: DropoutSeed) -> dict[str, Tensor]:
        # The seed is set before the forward pass.
        assert len(seeded) == len(seeds) + 1
        seeds.append(int(dropout_seed.seed))
        return {"loss": model(torch.ones(1, 3)).sum()}

    machine = Machine(torch.device("cuda:1"), "fp32", "padded")
    optimizer = build_optimizer(model, OptimSettings())
    take_step(
        compute_loss,
        [None, None],
        model,
        optimizer,
        machine,
        step=5,
        seed=3,
        lr=0.1,
        max_grad_norm=1.0,
    )
    assert seeds == [derive_dropout_seed(3, 5, 0), derive_dropout_seed(3, 5, 1)]
    assert seeded == [(torch.device("cuda:1"), seed) for seed in seeds]


def _take_steps(
    factors: list[float],
    monkeypatch: pytest.MonkeyPatch,
    describe_batch: Callable[[int], str] = "page {}".format,
    *,
    is_pending: bool,
) -> tuple[nn.Linear, Any, list[PendingStep]]:
    """Take steps whose losses have these factors; return the model, optimizer and steps."""
    monkeypatch.setattr(engine_step, "can_skip_step", lambda *_: is_pending)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimSettings())
    steps: list[PendingStep] = []
    for step, factor in enumerate(factors):
        steps.append(
            take_step(
                lambda factor, *_: {"loss": model(torch.ones(1, 3)).square().sum() * factor},
                [factor],
                model,
                optimizer,
                Machine(torch.device("cpu"), "fp32", "padded"),
                step=step,
                seed=3,
                lr=0.1,
                max_grad_norm=1.0,
                describe_batch=describe_batch,
                grad_norm_groups={"bias": [model.bias]},
                previous=steps[-1] if steps else None,
            )
        )
    return model, optimizer, steps


def test_steps_that_are_read_late_change_nothing_after_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If nothing is read, no step after a non-finite loss changes the weights or moments."""
    expected, expected_optimizer, _ = _take_steps([1.0, 0.5], monkeypatch, is_pending=True)
    model, optimizer, steps = _take_steps(
        [1.0, 0.5, math.nan, 1.0, math.inf, 1.0], monkeypatch, is_pending=True
    )
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        value = optimizer.state[model.weight][name]
        assert torch.equal(value, expected_optimizer.state[expected.weight][name])
    assert [bool(step.has_diverged) for step in steps] == [False, False, True, True, True, True]
    assert steps[1].read().loss > 0.0
    with pytest.raises(DivergedError, match=r"in step 3: the loss is nan.*page 2 \(seed 3\)"):
        steps[2].read()


def test_steps_that_are_read_late_have_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without divergence, weights and results equal those of steps that are read immediately."""
    expected, _, expected_steps = _take_steps([1.0, 0.5, 2.0], monkeypatch, is_pending=False)
    model, _, steps = _take_steps([1.0, 0.5, 2.0], monkeypatch, is_pending=True)
    assert torch.equal(model.weight, expected.weight)
    assert [step.read() for step in steps] == [step.read() for step in expected_steps]
    assert set(steps[0].read().grad_norms) == {"bias"}


def test_result_on_a_gpu_is_copied_before_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is started with the step, on its stream, and only reading waits for it."""
    log: list[str] = []

    class CudaTensor(Tensor):
        device: Any = torch.device("cuda:1")

        def to(self, device: str, *, non_blocking: bool) -> Tensor:  # type: ignore[override]
            log.append(f"copy to {device}, {non_blocking=}")
            return self.as_subclass(Tensor)

    class Event:
        def record(self, stream: str) -> None:
            log.append(f"record on {stream}")

        def synchronize(self) -> None:
            log.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    values = torch.tensor([2.5, 0.5]).as_subclass(CudaTensor)
    pending = PendingStep(values, ["loss"], [], str, None)
    started = ["copy to cpu, non_blocking=True", "record on stream of cuda:1"]
    assert log == started
    assert pending.read() == StepResult({"loss": 2.5}, 0.5)
    assert log == [*started, "wait"]


@pytest.mark.parametrize("is_pending", [False, True])
def test_only_the_batch_of_a_diverged_step_is_described(
    monkeypatch: pytest.MonkeyPatch, is_pending: bool
) -> None:
    """Batches are described for the error message only, because that may take long."""
    described: list[int] = []

    def describe_batch(step: int) -> str:
        described.append(step)
        return f"page {step}"

    def read_last_step(factors: list[float]) -> StepResult:
        _, _, steps = _take_steps(factors, monkeypatch, describe_batch, is_pending=is_pending)
        return steps[-1].read()

    assert read_last_step([1.0, 0.5]).loss > 0.0
    assert described == []
    with pytest.raises(DivergedError, match="page 1"):
        read_last_step([1.0, math.nan])
    assert described == [1]
