"""Pre-train beside transformers for the same minutes: held-out loss against tokens and time.

Both start from the same weights and take the same examples in the same batches, with the same
optimizer, the same shape of schedule and the same dropout; each has its own steps for its own
minutes. They train in one process, in turns of some seconds, so that whatever else the machine
does falls on both. Only training counts as time. It never changes the recipe for either.

    python benchmarks/side_by_side.py --store STORE --size mini --minutes 30 --out RESULTS
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
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
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.engine.step import take_step
from bertsmith.train.pretraining.evaluation import build_heldout_stream
from bertsmith.train.pretraining.micro_batches import MicroBatch, to_device
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session

#: Seconds of one turn, and of the probe that fixes each one's number of steps.
TURN, PROBE = 20.0, 20.0
#: Evaluations over the run of each, not counted in its time.
EVALUATIONS = 20
HELD_OUT = 512


class Contestant:
    """One of the two: takes steps on request, keeps its own clock and its own schedule."""

    def __init__(
        self,
        name: str,
        session: Session,
        step: Callable[[int, float, list[MicroBatch]], float],
        evaluate: Callable[[], float],
        reset: Callable[[], None],
    ) -> None:
        """``step`` takes (number, learning rate, batch) and returns the masked-LM loss."""
        self.name, self._session = name, session
        self._step, self._evaluate, self._reset = step, evaluate, reset
        self.lines: list[dict[str, Any]] = []
        self.seconds, self.done, self.tokens, self.total = 0.0, 0, 0, 0
        self._batches = self._stream()

    def _stream(self) -> Iterator[list[MicroBatch]]:
        length = self._session.settings.data.length
        return self._session.build_objective([Phase(0, 10**9, length)]).iter_batches(0)

    def probe(self, minutes: float) -> None:
        """Time some steps, fix the number that fits into the minutes, and start anew."""
        times: list[float] = []
        end = time.perf_counter() + PROBE
        while time.perf_counter() < end or len(times) < 3:
            began = time.perf_counter()
            self._step(0, 0.0, next(self._batches))
            times.append(time.perf_counter() - began)
        self.total = int(minutes * 60 / np.median(times[1:]))
        self._reset()
        self._batches = self._stream()

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.total

    def turn(self) -> None:
        """Train for a turn, evaluating when it is time."""
        timing = self._session.settings.schedule.model_copy(update={"steps": self.total})
        every, end = max(1, self.total // EVALUATIONS), self.seconds + TURN
        while self.seconds < end and not self.finished:
            rate = self._session.settings.optim.lr * schedule.lr_factor(self.done, timing)
            began = time.perf_counter()
            whole = next(self._batches)
            loss = self._step(self.done, rate, whole)
            self.seconds += time.perf_counter() - began
            self.tokens += sum(len(piece.packed.ids) for piece in whole)
            self.done += 1
            if self.done % every == 0 or self.finished or self.done == 1:
                line = {"step": self.done, "tokens": self.tokens, "seconds": self.seconds}
                self.lines.append(line | {"training": loss, "masked_lm": self._evaluate()})
                print(self.name, json.dumps(self.lines[-1]), flush=True)


def ours(session: Session) -> Contestant:
    """Return Bertsmith: its own step and its own evaluation."""
    work = session.build_objective([Phase(0, 1, session.settings.data.length)])

    def step(number: int, rate: float, whole: list[MicroBatch]) -> float:
        session.model.train()
        result = take_step(
            work.compute_losses, whole, session.model, session.optimizer, session.machine,
            step=number, seed=session.settings.run.seed, lr=rate,
            max_grad_norm=session.settings.optim.max_grad_norm,
        )  # fmt: skip
        return result.losses["masked_lm"]

    def evaluate() -> float:
        session.model.eval()
        return work.evaluate()["masked_lm"]

    return Contestant("bertsmith", session, step, evaluate, session.reset)


def dense(piece: MicroBatch) -> dict[str, Tensor]:
    """Return a packed batch as the padded tensors that transformers takes."""
    packed = piece.packed
    lengths = packed.cu_seqlens.diff().long()
    shape = (piece.num_sequences, packed.max_seqlen)
    rows = torch.arange(piece.num_sequences).repeat_interleave(lengths)
    result = {name: torch.zeros(shape, dtype=torch.long) for name in
              ("input_ids", "token_type_ids", "attention_mask")}  # fmt: skip
    result["labels"] = torch.full(shape, -100)
    result["input_ids"][rows, packed.positions] = packed.ids
    result["token_type_ids"][rows, packed.positions] = packed.segments
    result["attention_mask"][rows, packed.positions] = 1
    at = piece.masked_positions
    result["labels"][rows[at], packed.positions[at]] = piece.masked_labels
    if piece.nsp_labels is not None:
        result["next_sentence_label"] = piece.nsp_labels
    return result


def theirs(session: Session) -> Contestant:
    """Return transformers' BertForPreTraining in a plain loop, from the same first weights."""
    settings = session.settings
    with tempfile.TemporaryDirectory() as folder:
        bundle.save(Path(folder) / "m", session.model, session.tokenizer, {})
        model = transformers.BertForPreTraining.from_pretrained(Path(folder) / "m")
    first = {name: value.clone() for name, value in model.state_dict().items()}
    adam: list[torch.optim.Optimizer] = []

    def reset() -> None:
        model.load_state_dict(first)
        adam[:] = [_adam(model, settings)]

    def step(_number: int, rate: float, whole: list[MicroBatch]) -> float:
        model.train()
        for group in adam[0].param_groups:
            group["lr"] = rate
        loss = 0.0
        for piece in whole:
            output = model(**dense(piece))
            (output.loss / len(whole)).backward()
            loss += float(output.loss.detach()) / len(whole)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.max_grad_norm)
        adam[0].step()
        adam[0].zero_grad()
        return loss

    reset()
    return Contestant("transformers", session, step, lambda: _heldout(model, session), reset)


