"""The service computes each batch of the batcher as one batch of the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import VectorSettings
from bertsmith.use.vectors import VectorSpec
from tests.serve.model_server import SENTENCES


def test_embeddings_are_computed_in_the_batches_of_the_batcher(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch exceeds ``batch_tokens`` after padding, and the vectors equal the embedder's."""
    texts = [SENTENCES[number % 5][: 1 + 7 * number] for number in range(20)]
    batch_lengths: list[list[int]] = []
    original_encode_batch = Embedder.encode_batch

    def recording_encode_batch(
        self: Embedder, sequences: Sequence[list[int]], spec: VectorSpec
    ) -> Any:
        batch_lengths.append([len(ids) for ids in sequences])
        return original_encode_batch(self, sequences, spec)

    expected = models[0].embedder.encode(texts)
    monkeypatch.setattr(Embedder, "encode_batch", recording_encode_batch)
    monkeypatch.delattr(Embedder, "encode_batches")
    service = Service(models[:1], ServeSettings(max_batch_tokens=64))
    try:
        vectors = service.embed(None, texts, VectorSettings())
    finally:
        service.close()
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert sum(map(len, batch_lengths)) == len(texts)
    assert max(len(lengths) * max(lengths) for lengths in batch_lengths) <= 64
    assert len(batch_lengths) < len(texts)
