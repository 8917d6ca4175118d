"""What the page can be asked by a program, by name, as plain values. It never makes HTML."""

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from bertsmith.errors import BertsmithError
from bertsmith.serve.page.inspection import Looking
from bertsmith.serve.page.library import gr
from bertsmith.serve.service import Service

Given = ParamSpec("Given")
Said = TypeVar("Said")


def refused(function: Callable[Given, Said]) -> Callable[Given, Said]:
    """Return a function that tells the client what is wrong: values of other types, our errors."""
    strict = validate_call(config=ConfigDict(strict=True))(function)
    names = list(signature(function).parameters)

    @wraps(function)
    def told(*given: Given.args, **named: Given.kwargs) -> Said:
        try:
            return strict(*given, **named)
        except ValidationError as error:
            first = error.errors()[0]
            # What was given by its place is named as if by its name.
            place, *within = first["loc"]
            place = names[place] if isinstance(place, int) else place
            place = ".".join(map(str, (place, *within)))
            raise gr.Error(f"{place}: {first['msg']}", print_exception=False) from None
        except BertsmithError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return told


def endpoints(service: Service, looking: Looking) -> None:
    """Name what the loaded models can do; inside ``gr.Blocks``. An empty model: the first able."""
    for ability, function in (_texts(service) | _of_task(service)).items():
        if service.models_with(ability):
            gr.api(refused(function), api_name=ability)
    if service.models:
        for name, function in _looks(looking).items():
            gr.api(refused(function), api_name=name)


def _texts(service: Service) -> dict[str, Callable[..., Any]]:
    """What pre-trained models are asked."""

    def fill(text: str, top: int = 5, model: str = "") -> list[dict[str, Any]]:
        """Return the likeliest words for each [MASK]."""
        (found,) = service.fill(model or None, [text], top)
        return [asdict(own) for own in found]

    def pair(a: str, b: str, model: str = "") -> dict[str, Any]:
        """Return how probable it is that B follows A."""
        (found,) = service.pair(model or None, [(a, b)])
        return asdict(found)

    return {"fill": fill, "pair": pair}


def _of_task(service: Service) -> dict[str, Callable[..., Any]]:
    """What fine-tuned models are asked."""

    def classify(text: str, second: str = "", model: str = "") -> dict[str, Any]:
        """Return labels with their probabilities, or a number."""
        (found,) = service.classify(model or None, [(text, second) if second else text])
        return asdict(found)

    def tag(text: str, model: str = "") -> dict[str, Any]:
        """Return entities, or the tags of words."""
        (found,) = service.tag(model or None, [text])
        return asdict(found)

    def answer(question: str, context: str, model: str = "") -> dict[str, Any]:
        """Return the answer that stands in a context."""
        (found,) = service.answer(model or None, [(question, context)])
        return asdict(found)

    def choose(prompt: str, endings: list[str], model: str = "") -> dict[str, Any]:
        """Return how well each ending fits."""
        (found,) = service.choose(model or None, [(prompt, endings)])
        return asdict(found)

    return {"classify": classify, "tag": tag, "answer": answer, "choose": choose}


def _looks(looking: Looking) -> dict[str, Callable[..., Any]]:
    """What every model is asked."""

    def word(word: str, texts: list[str], layer: int = -1, model: str = "") -> dict[str, Any]:
        """Return cosine distances of a word in several texts; layer 0: embeddings, -1: last."""
        maps = looking.word(model or None, word, tuple(texts))
        state = looking.state(model or None, layer)
        places = [{"text": own.text, "start": own.start, "end": own.end} for own in maps.places]
        return {
            "word": word, "layer": state, "places": places,
            "distances": maps.distances[state].tolist(), "points": maps.points[state].tolist(),
        }  # fmt: skip

    def attention(
        text: str, pair: str = "", layer: int = 1, head: int = 1, model: str = ""
    ) -> dict[str, Any]:
        """Return how much each token looks at each, of one head; layers and heads count from 1."""
        found = looking.attention(model or None, text, pair)
        looking.check(found, layer, head)
        return {
            "tokens": found.tokens, "segments": found.segments, "layer": layer, "head": head,
            "probabilities": found.probabilities[layer - 1, head - 1].tolist(),
            "left_out": found.left_out,
        }  # fmt: skip

    return {"word": word, "attention": attention}
