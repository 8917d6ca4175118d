"""The result of a pre-training run."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.train.engine.loop import TrainingOutcome
from bertsmith.train.pretraining.recipes import PretrainSettings


@dataclass(frozen=True)
class PretrainResult:
    """Result of a pre-training run.

    Attributes:
        run: Run directory.
        model: Model directory; None if a signal stopped the run.
        settings: Settings of the run.
        outcome: How training ended.
        heldout: Metrics of the last evaluation on held-out text.
        start_heldout: The same metrics of the start model; empty for a run from scratch.
        curve: Image file of the loss curve; None if matplotlib is not installed.
        was_finished: Whether the run was already finished, so that nothing was trained.
    """

    run: Path
    model: Path | None
    settings: PretrainSettings
    outcome: TrainingOutcome
    heldout: dict[str, float]
    start_heldout: dict[str, float]
    curve: Path | None
    was_finished: bool = False

    @property
    def steps(self) -> int | None:
        """Total number of steps; None if a signal stopped a run with a time budget."""
        return self.settings.schedule.steps

    @property
    def is_masked_lm(self) -> bool:
        """Whether the model was trained on masked tokens; otherwise left to right."""
        return self.settings.data.objective == "masked"
