"""The scales of an experiment: how large models are, how long they train, how much is scored.

It never knows a task or a text.
"""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.train.pretraining.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One scale. Steps are of ``batch`` sequences of ``length`` tokens.

    characters: of text, for vocabulary and store. layers, width, heads: of the usual model.
    positions: that it has. seeds: runs where a claim is made.
    examples: of a task's training file; epochs: over them; answers: of SQuAD's, fewer since they
    are long; articles: every so many-th of SQuAD's, in both files.
    next_sentence: whether the usual run learns it, as the paper's does. In few steps a small
    difference decides whether it is learnt at all; what follows from that (0.4 nats of the masked
    words, points of each task) would hide what an experiment asks about.
    """

    name: str
    recipe: Recipe
    characters: int
    vocabulary: int
    layers: int
    width: int
    heads: int
    positions: int
    length: int
    batch: int
    steps: int
    seeds: int
    examples: int | None
    answers: int | None
    epochs: float
    tune_rate: float
    tune_batch: int
    articles: int
    scored: int
    next_sentence: bool

    def model(self, **changes: Any) -> dict[str, Any]:
        """Return the model's sizes, and what differs in it, as settings."""
        sizes = {"layers": self.layers, "width": self.width, "heads": self.heads}
        sizes["max_positions"] = self.positions
        return sizes | changes

    def with_seeds(self, seeds: int | None) -> "Scale":
        """Return the scale with another number of seeds, None for its own."""
        return self if seeds is None else replace(self, seeds=seeds)


SCALES: dict[str, Scale] = {
    # Minutes for all experiments together: it shows that they run, not what they find.
    "smoke": Scale(
        name="smoke", recipe="fast", characters=120_000, vocabulary=400, layers=4, width=16,
        heads=2, positions=64, length=32, batch=8, steps=12, seeds=1, examples=48, answers=24,
        epochs=1.0, tune_rate=1e-3, tune_batch=8, articles=1, scored=32, next_sentence=False,
    ),
    # About four hours on two cores for all experiments together, a seed.
    "small": Scale(
        name="small", recipe="fast", characters=40_000_000, vocabulary=4000, layers=4, width=128,
        heads=4, positions=384, length=128, batch=32, steps=800, seeds=3, examples=5000,
        answers=2000, epochs=3.0, tune_rate=3e-4, tune_batch=32, articles=8, scored=256,
        next_sentence=False,
    ),
    # The paper's sizes: for those who have the machines.
    "full": Scale(
        name="full", recipe="paper", characters=10**12, vocabulary=30522, layers=12, width=768,
        heads=12, positions=512, length=128, batch=256, steps=1_000_000, seeds=3, examples=None,
        answers=None, epochs=3.0, tune_rate=3e-5, tune_batch=32, articles=1, scored=4096,
        next_sentence=True,
    ),
}  # fmt: skip
