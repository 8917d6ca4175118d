"""Example requests of the endpoints, for the OpenAPI schema and the page /docs."""

from collections.abc import Sequence
from typing import Any, Final

from bertsmith.serve.models import ServedModel

#: Example request body of each endpoint that takes a body, without the model.
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/embeddings": {"input": ["a sentence", "another one"]},
    "/embed": {"inputs": ["a sentence", "another one"]},
    "/embed_sparse": {"inputs": "a sentence"},
    "/embed_all": {"inputs": "a sentence"},
    "/similarity": {"inputs": {"source_sentence": "a cat sleeps", "sentences": ["a dog sleeps"]}},
    "/word_distances": {"inputs": ["the bank of the river", "money in the bank"], "word": "bank"},
    "/attention": {"inputs": "a sentence", "layer": 1, "head": 1},
    "/attributions": {"inputs": "a fine piece of work"},
    "/rerank": {"query": "where do fish live?", "texts": ["Fish live in water.", "I am tired."]},
    "/v1/rerank": {"query": "where do fish live?", "documents": ["In water.", "I am tired."]},
    "/v2/rerank": {"query": "where do fish live?", "documents": ["In water.", "I am tired."]},
    "/": {"inputs": "a sentence"},
    "/predict": {"inputs": "a fine piece of work"},
    "/decode": {"ids": [5, 6]},
    "/tokenize": {"inputs": "a sentence"},
    "/fill": {"inputs": "my dog is [MASK]", "top": 3},
    "/pair": {"inputs": ["Open the file.", "Then read its first line."]},
    "/classify": {"inputs": "a fine piece of work"},
    "/tag": {"inputs": "Peter Blackburn flew from Oslo to Brussels."},
    "/answer": {"inputs": {"question": "Who flew?", "context": "Peter flew from Oslo."}},
    "/choose": {"inputs": {"prompt": "The oven is hot.", "endings": ["It cools.", "It bakes."]}},
}
#: Task of the endpoints that are not named after their task and that not every model supports.
_TASKS: Final = {
    "/predict": "classify",
    "/attention": "inspect",
    "/attributions": "classify",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/word_distances": "inspect",
}


def get_task(path: str) -> str:
    """Return the task that a model must support for an endpoint."""
    task = _TASKS.get(path, path[1:])
    # Every model supports the other endpoints.
    tasks = ("embed_sparse", "fill", "pair", "classify", "tag", "answer", "choose", "rerank")
    return task if task in (*tasks, "inspect") else "embed"


def build_example(path: str, models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return an example body that names the first loaded model which supports the endpoint.

    Without such a model, the body names none.

    Args:
        path: path of an endpoint that takes a body.
        models: the loaded models.
    """
    model = next((model for model in models if get_task(path) in model.tasks), None)
    body = _BODIES[path]
    if model is None:
        return body
    if path == "/" and "answer" in model.tasks:
        # The endpoint accepts what the model was trained for.
        body = _BODIES["/answer"]
    return {"model": model.name} | body
