"""Fine-tuning with torch.compile: when it compiles, the same losses and gradients, few graphs."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bertsmith.bundle import HeadConfig
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.task_models import BertForSequenceClassification
from bertsmith.runtime.device import Machine
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.engine.settings import FinetuneRunSettings
from bertsmith.train.finetuning.objective import FinetuningObjective
from bertsmith.train.finetuning.settings import TaskRunSettings
from tests.model.examples import make_prime_size_config

#: Lengths of the texts. The last of the four batches of an epoch has a single text.
LENGTHS = (23, 5, 41, 2, 13, 7, 19, 3, 29, 11, 17, 31, 37)
CPU = torch.device("cpu")


def make_objective(
    model: BertForSequenceClassification, *, is_compiled: bool
) -> FinetuningObjective:
    """Return an objective on random texts of two classes."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, model.config.vocab_size, length).tolist() for length in LENGTHS]
    inputs = ModelInputs(
        sequences=[[(ids, [0] * len(ids))] for ids in texts],
        locations=[""] * len(texts),
        is_truncated=[False] * len(texts),
        targets=[np.array([number % 2]) for number in range(len(texts))],
    )
    return FinetuningObjective(
        model, HeadConfig("single", ("no", "yes")), TaskSettings(batch_size=4), inputs, {},
        Machine(CPU, "fp32", "padded"),
        micro_batch_tokens=1000, seed=0, is_compiled=is_compiled,
    )  # fmt: skip


def compute_step(objective: FinetuningObjective, batch: list[Any]) -> tuple[float, list[Tensor]]:
    """Return the loss of a batch and the gradients of all weights."""
    objective.model.zero_grad()
    loss = objective.compute_losses(batch[0], batch, DropoutSeed(torch.tensor(5)))["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), [p.grad for p in objective.model.parameters() if p.grad is not None]


def test_compiled_model_has_the_same_losses_and_no_graph_per_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batches of the second epoch, of other lengths, compile nothing.

    In the first epoch, batches of several texts share a graph; a single text needs another one.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = BertForSequenceClassification(make_prime_size_config(attention_dropout=0.0), 2).train()
    counter = CompileCounterWithBackend("aot_eager")
    compile_model = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compile_model(model, backend=counter, **options)
    )
    eager, compiled = (make_objective(model, is_compiled=value) for value in (False, True))
    num_graphs, shapes = [], set()
    for batch in islice(eager.iter_batches(0), 8):
        shapes.add((len(batch[0].input_indices), len(batch[0].packed.ids)))
        loss, gradients = compute_step(eager, batch)
        compiled_loss, compiled_gradients = compute_step(compiled, batch)
        assert compiled_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-5, atol=1e-7)
        num_graphs.append(counter.frame_count)
    assert len(shapes) == 8
    assert 0 < num_graphs[0] == num_graphs[2] < num_graphs[3] == num_graphs[-1]


def test_only_runs_on_a_gpu_are_compiled() -> None:
    """run.compile is false by default, and has no effect on the CPU; only tasks have it."""
    assert not TaskRunSettings().is_compiled("cuda")
    assert TaskRunSettings(compile=True).is_compiled("cuda")
    assert not TaskRunSettings(compile=True).is_compiled("cpu")
    assert "compile" not in FinetuneRunSettings.model_fields
