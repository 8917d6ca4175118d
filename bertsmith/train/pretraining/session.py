"""The in-memory state of a pre-training run: store, model, optimizer and device."""

import torch
from torch import Tensor, nn

from bertsmith import bundle
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Store
from bertsmith.data.stream import EpochStreams
from bertsmith.data.unigram import count_token_ids
from bertsmith.model.bert import BertForPreTraining, count_parameters
from bertsmith.model.init.named import apply_initialization
from bertsmith.model.init.structured import count_layers_with_neighbor_heads
from bertsmith.model.ops.dropout import DropoutSeed, set_dropout_rate
from bertsmith.plurals import count_noun
from bertsmith.runtime import device
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from bertsmith.train.engine import optimizer
from bertsmith.train.engine.duration import Duration
from bertsmith.train.engine.run_device import check_norm
from bertsmith.train.pretraining.compile_warmup import build_warmup_batches
from bertsmith.train.pretraining.device_settings import (
    check_residual_dtype,
    needs_static_shapes,
    select_for_device,
)
from bertsmith.train.pretraining.evaluation import HeldoutEvaluator
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.objective import PretrainingObjective, compute_mean_losses
from bertsmith.train.pretraining.recipes import PretrainSettings, find_max_seqlen
from bertsmith.train.pretraining.schedule import Phase, build_phases
from bertsmith.train.pretraining.training_batches import compute_batch_size

#: Assumed number of steps of a run before its actual number is known. The value is arbitrary,
#: because only the fractions of the phases are used.
NOMINAL_STEPS = 1000


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
        self.settings = settings
        self.store = store
        self._needs_weights = needs_weights
        #: Messages for the user about the files of the start model.
        self.notes: list[str] = []
        self.tokenizer = store.load_tokenizer()
        self.vocabulary = VocabularyInfo.from_tokenizer(self.tokenizer)
        self.train_split = store.load_split("train")
        self.heldout_split = store.load_split("heldout")
        self._epochs = EpochStreams(self.train_split, self.vocabulary, settings.data, run.seed)
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
        self, duration: Duration, settings: PretrainSettings | None = None
    ) -> PretrainingObjective:
        """Return the objective of this run.

        Args:
            duration: Length of the run.
            settings: Sequence length, sizes and masking rates of the batches, schedule and size of
                the micro-batches; None: those of the run. The examples are always those of the
                run.
        """
        return PretrainingObjective(
            self.model,
            self.compiled_model,
            settings or self.settings,
            duration,
            self._epochs,
            self.heldout_split,
            self.vocabulary,
            self.machine,
            has_static_shapes=self.has_static_shapes,
        )

    def check_heldout_split(self) -> None:
        """Raise StoreError if the held-out text of the store is too short for an evaluation."""
        self.build_evaluator()

    def build_evaluator(self) -> HeldoutEvaluator:
        """Return the evaluator of the held-out text."""
        return HeldoutEvaluator(self.heldout_split, self.vocabulary, self.settings)

    def count_epoch_examples(self, max_seqlen: int) -> int:
        """Return the number of training examples in an epoch with this maximum sequence length."""
        return len(self._epochs.get(max_seqlen, 0))

    def list_phase_shares(self) -> list[tuple[float, int]]:
        """Return (fraction of the run, number of examples in an epoch) for each phase.

        A step with a smaller batch counts as a fraction of a step.
        """
        phases = self.list_phases()
        max_seqlens = {phase.max_seqlen for phase in phases}
        num_examples = {length: self.count_epoch_examples(length) for length in max_seqlens}
        return [
            (self.compute_batch_share(phase), num_examples[phase.max_seqlen]) for phase in phases
        ]

    def list_phases(self) -> list[Phase]:
        """Return the phases of a run of ``NOMINAL_STEPS`` steps."""
        schedule_settings = self.settings.schedule.model_copy(update={"steps": NOMINAL_STEPS})
        return build_phases(schedule_settings, self.settings.data.max_seqlen)

    def compute_batch_share(self, phase: Phase) -> float:
        """Return the sequences of a phase as a fraction of those of a run with full batches."""
        data = self.settings.data
        num_sequences = sum(
            compute_batch_size(step / NOMINAL_STEPS, data, self.settings.schedule)
            for step in range(phase.start_step, phase.end_step)
        )
        return num_sequences / (NOMINAL_STEPS * data.batch_size)


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
