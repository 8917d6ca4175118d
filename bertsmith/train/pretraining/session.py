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
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import count_token_ids
from bertsmith.model.bert import BertForPreTraining, count_parameters
from bertsmith.model.init.structured import init_cross_segment_heads, init_neighbor_heads
from bertsmith.model.init.unigram import init_from_unigrams
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad
from bertsmith.train.engine import compile_warmup, optimizer, probe, schedule
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.threads import (
    ThreadChoice,
    candidate_thread_counts,
    choose_thread_count,
)
from bertsmith.train.pretraining.evaluation import build_heldout_stream, evaluate
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import PretrainingObjective, compute_mean_losses
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
        self.machine = device.resolve_machine(
            run.device, run.precision, run.kernel,
            attention_dropout=settings.model.attention_dropout, threads=run.threads,
        )  # fmt: skip
        longest = max(settings.data.length, settings.schedule.long_length or 0)
        device.check_memory(
            self.machine, settings.model, settings.data.batch * longest, run.micro_batch_tokens
        )
        self.settings, self.store = settings, store
        #: What people should know of the model that the run goes on from.
        self.notes: list[str] = []
        self.tokenizer = store.load_tokenizer()
        self.token_facts = VocabularyInfo.from_tokenizer(self.tokenizer)
        self.train_split, self.heldout_split = (
            store.load_split("train"),
            store.load_split("heldout"),
        )
        self.model = BertForPreTraining(settings.model, self.machine.kernel).to(self.machine.device)
        compute: nn.Module = self.model
        if run.compile:
            # Dynamic from the first call on: a restart must not meet another graph.
            compute = torch.compile(self.model, dynamic=True)  # type: ignore[assignment]
        self.compiled_model = compute
        if run.compile and self.machine.device.type == "cpu":
            self._warm()
        self.reset()

    def _warm(self) -> None:
        """Have the graphs compiled, from the same first batches at every start."""
        settings = self.settings
        longest = max(settings.data.length, settings.schedule.long_length or 0)
        self.model.train()
        for batch in compile_warmup.warmup_batches(
            settings.data, longest, settings.run.micro_batch_tokens
        ):
            piece = to_device(batch, self.machine.device)
            with self.machine.autocast():
                terms = compute_mean_losses(
                    self.compiled_model, piece, [piece], DropoutSeed(torch.tensor(0))
                )
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def reset(self) -> None:
        """Set weights and optimizer to where a run begins."""
        torch.manual_seed(self.settings.run.seed)
        self.model.initialize()
        if self.settings.run.initialization != "random":
            words = count_token_ids(self.train_split, self.settings.model.vocab_size)
            init_from_unigrams(self.model, torch.from_numpy(words))
        if self.settings.run.initialization == "neighbor-heads":
            init_neighbor_heads(self.model)
        if self.settings.run.initialization == "cross-segment-heads":
            init_cross_segment_heads(self.model, self.token_facts.cls_id)
        if self.settings.run.start_from:
            source = bundle.load(self.settings.run.start_from)
            self.notes = source.notes()
            known = {name: value for name, value in source.model.state_dict().items()
                     if name not in source.new_weights}  # fmt: skip
            self.model.load_state_dict(known, strict=False)
        self.optimizer = optimizer.build_optimizer(self.model, self.settings.optim)

    def build_objective(self, phases: list[Phase]) -> PretrainingObjective:
        """Return the work of the loop over ``build_phases``."""
        return PretrainingObjective(
            self.model, self.compiled_model, self.settings, phases,
            self.train_split, self.heldout_split, self.token_facts, self.machine,
        )  # fmt: skip

    def require_heldout(self) -> None:
        """Raise StoreError where the store has nothing to measure the run by."""
        build_heldout_stream(self.heldout_split, self.token_facts, self.settings.data)

    def measure_cost(self, seconds: float = probe.PROBE_SECONDS) -> Cost:
        """Take steps for at most ``seconds`` at each length, and start anew."""
        settings, step, shares, tokens, noisy = self.settings, 0.0, 0.0, 0.0, False
        ceiling = device.measure_peak_macs(self.machine)
        every = schedule.build_phases(settings.schedule.model_copy(update={"steps": 1000}),
                                settings.data.length)  # fmt: skip
        for phase in every:
            work = self.build_objective([Phase(0, 1000, phase.length)])
            self.model.train()
            times, used = probe.measure_steps(
                work.iter_batches(0), partial(self._take, work), seconds
            )
            # The mean, not the median: what disturbs some of the steps here disturbs the run too.
            mean = sum(times) / len(times)
            weight = (phase.end_step - phase.start_step) / 1000
            step += weight * mean
            shares += weight * sum(map(work.count_macs, used)) / len(used) / mean / ceiling
            tokens += weight * sum(map(work.count_tokens, used)) / len(used)
            noisy = noisy or probe.is_noisy(times)
        pause, sequences = self._time_evaluation()
        memory = device.peak_memory_bytes(self.machine)
        self.reset()
        return Cost(step, pause, memory, ceiling, shares, tokens, sequences, noisy)

    def choose_thread_count(self, load: CpuLoad, seconds: float = ROUND_SECONDS) -> ThreadChoice:
        """Time steps with all threads and with fewer, take the best number, and start anew.

        seconds: how long one number of threads is timed at once.
        """
        work = self.build_objective([Phase(0, 1000, self.settings.data.length)])
        batches = list(islice(work.iter_batches(0), _ROUND_STEPS))
        self.model.train()

        def time_step(threads: int) -> float:
            torch.set_num_threads(threads)
            self._take(work, 0, batches[0])
            began, taken = time.perf_counter(), 0
            while taken == 0 or (taken < _ROUND_STEPS and time.perf_counter() - began < seconds):
                self._take(work, taken, batches[taken])
                taken += 1
            return (time.perf_counter() - began) / taken

        choice = choose_thread_count(
            time_step, candidate_thread_counts(torch.get_num_threads(), load)
        )
        torch.set_num_threads(choice.num_threads)
        self.reset()
        return choice

    def _time_evaluation(self) -> tuple[float, int]:
        """Return the seconds of an evaluation, from a part of it, and its sequences."""
        stream = build_heldout_stream(self.heldout_split, self.token_facts, self.settings.data)
        sequences = min(self.settings.run.eval_sequences, len(stream))
        part = min(sequences, _TIMED_SEQUENCES)
        self.model.eval()
        began = time.perf_counter()
        evaluate(self.model, stream, part, self.machine)
        return (time.perf_counter() - began) * sequences / part, sequences

    def _take(self, work: PretrainingObjective, number: int, whole: list[Any]) -> None:
        take_step(
            work.compute_losses, whole, self.model, self.optimizer, self.machine,
            step=number, seed=self.settings.run.seed, lr=0.0, max_grad_norm=self.settings.optim.max_grad_norm,
        )  # fmt: skip
        device.synchronize(self.machine)

    def count_epoch_examples(self, length: int) -> int:
        """Count the examples of one epoch at a length."""
        data = self.settings.data
        return len(
            ExampleStream(
                self.train_split, self.token_facts, data, length, self.settings.run.seed, 0
            )
        )

    def phase_epochs(self) -> list[tuple[float, int]]:
        """Return for each phase its share of the steps and the examples of one of its epochs."""
        timing = self.settings.schedule.model_copy(update={"steps": 1000})
        phases = schedule.build_phases(timing, self.settings.data.length)
        return [
            ((p.end_step - p.start_step) / 1000, self.count_epoch_examples(p.length))
            for p in phases
        ]


