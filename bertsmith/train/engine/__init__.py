"""The training loop, and what pre-training and fine-tuning share."""
