"""Late interaction: compare each token of a query with all tokens of a line (MaxSim).

Khattab and Zaharia 2020 (ColBERT, arXiv:2004.12832). In shapes, Q is the number of tokens of a
query, S that of a line, and W the width of a vector.
"""

from collections.abc import Sequence

from bertsmith.use.embed import Embedder
from bertsmith.use.token_vectors import Floats
from bertsmith.use.vector_settings import VectorSettings


def encode_line_tokens(
    embedder: Embedder, settings: VectorSettings, texts: Sequence[str]
) -> list[Floats]:
    """Return the token vectors of each line, with [CLS] and [SEP]: float32 [S, W], length 1.

    Args:
        embedder: The model, with the prompt of the lines.
        settings: Settings of the vectors of an index, of which the layers are used.
        texts: The lines.
    """
    values = {"pooling": "none", "normalize": True, "include_special_tokens": True}
    spec = embedder.resolve_settings(settings.model_copy(update=values))
    token_vectors = embedder.encode_tokens_with_spec(texts, spec)
    return [text_vectors.vectors for text_vectors in token_vectors]


def encode_query_tokens(
    embedder: Embedder, settings: VectorSettings, texts: Sequence[str]
) -> list[Floats]:
    """Return the token vectors of each query, without [CLS] and [SEP], which every line has.

    The arguments are those of ``encode_line_tokens``.
    """
    all_vectors = encode_line_tokens(embedder, settings, texts)
    return [vectors[1:-1] if len(vectors) > 2 else vectors for vectors in all_vectors]


def compute_maxsim(query: Floats, lines: Sequence[Floats]) -> list[float]:
    """Return the MaxSim of a query and each line.

    This is the mean over the tokens of the query of the highest cosine similarity with a token of
    the line. ColBERT has the sum, which gives the same order.

    Args:
        query: float32 [Q, W], vectors of length 1.
        lines: For each line, float32 [S, W], vectors of length 1.
    """
    return [float((query @ line.T).max(1).mean()) for line in lines]
