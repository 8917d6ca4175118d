"""Training: loop, optimizer, schedule, checkpoints. It never prints."""
