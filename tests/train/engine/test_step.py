"""One optimizer step: the seeds of dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.train.engine import step as engine_step
from bertsmith.train.engine.optimizer import build_optimizer
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import derive_dropout_seed, take_step


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
