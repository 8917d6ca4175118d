"""Verdicts: whether the results of an experiment agree with the published claims."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

#: The outcome of a claim. "open" means that the results neither confirm nor contradict it.
Outcome = Literal["holds", "contradicted", "open"]
Verdict = Literal["reproduced", "not reproduced", "inconclusive"]

#: Minimum number of seeds for an outcome other than "open". All seeds agree by chance with
#: probability 1/4 at three seeds.
MIN_SEEDS = 3
#: Minimum mean difference of scores (half a point) and of losses in nats. Smaller differences count
#: as none.
MIN_SCORE_DIFFERENCE, MIN_LOSS_DIFFERENCE = 0.005, 0.01


@dataclass(frozen=True)
class Claim:
    """A published claim that one value is higher than another, with its paired differences.

    Attributes:
        text: The claim, such as "MRPC: masked LM is better than left to right".
        differences: The higher value minus the lower one, one for each seed: positive if the claim
            holds. None or NaN if a value is missing.
        min_difference: Minimum absolute mean difference that counts.
        benefits: Score of a pre-trained model minus that of an untrained one on the same task, one
            for each seed. Without a benefit, the task cannot tell pre-trained models apart, and the
            claim is open. None for claims that need no benefit.
    """

    text: str
    differences: Sequence[float | None]
    min_difference: float = MIN_SCORE_DIFFERENCE
    benefits: Sequence[float | None] | None = None

    @property
    def has_benefit(self) -> bool:
        """Whether pre-training helps in the task, or the claim does not need it."""
        return self.benefits is None or _compare(self.benefits, self.min_difference) == "holds"

    @property
    def outcome(self) -> Outcome:
        """Whether all seeds agree with the claim, or all contradict it, by enough."""
        return _compare(self.differences, self.min_difference) if self.has_benefit else "open"

    def to_markdown(self) -> str:
        """Return the claim and its outcome as one line."""
        values = [value for value in self.differences if value is not None]
        if len(values) < len(self.differences) or not all(map(math.isfinite, values)):
            reason = "some results are missing"
        elif not self.has_benefit:
            reason = "pre-training does not improve this task"
        else:
            seeds = ", ".join(f"{value:+.3f}" for value in values)
            reason = f"mean difference {mean(values):+.3f}; by seed {seeds}"
        return f"- {self.outcome}: {self.text} ({reason})"


def _compare(differences: Sequence[float | None], min_difference: float) -> Outcome:
    """Return whether all differences are positive ("holds") or all negative ("contradicted").

    "open" if seeds disagree, the mean is too small, a value is missing, or there are few seeds.
    """
    values = [value for value in differences if value is not None and math.isfinite(value)]
    if len(values) < max(len(differences), MIN_SEEDS) or abs(mean(values)) < min_difference:
        return "open"
    if min(values) > 0:
        return "holds"
    return "contradicted" if max(values) < 0 else "open"


def decide_verdict(claims: Sequence[Claim]) -> Verdict:
    """Return the verdict on the claims of an experiment.

    Returns:
        "not reproduced" if a claim is contradicted, else "reproduced" if all claims hold, else
        "inconclusive".
    """
    outcomes = {claim.outcome for claim in claims}
    if "contradicted" in outcomes:
        return "not reproduced"
    return "reproduced" if outcomes == {"holds"} else "inconclusive"


def format_verdict(claims: Sequence[Claim]) -> str:
    """Return the verdict and its claims in Markdown, to start the page of an experiment."""
    verdict = decide_verdict(claims)
    suffix = " at this size" if verdict == "inconclusive" else ""
    heading = f"**{verdict.capitalize()}{suffix}.**"
    return "\n".join([heading, "", *(claim.to_markdown() for claim in claims)])


def verdict_to_json(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the verdict and its claims as a JSON value."""
    return {
        "verdict": decide_verdict(claims),
        "claims": [
            {"text": claim.text, "outcome": claim.outcome, "differences": list(claim.differences)}
            for claim in claims
        ],
    }


def subtract(higher: Sequence[float | None], lower: Sequence[float | None]) -> list[float | None]:
    """Return the difference for each seed, None where a value is missing."""
    return [
        None if first is None or second is None else first - second
        for first, second in zip(higher, lower, strict=True)
    ]
