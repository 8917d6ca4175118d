"""Settings of a pre-training run whose defaults depend on the device."""

from bertsmith.errors import SettingsError
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.settings import DEFAULT_MICRO_BATCH_TOKENS
from bertsmith.train.pretraining.recipes import PretrainSettings, RunSettings


def select_for_device(settings: PretrainSettings, machine: Machine) -> RunSettings:
    """Return the run settings with a value for run.compile and run.micro_batch_tokens."""
    run = settings.run
    is_compiled = run.compile
    if is_compiled is None:
        is_compiled = device.can_compile_fast(machine)
    micro_batch_tokens = run.micro_batch_tokens
    if micro_batch_tokens is None:
        data = settings.data
        max_masking_rate = max(data.masking_rate, data.final_masking_rate or 0.0)
        is_causal = data.objective == "left-to-right" or bool(settings.schedule.causal_fraction)
        micro_batch_tokens = device.choose_micro_batch_tokens(
            machine,
            settings.model,
            DEFAULT_MICRO_BATCH_TOKENS,
            predictions_per_token=1.0 if is_causal else max_masking_rate,
        )
    return run.model_copy(update={"compile": is_compiled, "micro_batch_tokens": micro_batch_tokens})


def check_residual_dtype(run: RunSettings, machine: Machine) -> None:
    """Raise SettingsError if the residual stream has fewer bits than the matrix products."""
    if run.residual_dtype == "bf16" and machine.precision != "bf16":
        raise SettingsError(
            f"run.residual_dtype is 'bf16', but the precision on {machine.device} is "
            f"{machine.precision}; set run.precision=bf16, or leave run.residual_dtype out"
        )


def needs_static_shapes(settings: PretrainSettings, machine: Machine) -> bool:
    """Return whether micro-batches are filled up to a constant shape.

    A compiled model on a GPU needs it. On the CPU, sequences are padded by length instead. Batch
    norm would include the filler sequences, and batches that grow have no constant shape.
    """
    return (
        bool(settings.run.compile)
        and machine.device.type == "cuda"
        and settings.model.norm != "batch"
        and settings.data.initial_batch_size is None
    )
