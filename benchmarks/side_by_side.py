"""Pre-train with Bertsmith and transformers for the same time, and compare validation losses.

Bertsmith trains with its default recipe, and transformers from random initial weights with AdamW,
at the learning rate of that recipe (--set optim.lr=... sets another one for both). With
--same-recipe, Bertsmith also trains with AdamW, and both start from the same weights. In either
case, both have the same examples, batch sizes, masking and dropout rates, precision and shape of
the learning rate schedule.

Each library takes as many steps as fit into its time. They take turns of 20 seconds in one process,
so that other load on the machine affects both. Evaluations do not count as training time.

    python benchmarks/side_by_side.py --store STORE --size mini --minutes 30 --out RESULTS
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from reporting import report
from torch import Tensor, nn
from torch.nn import functional as F

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.train.engine import schedule
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch, to_device
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session

#: Seconds of a turn, after which the other trainer continues.
TURN_SECONDS = 20.0
#: Seconds of the speed measurement before training.
PROBE_SECONDS = 20.0
#: Number of evaluations per run. They do not count as training time.
NUM_EVALUATIONS = 20
NUM_EVAL_SEQUENCES = 512
#: More steps than any run takes.
MANY_STEPS = 10**9
#: Settings that restrict Bertsmith's recipe to features of transformers.
SHARED_RECIPE = ("optim.optimizer=adamw", "schedule.neighbor_bias_steps=0")


class Trainer:
    """Trains a model in turns, and records its losses and training time."""

    def __init__(
        self,
        name: str,
        session: Session,
        step: Callable[[int, float, list[PretrainingMicroBatch]], float],
        evaluate: Callable[[], float],
        reset: Callable[[], None],
    ) -> None:
        """Create a trainer.

        Args:
            name: Name for the results.
            session: Provides batches and settings.
            step: Trains on a batch, given step number and learning rate; returns the loss.
            evaluate: Returns the validation masked-LM loss.
            reset: Restores initial weights and optimizer state.
        """
        self.name = name
        self._session = session
        self._step = step
        self._evaluate = evaluate
        self._reset = reset
        self.records: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.total_steps = 0
        # The number of steps is not known yet.
        self._batches = self._iter_batches(MANY_STEPS)

    def _iter_batches(self, num_steps: int) -> Iterator[list[PretrainingMicroBatch]]:
        """Return an iterator over the batches of a run, which starts at the first one."""
        return self._session.build_objective(StepDuration(num_steps)).iter_batches(0)

    def choose_total_steps(self, minutes: float) -> None:
        """Set ``total_steps`` to the number of steps that fit into ``minutes``.

        The step time is measured first. Then the model and the batches are reset.
        """
        times: list[float] = []
        end = time.perf_counter() + PROBE_SECONDS
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            self._step(0, 0.0, next(self._batches))
            times.append(time.perf_counter() - start)
        # The first step is slower than the others.
        self.total_steps = int(minutes * 60 / np.median(times[1:]))
        self._reset()
        self._batches = self._iter_batches(self.total_steps)

    @property
    def is_finished(self) -> bool:
        """Whether all steps have been taken."""
        return self.num_steps >= self.total_steps

    def run_turn(self) -> None:
        """Train for TURN_SECONDS, and evaluate at regular intervals."""
        settings = self._session.settings.schedule.model_copy(update={"steps": self.total_steps})
        eval_every = max(1, self.total_steps // NUM_EVALUATIONS)
        end = self.seconds + TURN_SECONDS
        while self.seconds < end and not self.is_finished:
            factor = schedule.compute_lr_factor(self.num_steps, settings)
            lr = self._session.settings.optim.lr * factor
            start = time.perf_counter()
            micro_batches = next(self._batches)
            loss = self._step(self.num_steps, lr, micro_batches)
            self.seconds += time.perf_counter() - start
            self.num_tokens += sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)
            self.num_steps += 1
            is_last = self.num_steps >= self.total_steps
            if self.num_steps % eval_every == 0 or is_last or self.num_steps == 1:
                record = {
                    "step": self.num_steps,
                    "tokens": self.num_tokens,
                    "seconds": self.seconds,
                }
                self.records.append(record | {"training": loss, "mlm_loss": self._evaluate()})
                print(self.name, json.dumps(self.records[-1]), flush=True)


def make_bertsmith_trainer(session: Session) -> Trainer:
    """Return a trainer that uses Bertsmith."""
    objective = session.build_objective(StepDuration(1))

    def step(number: int, lr: float, micro_batches: list[PretrainingMicroBatch]) -> float:
        session.model.train()
        result = take_step(
            objective.compute_losses,
            micro_batches,
            session.model,
            session.optimizer,
            session.machine,
            step=number,
            seed=session.settings.run.seed,
            lr=lr,
            max_grad_norm=session.settings.optim.max_grad_norm,
        )
        return result.read().losses["mlm_loss"]

    def evaluate() -> float:
        session.model.eval()
        return objective.evaluate()["mlm_loss"]

    return Trainer("bertsmith", session, step, evaluate, session.reset)


def to_padded_inputs(micro_batch: PretrainingMicroBatch) -> dict[str, Tensor]:
    """Convert a packed batch to padded inputs for transformers."""
    packed = micro_batch.packed
    lengths = packed.cu_seqlens.diff().long()
    shape = (micro_batch.num_sequences, packed.max_seqlen)
    rows = torch.arange(micro_batch.num_sequences).repeat_interleave(lengths)
    inputs = {
        name: torch.zeros(shape, dtype=torch.long)
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    inputs["labels"] = torch.full(shape, -100)
    inputs["input_ids"][rows, packed.positions] = packed.ids
    inputs["token_type_ids"][rows, packed.positions] = packed.segments
    inputs["attention_mask"][rows, packed.positions] = 1
    masked = micro_batch.masked_positions
    inputs["labels"][rows[masked], packed.positions[masked]] = micro_batch.masked_labels
    if micro_batch.nsp_labels is not None:
        inputs["next_sentence_label"] = micro_batch.nsp_labels
    return inputs


def make_transformers_trainer(session: Session) -> Trainer:
    """Return a trainer that uses transformers' BERT with the initial weights of the session."""
    settings = session.settings
    model_class = transformers.BertForMaskedLM
    if settings.data.nsp:
        model_class = transformers.BertForPreTraining
    with tempfile.TemporaryDirectory() as directory:
        bundle.save(Path(directory) / "m", session.model, session.tokenizer, {})
        model = model_class.from_pretrained(Path(directory) / "m", **_get_dropout_rates(settings))
    initial_weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = _build_optimizer(model, settings)

    def reset() -> None:
        nonlocal optimizer
        model.load_state_dict(initial_weights)
        optimizer = _build_optimizer(model, settings)

    def step(_number: int, lr: float, micro_batches: list[PretrainingMicroBatch]) -> float:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = 0.0
        for micro_batch in micro_batches:
            with session.machine.autocast():
                output = model(**to_padded_inputs(micro_batch))
            (output.loss / len(micro_batches)).backward()
            loss += float(output.loss.detach()) / len(micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer("transformers", session, step, partial(_evaluate, model, session), reset)


def _get_dropout_rates(settings: PretrainSettings) -> dict[str, float]:
    """Return the dropout rates of transformers' config; empty unless ``run.dropout`` is set."""
    if settings.run.dropout is None:
        return {}
    rate = settings.run.dropout
    return {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}


def _build_optimizer(model: nn.Module, settings: PretrainSettings) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW with the settings and weight decay groups that Bertsmith uses."""
    optim = settings.optim
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "LayerNorm" in name:
            no_decay.append(parameter)
        else:
            decay.append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": optim.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )


@torch.no_grad()
def _evaluate(model: Any, session: Session) -> float:
    """Return the validation masked-LM loss of transformers' model on the same examples."""
    model.eval()
    stream = build_heldout_stream(session.heldout_split, session.vocabulary, session.settings.data)
    num_sequences = min(session.settings.run.max_eval_sequences, len(stream))
    loss = 0.0
    num_predictions = 0
    for first in range(0, num_sequences, 64):
        batch = stream.batch(first, min(64, num_sequences - first))
        inputs = to_padded_inputs(to_device(batch, torch.device("cpu")))
        is_masked = inputs["labels"] != -100
        arguments = {
            name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")
        }
        with session.machine.autocast():
            hidden = model.bert(**arguments).last_hidden_state[is_masked]
            logits = model.cls.predictions(hidden)
        loss += float(F.cross_entropy(logits.float(), inputs["labels"][is_masked], reduction="sum"))
        num_predictions += int(is_masked.sum())
    return loss / num_predictions


def plot_losses(trainers: list[Trainer], unigram_entropy: float, path: Path) -> None:
    """Plot the validation loss against the tokens and the minutes of training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    colors = {"bertsmith": "#c8501e", "transformers": "#3b6ea8"}
    for axes, key, scale, label in zip(
        panels, ("tokens", "seconds"), (1e6, 60.0), ("million tokens", "minutes"), strict=True
    ):
        for trainer in trainers:
            xs = [record[key] / scale for record in trainer.records]
            ys = [record["mlm_loss"] for record in trainer.records]
            axes.plot(
                xs, ys, marker="o", markersize=3, color=colors[trainer.name], label=trainer.name
            )
        axes.axhline(
            unigram_entropy, color="#444", linestyle="--", linewidth=1, label="unigram entropy"
        )
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation masked-LM loss (nats per prediction)")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def build_sessions(options: argparse.Namespace) -> list[Session]:
    """Return the sessions for Bertsmith and for transformers."""
    store = Store.open(options.store)
    common = [f"run.max_eval_sequences={NUM_EVAL_SEQUENCES}", "run.device=cpu"]
    if options.same_recipe:
        recipes = [[*SHARED_RECIPE], [*SHARED_RECIPE]]
    else:
        recipes = [[], [*SHARED_RECIPE, "run.initialization=random"]]
    return [
        Session(
            resolve_settings(
                Overrides(
                    data=options.store,
                    size=options.size,
                    assignments=[*common, *options.set, *recipe],
                ),
                store,
            ),
            store,
        )
        for recipe in recipes
    ]


def main() -> None:
    """Train both models, and write their losses, a plot and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="setting of both libraries")
    parser.add_argument("--same-recipe", action="store_true", help="train both with AdamW")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sessions = build_sessions(options)
    trainers = [make_bertsmith_trainer(sessions[0]), make_transformers_trainer(sessions[1])]
    for trainer in trainers:
        trainer.choose_total_steps(options.minutes)
        print(
            f"{trainer.name}: {trainer.total_steps} steps in {options.minutes:g} minutes",
            flush=True,
        )
    while not all(trainer.is_finished for trainer in trainers):
        for trainer in trainers:
            trainer.run_turn()
            text = "".join(json.dumps(record) + "\n" for record in trainer.records)
            (options.out / f"{trainer.name}.jsonl").write_text(text, encoding="utf-8")
    objective = sessions[0].build_objective(StepDuration(1))
    unigram_entropy = objective.evaluate()["unigram_entropy"]
    plot_losses(trainers, unigram_entropy, options.out / "curves.png")
    report_results(trainers, unigram_entropy, options.out / "result.json")


