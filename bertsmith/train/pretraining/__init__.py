"""Pre-training on a token store."""
