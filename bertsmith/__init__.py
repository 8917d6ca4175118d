"""Bertsmith: make your own BERT."""
