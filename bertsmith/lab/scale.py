"""The scales of an experiment: how large models are, how long they train, how much is scored.

It never knows a task or a text.
"""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.train.pretraining.recipes import RecipeName


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One scale. Steps are of ``batch`` sequences of ``length`` tokens.

    max_characters: of text, for vocabulary and store. layers, width, heads: of the usual model.
    max_positions: that it has. seeds: runs where a claim is made.
    max_train_examples: of a task's training file; epochs: over them; answers: of SQuAD's, fewer since they
    are long; articles: every so many-th of SQuAD's, in both files.
    nsp: whether the usual run learns it, as the paper's does. In few steps a small
    difference decides whether it is learnt at all; what follows from that (0.4 nats of the masked
    words, points of each task) would hide what an experiment asks about.
    """

    name: str
    recipe: RecipeName
    max_characters: int
    vocab_size: int
    layers: int
    width: int
    heads: int
    max_positions: int
    max_length: int
    batch_size: int
    num_steps: int
    num_seeds: int
    max_train_examples: int | None
    max_squad_examples: int | None
    epochs: float
    finetune_lr: float
    finetune_batch_size: int
    squad_article_step: int
    num_eval_sequences: int
    nsp: bool

    def model_settings(self, **changes: Any) -> dict[str, Any]:
        """Return the model's sizes, and what differs in it, as settings."""
        sizes = {"layers": self.layers, "width": self.width, "heads": self.heads}
        sizes["max_positions"] = self.max_positions
        return sizes | changes

    def with_seeds(self, seeds: int | None) -> "Scale":
        """Return the scale with another number of seeds, None for its own."""
        return self if seeds is None else replace(self, num_seeds=seeds)


SCALES: dict[str, Scale] = {
    # Minutes for all experiments together: it shows that they run, not what they find.
    "smoke": Scale(
        name="smoke", recipe="fast", max_characters=120_000, vocab_size=400, layers=4, width=16,
        heads=2, max_positions=64, max_length=32, batch_size=8, num_steps=12, num_seeds=1, max_train_examples=48, max_squad_examples=24,
        epochs=1.0, finetune_lr=1e-3, finetune_batch_size=8, squad_article_step=1, num_eval_sequences=32, nsp=False,
    ),
    # About four hours on two cores for all experiments together, a seed.
    "small": Scale(
        name="small", recipe="fast", max_characters=40_000_000, vocab_size=4000, layers=4, width=128,
        heads=4, max_positions=384, max_length=128, batch_size=32, num_steps=800, num_seeds=3, max_train_examples=5000,
        max_squad_examples=2000, epochs=3.0, finetune_lr=3e-4, finetune_batch_size=32, squad_article_step=8, num_eval_sequences=256,
        nsp=False,
    ),
    # The paper's sizes: for those who have the machines.
    "full": Scale(
        name="full", recipe="paper", max_characters=10**12, vocab_size=30522, layers=12, width=768,
        heads=12, max_positions=512, max_length=128, batch_size=256, num_steps=1_000_000, num_seeds=3, max_train_examples=None,
        max_squad_examples=None, epochs=3.0, finetune_lr=3e-5, finetune_batch_size=32, squad_article_step=1, num_eval_sequences=4096,
        nsp=True,
    ),
}  # fmt: skip
