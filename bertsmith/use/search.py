"""Search embedded lines: which are nearest to a question, by the model that embedded them.

It never knows how neighbours are found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle import hash_model_files
from bertsmith.errors import InputError, ModelError
from bertsmith.files import parse_json
from bertsmith.text.unknown import TokenCounts
from bertsmith.use.embed import Embedder
from bertsmith.use.nearest_neighbors import GRAPH_FILE, VECTORS_FILE, VectorIndex, open_mapped_array
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings
from bertsmith.use.vector_writers import LINES_FILE, MANIFEST_FILE, OFFSETS_FILE


@dataclass(frozen=True)
class Hit:
    """A line of what was embedded: its number, from 1, its text, and its cosine to the question."""

    line: int
    text: str
    cosine: float


class Searcher:
    """An index that ``bertsmith embed`` made, with its model, ready to be asked."""

    def __init__(
        self, index: Path | str, *, model: Path | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """``model``: where the model is now, if it was moved. Raises QuestionError, ModelError."""
        self.path = Path(index)
        about = read_index_manifest(self.path)
        #: The tokens of the questions so far.
        self.token_counts = TokenCounts()
        self._embedder = _model(self.path, about, model, device).with_token_counter(
            self.token_counts
        )
        made = {name: about[name] for name in VectorSettings.model_fields}
        self._settings = build_vector_settings(made.pop("layers"), **made)
        self._neighbours = VectorIndex(self.path)
        self._places = open_mapped_array(self.path / OFFSETS_FILE)

    def __len__(self) -> int:
        return len(self._places) - 1

    def search(
        self, queries: Sequence[str], top: int = 5, *, exact: bool = False
    ) -> list[list[Hit]]:
        """Return the lines nearest to each question, the nearest first.

        ``exact``: every line is looked at, instead of those that the graph leads to.
        """
        if top < 1:
            raise InputError(f"top is {top}; expected 1 or more")
        embedder, settings = self._embedder, self._settings
        asked = embedder.encode_with_spec(queries, embedder.resolve_settings(settings))
        found = [self._neighbours.search(own, top, exact=exact) for own in asked]
        return [[Hit(row + 1, self._line(row), cosine) for row, cosine in own] for own in found]

    def _line(self, row: int) -> str:
        start, end = (int(place) for place in self._places[row : row + 2])
        with (self.path / LINES_FILE).open("rb") as lines:
            lines.seek(start)
            return lines.read(end - start - 1).decode()


def search(
    index: Path | str, queries: Sequence[str], top: int = 5, *, exact: bool = False,
    model: Path | str | None = None, device: torch.device | str = "cpu",
) -> list[list[Hit]]:  # fmt: skip
    """Return the lines of an index that are nearest to each question, the nearest first.

    Line numbers count from 1. ``exact``: every line is looked at. ``model``: where the model is
    now, if it was moved. To ask more than once, keep a ``Searcher``.
    Raises QuestionError, and ModelError where the model is gone or has changed.
    """
    return Searcher(index, model=model, device=device).search(queries, top, exact=exact)


def read_index_manifest(index: Path) -> dict[str, Any]:
    """Return what the index says of itself. Raises QuestionError where there is none."""
    names = {MANIFEST_FILE, VECTORS_FILE, GRAPH_FILE, LINES_FILE, OFFSETS_FILE}
    if not index.exists():
        raise InputError(
            f"{index}: there is nothing; make an index with: bertsmith embed MODEL FILE --out "
            "NAME.index"
        )
    missing = sorted(name for name in names if not (index / name).is_file())
    if missing:
        raise InputError(
            f"{index}: not an index (no {missing[0]} in it); make one with: bertsmith embed MODEL "
            "FILE --out NAME.index"
        )
    try:
        about = dict(parse_json((index / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        about = {}
    if not {"path", "model", "fast", *VectorSettings.model_fields} <= set(about):
        raise InputError(f"{index / MANIFEST_FILE}: it is broken; make the index anew")
    return about


def _model(
    index: Path, about: dict[str, Any], model: Path | str | None, device: torch.device | str
) -> Embedder:
    """Return the model that made the vectors, if it is still the same."""
    path = Path(str(model or about["path"]))
    if model is None and not path.is_dir():
        raise ModelError(
            f"{index}: it was made by the model {path}, which is not there any more; put it back, "
            "or say where it is now with --model (in Python, model=)"
        )
    embedder = Embedder.load(path, device=device, fast=bool(about["fast"]))
    if hash_model_files(embedder.path) != about["model"]:
        raise ModelError(
            f"{index}: the model at {path} is not the one that made this index: its files have "
            "changed; embed the lines anew, or say where the same model is with --model"
        )
    return embedder
