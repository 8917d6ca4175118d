"""Verdicts: whether the results of an experiment agree with the published claims."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal, TypeGuard

from scipy.stats import t

#: The outcome of a claim. "open" means that the results neither confirm nor contradict it.
Outcome = Literal["holds", "contradicted", "open"]
Verdict = Literal["reproduced", "not reproduced", "inconclusive", "exploratory"]

#: Minimum number of seeds for an outcome other than "open".
MIN_SEEDS = 3
#: Maximum p-value of the paired t-test (two-sided) for an outcome other than "open".
_MAX_P_VALUE = 0.05
#: Minimum mean difference of scores (half a point) and of losses in nats. Smaller differences count
#: as none.
MIN_SCORE_DIFFERENCE, MIN_LOSS_DIFFERENCE = 0.005, 0.01
#: The same for scores whose difference is smaller in the paper.
MIN_SMALL_SCORE_DIFFERENCE = 0.001


@dataclass(frozen=True)
class Claim:
    """A published claim that one value is higher than another, with its paired differences.

    Attributes:
        text: The claim, such as "MRPC: masked LM is better than left to right".
        differences: The higher value minus the lower one, one for each seed: positive if the claim
            holds. None or NaN if a value is missing.
        min_difference: Minimum absolute mean difference that counts.
        benefits: How much pre-training improves the value that the claim is about, one for each
            seed. Without a benefit, it cannot tell pre-trained models apart, and the claim is open.
            None for claims that need no benefit.
        no_benefit: The explanation of a missing benefit.
        is_equality: Whether the claim is that there is no difference. It holds if each seed has a
            difference below ``min_difference``.
        min_seeds: Minimum number of seeds; 1 for measurements that do not depend on a seed.
    """

    text: str
    differences: Sequence[float | None]
    min_difference: float = MIN_SCORE_DIFFERENCE
    benefits: Sequence[float | None] | None = None
    no_benefit: str = "pre-training does not improve this task"
    is_equality: bool = False
    min_seeds: int = MIN_SEEDS

    @property
    def has_benefit(self) -> bool:
        """Whether pre-training improves the value, or the claim does not need it."""
        return self.benefits is None or self._compare(self.benefits) == "holds"

    @property
    def outcome(self) -> Outcome:
        """Whether all seeds agree with the claim, or all contradict it, by enough, and p < 0.05."""
        if not self.has_benefit:
            return "open"
        outcome = self._compare(self.differences)
        if not self.is_equality:
            return outcome
        if outcome != "open":
            return "contradicted"
        values = self._select_values(self.differences)
        is_equal = bool(values) and max(map(abs, values)) < self.min_difference
        return "holds" if is_equal else "open"

    def to_markdown(self) -> str:
        """Return the claim and its outcome as one line."""
        values = [value for value in self.differences if value is not None]
        results = [*self.differences, *(self.benefits or ())]
        if not all(map(is_finite, results)):
            reason = "some results are missing, or a run diverged"
        elif not self.has_benefit and len(values) >= self.min_seeds:
            reason = self.no_benefit
        else:
            seeds = ", ".join(f"{value:+.3f}" for value in values)
            direction = "" if self.is_equality else " in its favor"
            reason = f"mean difference{direction} {mean(values):+.3f}; by seed {seeds}"
            if self.is_equality:
                reason += f"; less than {self.min_difference:g} counts as equal"
        return f"- {self.outcome}: {self.text} ({reason})"

    def _compare(self, differences: Sequence[float | None]) -> Outcome:
        """Return whether all differences are positive ("holds") or all negative ("contradicted").

        "open" if seeds disagree, the mean is too small or not significant, a value is missing, or
        seeds are too few.
        """
        values = self._select_values(differences)
        if not values or abs(mean(values)) < self.min_difference or not _is_significant(values):
            return "open"
        if min(values) > 0:
            return "holds"
        return "contradicted" if max(values) < 0 else "open"

    def _select_values(self, differences: Sequence[float | None]) -> list[float]:
        """Return the differences; none if a value is missing or seeds are too few."""
        values = select_finite(differences)
        return values if len(values) >= max(len(differences), self.min_seeds) else []


def decide_verdict(claims: Sequence[Claim]) -> Verdict:
    """Return the verdict on the claims of an experiment.

    Returns:
        "not reproduced" if a claim is contradicted, else "reproduced" if all claims hold, else
        "inconclusive". "exploratory" without claims.
    """
    if not claims:
        return "exploratory"
    outcomes = {claim.outcome for claim in claims}
    if "contradicted" in outcomes:
        return "not reproduced"
    return "reproduced" if outcomes == {"holds"} else "inconclusive"


def format_verdict(claims: Sequence[Claim]) -> str:
    """Return the verdict and its claims in Markdown, to start the page of an experiment."""
    verdict = decide_verdict(claims)
    suffix = " at this size" if verdict == "inconclusive" else ""
    heading = f"**{verdict.capitalize()}{suffix}.**"
    lines = [claim.to_markdown() for claim in claims] or ["No published claim is tested."]
    return "\n".join([heading, "", *lines])


def verdict_to_json(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the verdict and its claims as a JSON value."""
    return {
        "verdict": decide_verdict(claims),
        "claims": [
            {"text": claim.text, "outcome": claim.outcome, "differences": list(claim.differences)}
            for claim in claims
        ],
    }


def _is_significant(differences: Sequence[float]) -> bool:
    """Return whether paired differences have a mean other than 0, by a t-test.

    A single measurement, which does not depend on a seed, needs no test.
    """
    if len(differences) == 1:
        return True
    standard_error = stdev(differences) / math.sqrt(len(differences))
    critical_value = float(t.ppf(1 - _MAX_P_VALUE / 2, len(differences) - 1))
    return abs(mean(differences)) > critical_value * standard_error


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value exists and is neither NaN nor infinite."""
    return value is not None and math.isfinite(value)


def select_finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor NaN nor infinite."""
    return [value for value in values if is_finite(value)]


def find_minima(differences: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the minimum for each seed, None if a value is missing or NaN.

    Pre-training has a benefit if each model without pre-training is worse.
    """
    minima: list[float | None] = []
    for values in zip(*differences, strict=True):
        numbers = select_finite(values)
        minima.append(min(numbers) if len(numbers) == len(values) else None)
    return minima


def subtract(higher: Sequence[float | None], lower: Sequence[float | None]) -> list[float | None]:
    """Return the difference for each seed, None where a value is missing."""
    return [
        None if first is None or second is None else first - second
        for first, second in zip(higher, lower, strict=True)
    ]
