"""Imports and exports checkpoints of the original BERT (google-research/bert).

TensorFlow is not needed.
"""

from bertsmith.interop.tensorflow.reading import read_tensorflow
from bertsmith.interop.tensorflow.writing import write_tensorflow

__all__ = ["read_tensorflow", "write_tensorflow"]
