"""The training loop and what every kind of training shares."""
