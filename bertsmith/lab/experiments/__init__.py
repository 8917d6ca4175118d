"""The experiments of the lab, one module each, and all of them by name."""

from bertsmith.lab.experiment import Experiment
from bertsmith.lab.experiments import (
    activations,
    context,
    features,
    learning,
    masking,
    model_size,
    normalization,
    pooling,
    positions,
    pretraining_tasks,
    training_steps,
    vocabulary,
)

#: All experiments by name, in the order of the paper.
EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        pretraining_tasks, model_size, training_steps, features, masking, pooling, context,
        activations, normalization, positions, vocabulary, learning,
    )
}  # fmt: skip
