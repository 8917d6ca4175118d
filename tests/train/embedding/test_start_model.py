"""Settings that depend on whether the vectors of the start model are normalized."""

from typing import Any

import pytest

from bertsmith.errors import SettingsError
from bertsmith.interop.sentence_transformers import PoolingConfig
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.embedding.start_model import resolve_triplet_margin

NORMALIZED, NOT_NORMALIZED = PoolingConfig(post_modules=("normalize",)), PoolingConfig()


@pytest.mark.parametrize(
    ("pooling", "values", "margin"),
    [
        (NORMALIZED, {"triplet_distance": "euclidean"}, 0.5),
        (NOT_NORMALIZED, {"triplet_distance": "euclidean"}, 5.0),
        (NOT_NORMALIZED, {"triplet_distance": "euclidean", "matryoshka_dims": [8]}, 0.5),
        (NOT_NORMALIZED, {"triplet_distance": "cosine"}, 0.5),
        (NORMALIZED, {"triplet_distance": "euclidean", "triplet_margin": 1.9}, 1.9),
        (NOT_NORMALIZED, {"triplet_distance": "euclidean", "triplet_margin": 9.0}, 9.0),
    ],
)
def test_default_margin_depends_on_the_largest_distance(
    pooling: PoolingConfig, values: dict[str, Any], margin: float
) -> None:
    """It is 0.5 if distances are at most 2, else 5; that of the user is kept."""
    settings = resolve_triplet_margin(EmbeddingSettings(loss="triplet", **values), pooling)
    assert settings.triplet_margin == margin


@pytest.mark.parametrize(
    ("pooling", "values", "message"),
    [
        (NORMALIZED, {"triplet_distance": "euclidean"}, "Euclidean distance of normalized vectors"),
        (
            NOT_NORMALIZED,
            {"triplet_distance": "euclidean", "matryoshka_dims": [8]},
            "Euclidean distance of normalized vectors",
        ),
        (NOT_NORMALIZED, {"triplet_distance": "cosine"}, "the cosine distance is at most 2"),
    ],
)
def test_margin_that_no_triplet_exceeds_is_an_error(
    pooling: PoolingConfig, values: dict[str, Any], message: str
) -> None:
    """A margin of 2 or more has no effect on distances of at most 2."""
    settings = EmbeddingSettings(loss="triplet", triplet_margin=2.0, **values)
    with pytest.raises(SettingsError, match=message):
        resolve_triplet_margin(settings, pooling)


def test_other_losses_have_no_margin() -> None:
    """The margin of a run with another loss is not stored in its settings."""
    settings = resolve_triplet_margin(EmbeddingSettings(loss="mnrl"), NORMALIZED)
    assert settings.triplet_margin is None
