"""What a pre-training run holds in memory: store, model, optimizer, and the machine's choices.

It never knows where a run is written, nor how long it is.
"""

import json
import platform
import time
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from bertsmith import bundle
from bertsmith.data.masking import TokenFacts
from bertsmith.data.store import Store
from bertsmith.data.stream import Stream
from bertsmith.data.unigram import word_counts
from bertsmith.model.bert import PreTrainingModel, parameter_count
from bertsmith.model.init.structured import look_across, look_beside
from bertsmith.model.init.unigram import inform
from bertsmith.model.ops.dropout import Noise
from bertsmith.runtime import device
from bertsmith.runtime.device import Load
from bertsmith.train.engine import compile_warmup, optimizer, probe, schedule
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.threads import Choice, candidates, choose
from bertsmith.train.pretraining.evaluation import evaluate, heldout_stream
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import Pretraining, mean_losses
from bertsmith.train.pretraining.recipes import PretrainSettings

#: Held-out sequences by which the time of an evaluation is estimated.
_TIMED_SEQUENCES = 128
#: The seconds and the steps, whichever are over first, for which a number of threads is timed.
ROUND_SECONDS, _ROUND_STEPS = 0.7, 8


class Session:
    """Everything that a run needs in memory."""

    def __init__(self, settings: PretrainSettings, store: Store) -> None:
        """Build the model with weights drawn from the seed, or read from ``run.start_from``."""
        run = settings.run
        self.machine = device.find(
            run.device, run.precision, run.kernel,
            attention_dropout=settings.model.attention_dropout, threads=run.threads,
        )  # fmt: skip
        longest = max(settings.data.length, settings.schedule.long_length or 0)
        device.require_memory(
            self.machine, settings.model, settings.data.batch * longest, run.micro_tokens
        )
        self.settings, self.store = settings, store
        #: What people should know of the model that the run goes on from.
        self.notes: list[str] = []
        self.tokenizer = store.tokenizer()
        self.facts = TokenFacts.of(self.tokenizer)
        self.train, self.heldout = store.split("train"), store.split("heldout")
        self.model = PreTrainingModel(settings.model, self.machine.kernel).to(self.machine.device)
        compute: nn.Module = self.model
        if run.compile:
            # Dynamic from the first call on: a restart must not meet another graph.
            compute = torch.compile(self.model, dynamic=True)  # type: ignore[assignment]
        self.compute = compute
        if run.compile and self.machine.device.type == "cpu":
            self._warm()
        self.start()

    def _warm(self) -> None:
        """Have the graphs compiled, from the same first batches at every start."""
        settings = self.settings
        longest = max(settings.data.length, settings.schedule.long_length or 0)
        self.model.train()
        for batch in compile_warmup.first_batches(
            settings.data, longest, settings.run.micro_tokens
        ):
            piece = to_device(batch, self.machine.device)
            with self.machine.autocast():
                terms = mean_losses(self.compute, piece, [piece], Noise(torch.tensor(0)))
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def start(self) -> None:
        """Set weights and optimizer to where a run begins."""
        torch.manual_seed(self.settings.run.seed)
        self.model.initialize()
        if self.settings.run.first_weights != "random":
            words = word_counts(self.train, self.settings.model.vocab_size)
            inform(self.model, torch.from_numpy(words))
        if self.settings.run.first_weights == "beside":
            look_beside(self.model)
        if self.settings.run.first_weights == "across":
            look_across(self.model, self.facts.cls_id)
        if self.settings.run.start_from:
            source = bundle.load(self.settings.run.start_from)
            self.notes = source.notes()
            known = {name: value for name, value in source.model.state_dict().items()
                     if name not in source.new}  # fmt: skip
            self.model.load_state_dict(known, strict=False)
        self.optimizer = optimizer.build(self.model, self.settings.optim)

    def work(self, phases: list[Phase]) -> Pretraining:
        """Return the work of the loop over ``phases``."""
        return Pretraining(
            self.model, self.compute, self.settings, phases,
            self.train, self.heldout, self.facts, self.machine,
        )  # fmt: skip

    def require_heldout(self) -> None:
        """Raise StoreError where the store has nothing to measure the run by."""
        heldout_stream(self.heldout, self.facts, self.settings.data)

    def measure(self, seconds: float = probe.SECONDS) -> Cost:
        """Take steps for at most ``seconds`` at each length, and start anew."""
        settings, step, shares, tokens, noisy = self.settings, 0.0, 0.0, 0.0, False
        ceiling = device.matrix_ceiling(self.machine)
        every = schedule.phases(settings.schedule.model_copy(update={"steps": 1000}),
                                settings.data.length)  # fmt: skip
        for phase in every:
            work = self.work([Phase(0, 1000, phase.length)])
            self.model.train()
            times, used = probe.step_times(work.pieces(0), partial(self._take, work), seconds)
            # The mean, not the median: what disturbs some of the steps here disturbs the run too.
            mean = sum(times) / len(times)
            weight = (phase.last - phase.first) / 1000
            step += weight * mean
            shares += weight * sum(map(work.products, used)) / len(used) / mean / ceiling
            tokens += weight * sum(map(work.tokens, used)) / len(used)
            noisy = noisy or probe.is_noisy(times)
        pause, sequences = self._time_evaluation()
        memory = device.peak_memory(self.machine)
        self.start()
        return Cost(step, pause, memory, ceiling, shares, tokens, sequences, noisy)

    def choose_threads(self, load: Load, seconds: float = ROUND_SECONDS) -> Choice:
        """Time steps with all threads and with fewer, take the best number, and start anew.

        seconds: how long one number of threads is timed at once.
        """
        work = self.work([Phase(0, 1000, self.settings.data.length)])
        batches = list(islice(work.pieces(0), _ROUND_STEPS))
        self.model.train()

        def time_step(threads: int) -> float:
            torch.set_num_threads(threads)
            self._take(work, 0, batches[0])
            began, taken = time.perf_counter(), 0
            while taken == 0 or (taken < _ROUND_STEPS and time.perf_counter() - began < seconds):
                self._take(work, taken, batches[taken])
                taken += 1
            return (time.perf_counter() - began) / taken

        choice = choose(time_step, candidates(torch.get_num_threads(), load))
        torch.set_num_threads(choice.threads)
        self.start()
        return choice

    def _time_evaluation(self) -> tuple[float, int]:
        """Return the seconds of an evaluation, from a part of it, and its sequences."""
        stream = heldout_stream(self.heldout, self.facts, self.settings.data)
        sequences = min(self.settings.run.eval_sequences, len(stream))
        part = min(sequences, _TIMED_SEQUENCES)
        self.model.eval()
        began = time.perf_counter()
        evaluate(self.model, stream, part, self.machine)
        return (time.perf_counter() - began) * sequences / part, sequences

    def _take(self, work: Pretraining, number: int, whole: list[Any]) -> None:
        take_step(
            work.losses, whole, self.model, self.optimizer, self.machine,
            step=number, seed=self.settings.run.seed, rate=0.0, clip=self.settings.optim.clip,
        )  # fmt: skip
        device.synchronize(self.machine)

    def epoch_examples(self, length: int) -> int:
        """Count the examples of one epoch at a length."""
        data = self.settings.data
        return len(Stream(self.train, self.facts, data, length, self.settings.run.seed, 0))

    def epoch_shares(self) -> list[tuple[float, int]]:
        """Return for each phase its share of the steps and the examples of one of its epochs."""
        timing = self.settings.schedule.model_copy(update={"steps": 1000})
        phases = schedule.phases(timing, self.settings.data.length)
        return [((p.last - p.first) / 1000, self.epoch_examples(p.length)) for p in phases]


