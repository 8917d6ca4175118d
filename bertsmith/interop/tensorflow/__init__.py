"""The original google-research/bert release: TensorFlow checkpoints in and out.

It never needs TensorFlow.
"""

from bertsmith.interop.tensorflow.reading import read_tensorflow
from bertsmith.interop.tensorflow.writing import write_tensorflow

__all__ = ["read_tensorflow", "write_tensorflow"]
