"""Reading and writing of sentence-transformers directories."""

from bertsmith.interop.sentence_transformers.pooling import (
    Dense,
    PoolingConfig,
    PoolingMode,
    read_pooling,
)
from bertsmith.interop.sentence_transformers.writing import write_sentence_transformers

__all__ = ["Dense", "PoolingConfig", "PoolingMode", "read_pooling", "write_sentence_transformers"]
