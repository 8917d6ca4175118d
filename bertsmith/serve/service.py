"""What a server can be asked, whoever asks: every model by its name, and what it can do.

It never knows HTTP. Every method waits for its answer and may be called from any thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.bundle import Bundle, EncoderBundle, TaskBundle, load_either, load_encoder, locate
from bertsmith.bundle.either import is_bare
from bertsmith.errors import ModelError
from bertsmith.use.answer import Answer, answer_each
from bertsmith.use.choose import Choice, choose_each
from bertsmith.use.embed import Embedder, Floats, TokenVectors
from bertsmith.use.fill import Filling, fill_each
from bertsmith.use.pair import Pairing, pair_each
from bertsmith.use.predict import Prediction, predict_each
from bertsmith.use.tag import Tagged, tag_each
from bertsmith.use.vectors import VectorSettings

#: What each kind of fine-tuned model can do.
_BY_KIND = {
    "single": "classify", "multi": "classify", "regression": "classify", "entities": "tag",
    "tags": "tag", "span": "answer", "choice": "choose",
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A loaded model. abilities: of "embed", "fill", "pair", "classify", "tag", "answer", "choose".

    Every model has a tokenizer and can embed.
    """

    name: str
    bundle: Bundle | TaskBundle | EncoderBundle
    embedder: Embedder
    abilities: frozenset[str]


def served(name: str, path: Path | str, *, device: str = "cpu", fast: bool = False) -> Served:
    """Load a model directory, RUN or hub id, with whatever heads it has. Raises ModelError."""
    directory = locate(path)
    bundle: Bundle | TaskBundle | EncoderBundle
    if is_bare(directory):
        bundle = load_encoder(directory, device=device)
    else:
        bundle = load_either(directory, device=device)
    can = {"embed"}
    if isinstance(bundle, TaskBundle):
        can.add(_BY_KIND[bundle.head.kind])
    elif isinstance(bundle, Bundle):
        can |= set() if any(own.startswith("mlm.") for own in bundle.new) else {"fill"}
        can |= {"pair"} if bundle.config.nsp else set()
    return Served(name, bundle, Embedder(bundle, fast=fast), frozenset(can))


class Service:
    """The loaded models, by name, in the order in which they were given."""

    def __init__(self, models: Iterable[Served]) -> None:
        self.models = {own.name: own for own in models}

    def able(self, ability: str) -> list[str]:
        """Return the names of the models that can do something."""
        return [name for name, own in self.models.items() if ability in own.abilities]

    def find(self, name: str | None, ability: str) -> Served:
        """Return the model of a name, or the first that is able; ModelError where there is none."""
        able = self.able(ability)
        if name is not None and name not in self.models:
            raise ModelError(
                f"there is no model {name!r} here; expected one of {', '.join(self.models)}"
            )
        if not able or (name is not None and name not in able):
            who = f"the model {name!r} cannot" if name is not None else "no model here can"
            others = f"; expected one of {', '.join(able)}" if able else ""
            raise ModelError(f"{who} {ability}{others}")
        return self.models[name or able[0]]

    def fill(self, name: str | None, texts: Sequence[str], top: int) -> list[list[Filling]]:
        """Return the likeliest words at each [MASK] of each text."""
        bundle = self.find(name, "fill").bundle
        assert isinstance(bundle, Bundle)
        return list(fill_each(bundle, texts, top))

    def pair(self, name: str | None, pairs: Sequence[tuple[str, str]]) -> list[Pairing]:
        """Return how probable it is that B follows A, for each pair."""
        bundle = self.find(name, "pair").bundle
        assert isinstance(bundle, Bundle)
        return list(pair_each(bundle, pairs))

    def classify(
        self, name: str | None, texts: Sequence[str | tuple[str, str]]
    ) -> list[Prediction]:
        """Return the labels, or the number, of each text or pair."""
        return list(predict_each(self._task(name, "classify"), texts))

    def tag(self, name: str | None, texts: Sequence[str]) -> list[Tagged]:
        """Return the entities, or the tags, of each text."""
        return list(tag_each(self._task(name, "tag"), texts))

    def answer(self, name: str | None, questions: Sequence[tuple[str, str]]) -> list[Answer]:
        """Return the answer to each (question, context)."""
        return list(answer_each(self._task(name, "answer"), questions))

    def choose(
        self, name: str | None, questions: Sequence[tuple[str, Sequence[str]]]
    ) -> list[Choice]:
        """Return which ending fits, for each (prompt, endings)."""
        return list(choose_each(self._task(name, "choose"), questions))

    def embed(self, name: str | None, texts: Sequence[str], settings: VectorSettings) -> Floats:
        """Return a vector for each text, float32 [n, W]."""
        raise NotImplementedError

    def tokens(
        self, name: str | None, texts: Sequence[str], settings: VectorSettings
    ) -> list[TokenVectors]:
        """Return the vectors of each text's tokens."""
        raise NotImplementedError

    def _task(self, name: str | None, ability: str) -> TaskBundle:
        bundle = self.find(name, ability).bundle
        assert isinstance(bundle, TaskBundle)
        return bundle
