"""The in-memory state of a pre-training run: store, model, optimizer and device."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith import bundle
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import count_token_ids
from bertsmith.model.bert import BertForPreTraining, count_parameters
from bertsmith.model.init.named import apply_initialization
from bertsmith.model.init.structured import count_layers_with_neighbor_heads
from bertsmith.model.ops.dropout import DropoutSeed, set_dropout_rate
from bertsmith.plurals import count_noun
from bertsmith.runtime import device
from bertsmith.runtime.device import CpuLoad
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.train.engine import optimizer, probe
from bertsmith.train.engine.duration import Duration, StepDuration
from bertsmith.train.engine.probe import Cost
from bertsmith.train.engine.run_device import check_norm
from bertsmith.train.engine.step import take_step
from bertsmith.train.engine.threads import (
    MAX_CHOICE_SECONDS,
    ThreadChoice,
    choose_thread_count,
    list_candidate_thread_counts,
)
from bertsmith.train.pretraining.compile_warmup import build_warmup_batches
from bertsmith.train.pretraining.device_settings import (
    check_residual_dtype,
    needs_static_shapes,
    select_for_device,
)
from bertsmith.train.pretraining.evaluation import HeldoutEvaluator
from bertsmith.train.pretraining.micro_batches import add_neighbor_bias, to_device
from bertsmith.train.pretraining.objective import PretrainingObjective, compute_mean_losses
from bertsmith.train.pretraining.recipes import PretrainSettings, find_max_seqlen
from bertsmith.train.pretraining.schedule import Phase, build_phases
from bertsmith.train.pretraining.training_batches import compute_batch_size

#: Assumed number of steps of a run before its actual number is known. The value is arbitrary,
#: because only the fractions of the phases are used.
_NOMINAL_STEPS = 1000
#: Maximum number of held-out sequences for timing an evaluation.
_TIMED_SEQUENCES = 128
#: An evaluation of a few sequences is timed first. If one of _TIMED_SEQUENCES would exceed this
#: duration in seconds, it is skipped.
_FIRST_TIMED_SEQUENCES, _MAX_EVALUATION_SECONDS = 8, 4.0
#: One timing of a thread count ends after this many seconds or steps, whichever comes first.
THREAD_TIMING_SECONDS, _THREAD_TIMING_STEPS = 0.7, 8


class Session:
    """Model, optimizer, data and device of a pre-training run, without its directory."""

    def __init__(
        self,
        settings: PretrainSettings,
        store: Store,
        processes: ProcessGroup = SINGLE_PROCESS,
        *,
        needs_weights: bool = True,
    ) -> None:
        """Build the model with new weights, or with those of ``run.start_from``.

        Args:
            settings: Settings of the run.
            store: Token store.
            processes: The processes of the run.
            needs_weights: Whether to compute or load the weights of the first step; False if those
                of a checkpoint replace them, or only the time of steps matters. The weights are
                then random.

        Raises:
            RunError: If the model does not fit into memory.
            SettingsError: If several processes cannot train this model, or the residual stream is
                in bf16 and the precision is fp32.
        """
        run = settings.run
        check_norm(settings.model, processes)
        self.machine = device.resolve_machine(
            run.device,
            run.precision,
            run.attention_kernel,
            attention_dropout=(
                settings.model.attention_dropout if run.dropout is None else run.dropout
            ),
            head_dim=settings.model.head_dim,
            threads=run.threads,
            processes=processes,
        )
        check_residual_dtype(run, self.machine)
        run = select_for_device(settings, self.machine)
        settings = settings.model_copy(update={"run": run})
        assert run.micro_batch_tokens is not None
        _, max_seqlen = find_max_seqlen(settings)
        sizes = (settings.data.batch_size * max_seqlen, run.micro_batch_tokens)
        device.check_memory(self.machine, settings.model, *sizes, settings.optim.optimizer)
        #: The machine without the other processes, for measurements.
        self._local_machine = replace(self.machine, processes=SINGLE_PROCESS)
        self.settings = settings
        self.store = store
        self._needs_weights = needs_weights
        #: Messages for the user about the files of the start model.
        self.notes: list[str] = []
        self.tokenizer = store.load_tokenizer()
        self.vocabulary = VocabularyInfo.from_tokenizer(self.tokenizer)
        self.train_split = store.load_split("train")
        self.heldout_split = store.load_split("heldout")
        self.model = BertForPreTraining(settings.model, self.machine.kernel).to(self.machine.device)
        if not run.start_from:
            # Heads that attend to neighbors from the start need no bias.
            self.model.bert.num_unbiased_layers = count_layers_with_neighbor_heads(
                run.initialization, settings.model
            )
        if settings.run.residual_dtype == "bf16":
            self.model.bert.residual_dtype = torch.bfloat16
        if run.dropout is not None:
            set_dropout_rate(self.model, run.dropout)
        #: The compiled model if run.compile is set, otherwise the model itself.
        self.compiled_model: nn.Module = self.model
        #: Whether all micro-batches of a phase have the same shape.
        self.has_static_shapes = needs_static_shapes(settings, self.machine)
        if run.compile:
            # With dynamic=None, the graphs would depend on the first batches of the process, which
            # differ between a new and a resumed run.
            is_dynamic = not self.has_static_shapes
            self.compiled_model = torch.compile(self.model, dynamic=is_dynamic)  # type: ignore[assignment]
        if run.compile and self.machine.device.type == "cpu":
            self._warm_up_compiler()
        self.reset()

    def _warm_up_compiler(self) -> None:
        """Compile all graphs of the model with the same batches at every start of the run."""
        settings = self.settings
        max_tokens = settings.run.micro_batch_tokens
        assert max_tokens is not None
        _, max_seqlen = find_max_seqlen(settings)
        self.model.train()
        for batch in build_warmup_batches(
            settings.data,
            max_seqlen,
            max_tokens,
            has_causal_phase=settings.schedule.causal_fraction > 0,
            has_neighbor_bias=settings.schedule.neighbor_bias_steps > 0,
            num_processes=self.machine.processes.world_size,
        ):
            micro_batch = to_device(batch, self.machine.device)
            with self.machine.autocast():
                losses = compute_mean_losses(
                    self.compiled_model, micro_batch, [micro_batch], DropoutSeed(torch.tensor(0))
                )
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def reset(self) -> None:
        """Set weights and optimizer to their state at the start of the run."""
        start_weights = self._load_start_weights()
        torch.manual_seed(self.settings.run.seed)
        self.model.initialize()
        initialization = self.settings.run.initialization
        # Weights that are missing in the files of the start model keep the initialization.
        is_replaced = self.model.state_dict().keys() <= start_weights.keys()
        if initialization != "random" and self._needs_weights and not is_replaced:
            token_counts = count_token_ids(self.train_split, self.settings.model.vocab_size)
            apply_initialization(
                self.model, initialization, torch.from_numpy(token_counts), self.vocabulary.cls_id
            )
        self.model.load_state_dict(start_weights, strict=False)
        self.optimizer = optimizer.build_optimizer(
            self.model, self.settings.optim, self.machine.dtype
        )

    def _load_start_weights(self) -> dict[str, Tensor]:
        """Return the weights of ``run.start_from`` that are stored in its files."""
        if not (self.settings.run.start_from and self._needs_weights):
            return {}
        start_bundle = bundle.load(self.settings.run.start_from)
        self.notes = start_bundle.notes()
        return {
            name: value
            for name, value in start_bundle.model.state_dict().items()
            if name not in start_bundle.new_weights
        }

    def build_objective(
        self,
        duration: Duration,
        phase: Phase | None = None,
        micro_batch_tokens: int | None = None,
    ) -> PretrainingObjective:
        """Return the objective of this run.

        Args:
            duration: Length of the run.
            phase: Phase of a run that has only this phase, with a constant batch size and masking
                rate and without a bias of the attention; None: the schedule of the settings.
            micro_batch_tokens: Maximum tokens of a micro-batch; None: that of the settings.
        """
        settings = self.settings
        if micro_batch_tokens is not None:
            run = settings.run.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
            settings = settings.model_copy(update={"run": run})
        if phase is not None:
            data = settings.data.model_copy(
                update={
                    "max_seqlen": phase.max_seqlen,
                    "final_masking_rate": None,
                    "initial_batch_size": None,
                }
            )
            single_phase = settings.schedule.model_copy(
                update={
                    "phase2_max_seqlen": None,
                    "causal_fraction": float(phase.is_causal),
                    "neighbor_bias_steps": 0,
                }
            )
            settings = settings.model_copy(update={"data": data, "schedule": single_phase})
        return PretrainingObjective(
            self.model,
            self.compiled_model,
            settings,
            duration,
            self.train_split,
            self.heldout_split,
            self.vocabulary,
            self.machine,
            has_static_shapes=self.has_static_shapes,
        )

    def check_heldout_split(self) -> None:
        """Raise StoreError if the held-out text of the store is too short for an evaluation."""
        self._build_evaluator()

    def _build_evaluator(self) -> HeldoutEvaluator:
        return HeldoutEvaluator(self.heldout_split, self.vocabulary, self.settings)

    def measure_cost(
        self, seconds: float = probe.PROBE_SECONDS, *, should_reset: bool = True
    ) -> Cost:
        """Measure the cost of steps and of an evaluation, then reset weights and optimizer.

        With several processes, each of them must call this method at the same time. It measures its
        share of the steps, and the time of summing the gradients is added.

        Args:
            seconds: Maximum duration of the steps of a phase.
            should_reset: Whether the model is trained afterwards. A reset of a base model takes
                seconds.
        """
        processes = self.machine.processes
        sum_seconds = processes.time_gradient_sum(count_parameters(self.model), self.machine.device)
        step_seconds = mfu = tokens_per_step = 0.0
        is_noisy = is_extrapolated = False
        peak_macs_per_second = device.measure_peak_macs_per_second(self.machine)
        for phase in self._list_phases():
            objective = self.build_objective(StepDuration(_NOMINAL_STEPS), phase)
            times, batches, is_partial = self._measure_steps(objective, phase, seconds)
            is_extrapolated = is_extrapolated or is_partial
            # Not the median, because the run will also have occasional slow steps.
            mean_seconds = sum(times) / len(times) + sum_seconds
            fraction = (phase.end_step - phase.start_step) / _NOMINAL_STEPS
            batch_share = self._compute_batch_share(phase)
            step_seconds += batch_share * mean_seconds
            macs = sum(map(objective.count_macs, batches))
            mfu += fraction * macs / len(batches) / mean_seconds / peak_macs_per_second
            num_tokens = sum(map(objective.count_tokens, batches)) / len(batches)
            tokens_per_step += batch_share * num_tokens * processes.world_size
            is_noisy = is_noisy or probe.is_noisy(times)
        evaluation_seconds, num_eval_sequences = self.time_evaluation()
        peak_memory_bytes = device.get_peak_memory_bytes(self.machine)
        if should_reset:
            self.reset()
        return Cost(
            step_seconds=step_seconds,
            evaluation_seconds=evaluation_seconds,
            peak_memory_bytes=peak_memory_bytes,
            peak_macs_per_second=peak_macs_per_second,
            mfu=mfu,
            tokens_per_step=tokens_per_step,
            num_eval_sequences=num_eval_sequences,
            is_noisy=is_noisy,
            is_extrapolated=is_extrapolated,
        )

    def _measure_steps(
        self, objective: PretrainingObjective, phase: Phase, seconds: float
    ) -> tuple[list[float], list[list[Any]], bool]:
        """Measure steps, or a part of a step if it takes longer than ``seconds``.

        Returns:
            Duration of each measured step and its micro-batches in this process, and whether only a
            part of a step was measured.
        """
        self.model.train()
        if self.machine.device.type == "cpu":
            step_seconds, batch = self._measure_slow_step(phase, seconds)
            if step_seconds is not None:
                return [step_seconds], [batch], True
        take_step = partial(self._take_step, objective)
        batches = map(self._select_assigned, objective.iter_batches(0))
        if self.has_static_shapes and self.settings.schedule.neighbor_bias_steps:
            # Compiles the graph of the first steps, which would otherwise delay the schedule.
            take_step(0, add_neighbor_bias(next(batches)))
        return (*probe.measure_steps(batches, take_step, seconds), False)

    def _measure_slow_step(self, phase: Phase, seconds: float) -> tuple[float | None, list[Any]]:
        """Estimate the duration of a slow step, split into small micro-batches.

        Returns:
            The duration in seconds, None if a step takes at most ``seconds``; and its micro-batches
            in this process.
        """
        objective = self._build_slow_step_objective(phase)
        batch = self._select_assigned(next(objective.iter_batches(0)))
        shortest = self.build_objective(StepDuration(_NOMINAL_STEPS), phase, phase.max_seqlen)
        warmup_micro_batch = self._select_assigned(next(shortest.iter_batches(0)))[0]
        take_step = partial(self._take_step, objective)
        return probe.measure_slow_step(warmup_micro_batch, batch, take_step, seconds), batch

    def _select_assigned(self, micro_batches: list[Any]) -> list[Any]:
        """Return the micro-batches that this process computes."""
        indices = self.machine.processes.assign_indices(len(micro_batches))
        return [micro_batches[index] for index in indices]

    def _build_slow_step_objective(self, phase: Phase) -> PretrainingObjective:
        """Return the objective with micro-batches so small that slow steps can be measured."""
        max_tokens = self.settings.run.micro_batch_tokens
        assert max_tokens is not None
        num_tokens = min(max_tokens, max(probe.SLOW_STEP_TOKENS, phase.max_seqlen))
        return self.build_objective(StepDuration(_NOMINAL_STEPS), phase, num_tokens)

    def choose_thread_count(
        self,
        load: CpuLoad,
        seconds: float = THREAD_TIMING_SECONDS,
        max_seconds: float = MAX_CHOICE_SECONDS,
    ) -> ThreadChoice:
        """Time steps with all threads and with fewer, choose the best number and use it.

        The weights and the optimizer are reset at the end.

        Args:
            load: CPU load of other processes.
            seconds: Maximum duration of one timing of a thread count.
            max_seconds: Maximum duration of all timings. Each thread count is timed at least once.
        """
        self.model.train()
        candidates = list_candidate_thread_counts(torch.get_num_threads(), load)
        # The first step is the slowest; on a busy machine, few threads are the fastest.
        torch.set_num_threads(min(candidates))
        phase = self._list_phases()[0]
        slow_seconds, _ = self._measure_slow_step(phase, max_seconds / 4)
        is_slow = slow_seconds is not None
        time_step = self._build_step_timer(phase, seconds, is_slow=is_slow)
        choice = choose_thread_count(time_step, candidates, max_seconds)
        torch.set_num_threads(choice.num_threads)
        self.reset()
        return choice

    def _build_step_timer(
        self, phase: Phase, seconds: float, *, is_slow: bool
    ) -> Callable[[int], float]:
        """Return a function that measures the seconds of a step with a given number of threads.

        Args:
            phase: The phase of the step.
            seconds: Maximum duration of a timing.
            is_slow: Whether to measure one small micro-batch of a step that takes longer.
        """
        if is_slow:
            slow_objective = self._build_slow_step_objective(phase)
            batch = next(slow_objective.iter_batches(0))

            def time_slow_step(threads: int) -> float:
                """Return the time of one micro-batch, times the number of micro-batches."""
                torch.set_num_threads(threads)
                start_time = time.perf_counter()
                self._take_step(slow_objective, 0, batch[:1])
                return (time.perf_counter() - start_time) * len(batch)

            return time_slow_step
        objective = self.build_objective(StepDuration(_NOMINAL_STEPS), phase)
        batches = list(islice(objective.iter_batches(0), _THREAD_TIMING_STEPS))

        def time_step(threads: int) -> float:
            """Return the mean time of a step in seconds, after one step that is not measured."""
            torch.set_num_threads(threads)
            self._take_step(objective, 0, batches[0])
            start_time = time.perf_counter()
            for step, micro_batches in enumerate(batches):
                self._take_step(objective, step, micro_batches)
                elapsed_seconds = time.perf_counter() - start_time
                if elapsed_seconds >= seconds:
                    break
            return elapsed_seconds / (step + 1)

        return time_step

    def time_evaluation(self) -> tuple[float, int]:
        """Return the estimated seconds of an evaluation, and its number of held-out sequences."""
        evaluator = self._build_evaluator()
        num_sequences = evaluator.num_sequences
        self.model.eval()
        sequence_seconds = 0.0
        for max_timed in (_FIRST_TIMED_SEQUENCES, _TIMED_SEQUENCES):
            num_timed = min(num_sequences, max_timed)
            if sequence_seconds * num_timed > _MAX_EVALUATION_SECONDS:
                break
            start_time = time.perf_counter()
            evaluator.evaluate(self.model, self._local_machine, num_timed)
            sequence_seconds = (time.perf_counter() - start_time) / num_timed
        world_size = self.machine.processes.world_size
        return sequence_seconds * num_sequences / world_size, num_sequences

    def _take_step(
        self, objective: PretrainingObjective, step: int, micro_batches: list[Any]
    ) -> None:
        """Take a step with a learning rate of 0 and wait for the device, for a measurement.

        The step has the given micro-batches, and is taken in this process only.
        """
        take_step(
            objective.compute_losses,
            micro_batches,
            self.model,
            self.optimizer,
            self._local_machine,
            step=step,
            seed=self.settings.run.seed,
            lr=0.0,
            max_grad_norm=self.settings.optim.max_grad_norm,
        )
        device.synchronize(self.machine)

    def count_epoch_examples(self, max_seqlen: int) -> int:
        """Return the number of training examples in an epoch with this maximum sequence length."""
        data = self.settings.data
        seed = self.settings.run.seed
        stream = ExampleStream(self.train_split, self.vocabulary, data, max_seqlen, seed, epoch=0)
        return len(stream)

    def list_phase_shares(self) -> list[tuple[float, int]]:
        """Return (fraction of the run, number of examples in an epoch) for each phase.

        A step with a smaller batch counts as a fraction of a step.
        """
        phases = self._list_phases()
        max_seqlens = {phase.max_seqlen for phase in phases}
        num_examples = {length: self.count_epoch_examples(length) for length in max_seqlens}
        return [
            (self._compute_batch_share(phase), num_examples[phase.max_seqlen]) for phase in phases
        ]

    def _list_phases(self) -> list[Phase]:
        """Return the phases of a run of _NOMINAL_STEPS steps."""
        schedule_settings = self.settings.schedule.model_copy(update={"steps": _NOMINAL_STEPS})
        return build_phases(schedule_settings, self.settings.data.max_seqlen)

    def _compute_batch_share(self, phase: Phase) -> float:
        """Return the sequences of a phase as a fraction of those of a run with full batches."""
        data = self.settings.data
        num_sequences = sum(
            compute_batch_size(step / _NOMINAL_STEPS, data, self.settings.schedule)
            for step in range(phase.start_step, phase.end_step)
        )
        return num_sequences / (_NOMINAL_STEPS * data.batch_size)


def build_grad_norm_groups(model: BertForPreTraining) -> dict[str, list[nn.Parameter]]:
    """Return parameter groups by name: the embeddings, each layer, and all other parameters."""
    groups = {"embeddings": list(model.bert.embeddings.parameters())}
    for number, layer in enumerate(model.bert.encoder.layers, 1):
        groups[f"layer {number}"] = list(layer.parameters())
    grouped_ids = {id(parameter) for group in groups.values() for parameter in group}
    groups["heads"] = [p for p in model.parameters() if id(p) not in grouped_ids]
    return groups


def describe_session(session: Session) -> str:
    """Return a log message about model, data and device."""
    config = session.settings.model
    counts = session.train_split.counts
    return (
        f"{count_noun(config.layers, 'layer')}, width {config.width}, "
        f"{count_noun(config.heads, 'head')}, "
        f"{count_noun(count_parameters(session.model), 'parameter')} on "
        f"{count_noun(counts.tokens, 'token')} "
        f"({device.describe_machine(session.machine)})"
    )
