"""Training: loop, optimizer, schedule, checkpoints, pre-training and fine-tuning."""
