"""Fine-tuning of a model directory on a task."""