def report_results(trainers: list[Trainer], unigram_entropy: float, path: Path) -> None:
    """Report the losses, times and speeds of both trainers."""
    bertsmith_trainer, hf_trainer = trainers
    hf_loss = hf_trainer.records[-1]["mlm_loss"]
    seconds_below = [
        record["seconds"] for record in bertsmith_trainer.records if record["mlm_loss"] <= hf_loss
    ]
    first_seconds_below = seconds_below[0] if seconds_below else float("nan")
    measurements = {
        "final loss, bertsmith": bertsmith_trainer.records[-1]["mlm_loss"],
        "final loss, transformers": hf_loss,
        "unigram entropy": unigram_entropy,
        "minutes, bertsmith": bertsmith_trainer.seconds / 60,
        "minutes, transformers": hf_trainer.seconds / 60,
        "minutes until bertsmith passed the final loss of transformers": first_seconds_below / 60,
        "steps, bertsmith": bertsmith_trainer.total_steps,
        "steps, transformers": hf_trainer.total_steps,
    }
    speeds = [trainer.num_tokens / trainer.seconds for trainer in trainers]
    measurements |= {
        "tokens per second, bertsmith": speeds[0],
        "tokens per second, transformers": speeds[1],
    }
    report("side_by_side", {"speed": speeds[0] / speeds[1]}, measurements, path)


if __name__ == "__main__":
    main()