def _adam(model: nn.Module, settings: PretrainSettings) -> torch.optim.Optimizer:
    """Return the same optimizer over the same two groups."""
    optim = settings.optim
    named = list(model.named_parameters())
    without = [p for n, p in named if n.endswith("bias") or "LayerNorm" in n]
    with_decay = [p for n, p in named if not (n.endswith("bias") or "LayerNorm" in n)]
    return torch.optim.AdamW(
        [{"params": with_decay, "weight_decay": optim.weight_decay},
         {"params": without, "weight_decay": 0.0}],
        lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True,
    )  # fmt: skip


@torch.no_grad()
def _heldout(model: Any, session: Session) -> float:
    """Return the masked-LM loss on the same held-out examples, by transformers' own modules."""
    model.eval()
    stream = build_heldout_stream(session.heldout_split, session.token_facts, session.settings.data)
    count, loss, words = min(session.settings.run.eval_sequences, len(stream)), 0.0, 0
    for first in range(0, count, 64):
        batch = stream.batch(first, min(64, count - first))
        inputs = dense(to_device(batch, torch.device("cpu")))
        wanted = inputs["labels"] != -100
        arguments = {name: inputs[name] for name in
                     ("input_ids", "token_type_ids", "attention_mask")}  # fmt: skip
        hidden = model.bert(**arguments).last_hidden_state[wanted]
        logits = model.cls.predictions(hidden)
        loss += float(F.cross_entropy(logits, inputs["labels"][wanted], reduction="sum"))
        words += int(wanted.sum())
    return loss / words


def draw(both: list[Contestant], entropy: float, path: Path) -> None:
    """Draw held-out loss against tokens and against time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    colours = {"bertsmith": "#c8501e", "transformers": "#3b6ea8"}
    for axes, key, scale, label in zip(
        panels, ("tokens", "seconds"), (1e6, 60.0), ("million tokens", "minutes"), strict=True
    ):
        for one in both:
            xs = [line[key] / scale for line in one.lines]
            ys = [line["masked_lm"] for line in one.lines]
            axes.plot(xs, ys, marker="o", markersize=3, color=colours[one.name], label=one.name)
        axes.axhline(entropy, color="#444", linestyle="--", linewidth=1, label="unigram entropy")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out masked-LM loss (nats a word)")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run both, and write lines, picture and summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store.open(options.store)
    assignments = [f"run.eval_sequences={HELD_OUT}", "run.device=cpu", *options.set]
    settings = resolve_settings(
        Overrides(data=options.store, size=options.size, assignments=assignments), store
    )
    session = Session(settings, store)
    both = [ours(session), theirs(session)]
    for one in both:
        one.probe(options.minutes)
        print(f"{one.name}: {one.total} steps in {options.minutes:g} minutes", flush=True)
    while not all(one.finished for one in both):
        for one in both:
            one.turn()
    for one in both:
        text = "".join(json.dumps(line) + "\n" for line in one.lines)
        (options.out / f"{one.name}.jsonl").write_text(text, encoding="utf-8")
    mine, peer = both
    work = session.build_objective([Phase(0, 1, settings.data.length)])
    entropy = work.evaluate()["unigram_entropy"]
    draw(both, entropy, options.out / "curves.png")
    goal = peer.lines[-1]["masked_lm"]
    below = [line["seconds"] for line in mine.lines if line["masked_lm"] <= goal]
    passed = below[0] if below else float("nan")
    figures = {
        "final loss, bertsmith": mine.lines[-1]["masked_lm"],
        "final loss, transformers": goal,
        "unigram entropy": entropy,
        "minutes, bertsmith": mine.seconds / 60,
        "minutes, transformers": peer.seconds / 60,
        "minutes until bertsmith passed the final loss of transformers": passed / 60,
        "steps, bertsmith": mine.total,
        "steps, transformers": peer.total,
    }
    speeds = [one.tokens / one.seconds for one in both]
    figures |= {"tokens a second, bertsmith": speeds[0], "tokens a second, transformers": speeds[1]}
    report("side_by_side", {"speed": speeds[0] / speeds[1]}, figures, options.out / "result.json")


if __name__ == "__main__":
    main()
