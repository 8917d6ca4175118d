"""Training of sentence-embedding models."""
