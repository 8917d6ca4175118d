"""Scales of the experiments: sizes of models, training runs and evaluations."""

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.train.engine.settings import OptimizerName
from bertsmith.train.pretraining.recipes import RecipeName


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of models, training runs and evaluations in all experiments.

    Attributes:
        name: The name on the command line.
        recipe: The pre-training recipe.
        max_characters: Maximum characters of text for the vocabulary and the store.
        vocab_size: Vocabulary size.
        layers: Layers of the baseline model.
        width: Hidden width of the baseline model.
        heads: Attention heads of the baseline model.
        max_positions: Position embeddings of the baseline model.
        max_length: Maximum tokens per pre-training sequence.
        batch_size: Sequences per pre-training step.
        num_steps: Pre-training steps.
        num_seeds: Seeds per configuration.
        tasks: The fine-tuning tasks of the experiments pretraining-tasks, model-size and
            training-steps; empty for those that each experiment names.
        max_train_examples: Maximum training examples of tasks except SQuAD, None for all.
        max_squad_examples: Maximum training examples of SQuAD, None for all.
        epochs: Fine-tuning epochs.
        finetune_lr: Learning rate of fine-tuning.
        finetune_batch_size: Examples per fine-tuning step.
        squad_article_step: Only every n-th article of the SQuAD files is used.
        num_eval_sequences: Held-out sequences per evaluation.
        nsp: Whether the baseline is trained with next-sentence prediction (NSP), as in the paper.
            Some short runs learn NSP and others do not, depending on small differences. This
            changes the MLM loss by 0.4 nats and task scores by several points, which would hide
            the effects that the experiments measure.
        initialization: The value of run.initialization of all runs, None for that of the recipe.
        neighbor_bias_steps: The value of schedule.neighbor_bias_steps of all masked-LM runs.
        optimizer: The value of optim.optimizer of all runs, None for that of the recipe.
        num_snapshots: Number of evenly spaced checkpoints of a pre-training run.
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
    tasks: tuple[str, ...] = ()
    initialization: str | None = None
    neighbor_bias_steps: int = 0
    optimizer: OptimizerName | None = None
    num_snapshots: int = 5

    def build_model_settings(self, **changes: Any) -> dict[str, Any]:
        """Return the settings of the baseline model, updated with ``changes``."""
        sizes = {"layers": self.layers, "width": self.width, "heads": self.heads}
        sizes["max_positions"] = self.max_positions
        return sizes | changes

    def with_seeds(self, num_seeds: int | None) -> "Scale":
        """Return the scale with another number of seeds, or unchanged for None."""
        return self if num_seeds is None else replace(self, num_seeds=num_seeds)


SCALES: dict[str, Scale] = {
    # Runs all experiments in minutes to check that they work. The results are meaningless.
    "smoke": Scale(
        name="smoke", recipe="fast", max_characters=120_000, vocab_size=400, layers=4, width=16,
        heads=2, max_positions=64, max_length=32, batch_size=8, num_steps=12, num_seeds=1,
        max_train_examples=48, max_squad_examples=24, epochs=1.0, finetune_lr=1e-3,
        finetune_batch_size=8, squad_article_step=1, num_eval_sequences=32, nsp=False,
    ),
    # All experiments together take about four hours per seed on two cores.
    "small": Scale(
        name="small", recipe="fast", max_characters=40_000_000, vocab_size=4000, layers=4,
        width=128, heads=4, max_positions=384, max_length=128, batch_size=32, num_steps=800,
        num_seeds=3, max_train_examples=5000, max_squad_examples=2000, epochs=3.0,
        finetune_lr=3e-4, finetune_batch_size=32, squad_article_step=8, num_eval_sequences=256,
        nsp=False,
    ),
    # The experiments pretraining-tasks, model-size and training-steps together take about 14
    # core-hours. The initialization is not structured, so that downstream tasks show what is
    # learned; with the bias and Muon, masked LM learns from context within the 4,000 steps also in
    # narrow models (docs/notebook.md). With 4,000 steps, pre-training improves named entity
    # recognition, but hardly the other tasks of the experiments.
    "medium": Scale(
        name="medium", recipe="fast", max_characters=60_000_000, vocab_size=8000, layers=4,
        width=256, heads=4, max_positions=384, max_length=128, batch_size=16, num_steps=4000,
        num_seeds=3, max_train_examples=10_000, max_squad_examples=2000, epochs=3.0,
        finetune_lr=3e-4, finetune_batch_size=32, squad_article_step=8, num_eval_sequences=256,
        nsp=False, tasks=("conll2003", "sst-2"), initialization="unigram",
        neighbor_bias_steps=1000, optimizer="muon", num_snapshots=4,
    ),
    # The sizes of the paper.
    "full": Scale(
        name="full", recipe="paper", max_characters=10**12, vocab_size=30522, layers=12, width=768,
        heads=12, max_positions=512, max_length=128, batch_size=256, num_steps=1_000_000,
        num_seeds=3, max_train_examples=None, max_squad_examples=None, epochs=3.0,
        finetune_lr=3e-5, finetune_batch_size=32, squad_article_step=1, num_eval_sequences=4096,
        nsp=True,
    ),
}  # fmt: skip