def parts(model: PreTrainingModel) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the embeddings, of each layer and of the heads, by name."""
    found = {"embeddings": list(model.bert.embeddings.parameters())}
    for number, layer in enumerate(model.bert.encoder.layers, 1):
        found[f"layer {number}"] = list(layer.parameters())
    known = {id(own) for every in found.values() for own in every}
    found["heads"] = [own for own in model.parameters() if id(own) not in known]
    return found


def describe(session: Session) -> str:
    """Return one line for people about what is trained where."""
    config, counts = session.settings.model, session.train.counts
    return (
        f"{config.layers} layers, width {config.width}, {config.heads} heads, "
        f"{parameter_count(session.model):,} parameters on {counts.tokens:,} tokens "
        f"({device.describe(session.machine)})"
    )


def provenance_on_the_way(settings: PretrainSettings, step: int) -> dict[str, Any]:
    """Return what the directory of a model says that is not the last one of its run."""
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {"settings": settings.model_dump(mode="json"), "step": step},
    }


def provenance(session: Session, heldout: dict[str, float]) -> dict[str, Any]:
    """Return what a model directory says of its making."""
    settings, manifest = session.settings, session.store.manifest
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {
            "sources": [source.name for source in manifest.plan.sources],
            "documents": session.train.counts.documents,
            "tokens": session.train.counts.tokens,
            "language": manifest.plan.options.language,
            "settings": json.loads(settings.model_dump_json(exclude_none=True)),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "heldout": heldout,
    }
