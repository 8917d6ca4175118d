"""Named endpoints of the page for programs (Gradio clients), with plain values."""

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from bertsmith.errors import BertsmithError
from bertsmith.serve.page.inspection import ModelInspector
from bertsmith.serve.page.library import gr
from bertsmith.serve.service import Service

Params = ParamSpec("Params")
Result = TypeVar("Result")


def report_errors(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Wrap a function to report invalid arguments and BertsmithErrors to the client."""
    strict = validate_call(config=ConfigDict(strict=True))(function)
    parameters = list(signature(function).parameters)

    @wraps(function)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return strict(*args, **kwargs)
        except ValidationError as error:
            first_error = error.errors()[0]
            parameter, *path = first_error["loc"]
            # Positional arguments are reported by index; show the parameter's name instead.
            name = parameters[parameter] if isinstance(parameter, int) else parameter
            location = ".".join(map(str, (name, *path)))
            raise gr.Error(f"{location}: {first_error['msg']}", print_exception=False) from None
        except BertsmithError as error:
            raise gr.Error(str(error), print_exception=False) from None

    return wrapper


def add_endpoints(service: Service, inspector: ModelInspector) -> None:
    """Add an endpoint for each ability of the models; call it within ``gr.Blocks``.

    An empty model name stands for the first model with the ability.
    """
    functions = _pretrained_functions(service) | _fine_tuned_functions(service)
    for ability, function in functions.items():
        if service.get_model_names(ability):
            gr.api(report_errors(function), api_name=ability)
    if service.models:
        for name, function in _inspection_functions(inspector).items():
            gr.api(report_errors(function), api_name=name)


def _pretrained_functions(service: Service) -> dict[str, Callable[..., Any]]:
    def fill(text: str, top: int = 5, model: str = "") -> list[dict[str, Any]]:
        """Return the most probable tokens for each [MASK]."""
        (masks,) = service.fill(model or None, [text], top)
        return [asdict(mask) for mask in masks]

    def pair(a: str, b: str, model: str = "") -> dict[str, Any]:
        """Return the probability that B follows A."""
        (prediction,) = service.pair(model or None, [(a, b)])
        return asdict(prediction)

    return {"fill": fill, "pair": pair}


def _fine_tuned_functions(service: Service) -> dict[str, Callable[..., Any]]:
    def classify(text: str, second: str = "", model: str = "") -> dict[str, Any]:
        """Return labels with their probabilities, or the score of a regression model."""
        (prediction,) = service.classify(model or None, [(text, second) if second else text])
        return asdict(prediction)

    def tag(text: str, model: str = "") -> dict[str, Any]:
        """Return the entities of a text, or the tags of its words."""
        (tagged,) = service.tag(model or None, [text])
        return asdict(tagged)

    def answer(question: str, context: str, model: str = "") -> dict[str, Any]:
        """Return the answer to a question from a context."""
        (result,) = service.answer(model or None, [(question, context)])
        return asdict(result)

    def choose(prompt: str, endings: list[str], model: str = "") -> dict[str, Any]:
        """Return the probability of each ending, and the best one."""
        (choice,) = service.choose(model or None, [(prompt, endings)])
        return asdict(choice)

    return {"classify": classify, "tag": tag, "answer": answer, "choose": choose}


def _inspection_functions(inspector: ModelInspector) -> dict[str, Callable[..., Any]]:
    def word(word: str, texts: list[str], layer: int = -1, model: str = "") -> dict[str, Any]:
        """Return cosine distances of a word in several texts; layer 0: embeddings, -1: last."""
        maps = inspector.word(model or None, word, tuple(texts))
        index = inspector.layer_index(model or None, layer)
        places = [
            {"text": vector.text_index, "start": vector.start, "end": vector.end}
            for vector in maps.occurrences
        ]
        return {
            "word": word,
            "layer": index,
            "places": places,
            "distances": maps.distances[index].tolist(),
            "points": maps.points[index].tolist(),
        }

    def attention(
        text: str, pair: str = "", layer: int = 1, head: int = 1, model: str = ""
    ) -> dict[str, Any]:
        """Return the attention probabilities of one head; layers and heads count from 1."""
        maps = inspector.attention(model or None, text, pair)
        inspector.check(maps, layer, head)
        return {
            "tokens": maps.tokens,
            "segments": maps.segments,
            "layer": layer,
            "head": head,
            "probabilities": maps.probabilities[layer - 1, head - 1].tolist(),
            "num_removed_tokens": maps.num_removed_tokens,
        }

    return {"word": word, "attention": attention}
