"""Pre-training from a token store to a model directory."""
