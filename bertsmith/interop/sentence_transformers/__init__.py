"""Reading and writing of sentence-transformers directories."""

from bertsmith.interop.sentence_transformers.pooling import (
    DOCUMENT_PROMPT_NAMES,
    QUERY_PROMPT_NAMES,
    Dense,
    PoolingConfig,
    build_embedding_model,
    read_pooling,
)
from bertsmith.interop.sentence_transformers.writing import (
    check_is_dense,
    check_is_expressible,
    resolve_pooling,
    save_sentence_transformers,
    write_sentence_transformers,
)

__all__ = [
    "DOCUMENT_PROMPT_NAMES",
    "QUERY_PROMPT_NAMES",
    "Dense",
    "PoolingConfig",
    "build_embedding_model",
    "check_is_dense",
    "check_is_expressible",
    "read_pooling",
    "resolve_pooling",
    "save_sentence_transformers",
    "write_sentence_transformers",
]