def build_grad_norm_groups(model: BertForPreTraining) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the embeddings, of each layer and of the heads, by name."""
    found = {"embeddings": list(model.bert.embeddings.parameters())}
    for number, layer in enumerate(model.bert.encoder.layers, 1):
        found[f"layer {number}"] = list(layer.parameters())
    known = {id(own) for every in found.values() for own in every}
    found["heads"] = [own for own in model.parameters() if id(own) not in known]
    return found


def describe_session(session: Session) -> str:
    """Return one line for people about what is trained where."""
    config, counts = session.settings.model, session.train_split.counts
    return (
        f"{config.layers} layers, width {config.width}, {config.heads} heads, "
        f"{count_parameters(session.model):,} parameters on {counts.tokens:,} tokens "
        f"({device.describe_machine(session.machine)})"
    )


def build_checkpoint_provenance(settings: PretrainSettings, step: int) -> dict[str, Any]:
    """Return what the directory of a model says that is not the last one of its run."""
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {"settings": settings.model_dump(mode="json"), "step": step},
    }


def build_provenance(session: Session, heldout: dict[str, float]) -> dict[str, Any]:
    """Return what a model directory says of its making."""
    settings, manifest = session.settings, session.store.manifest
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {
            "sources": [source.name for source in manifest.plan.sources],
            "documents": session.train_split.counts.documents,
            "tokens": session.train_split.counts.tokens,
            "language": manifest.plan.options.language,
            "settings": json.loads(settings.model_dump_json(exclude_none=True)),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "heldout": heldout,
    }
