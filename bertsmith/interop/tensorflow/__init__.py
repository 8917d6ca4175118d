"""Imports and exports checkpoints of the original BERT (google-research/bert).

TensorFlow is not needed.
"""
