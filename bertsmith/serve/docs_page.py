"""The page /docs: all endpoints as static HTML, rendered from the OpenAPI schema.

FastAPI's documentation pages load scripts from a CDN. This page loads nothing.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER
from bertsmith.text.unknown import MAX_UNKNOWN_SHARE

_CSS = """
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
h2{margin-top:2rem;font-size:1.1rem}code,pre{font-family:ui-monospace,monospace;font-size:.9rem}
pre{background:#8881;padding:.7rem;overflow-x:auto;border-radius:.4rem}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}
:root{color-scheme:light dark}
"""
_CSS_SHA256 = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode()
#: Headers of the page. The policy allows exactly this style sheet.
DOCS_HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_CSS_SHA256}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
}
#: Example request body of each endpoint that takes a body, without the model.
_EXAMPLE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a sentence", "another one"]},
    "/embed": {"inputs": ["a sentence", "another one"], "layer": -2, "pooling": "mean"},
    "/embed_all": {"inputs": "a sentence"},
    "/similarity": {"inputs": {"source_sentence": "a cat sleeps", "sentences": ["a dog sleeps"]}},
    "/word_distances": {"inputs": ["the bank of the river", "money in the bank"], "word": "bank"},
    "/attention": {"inputs": "a sentence", "layer": 1, "head": 1},
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


def render_docs(
    schema: dict[str, Any], base_url: str, models: Sequence[ServedModel], *, needs_key: bool = False
) -> str:
    """Return an OpenAPI schema as an HTML page.

    Args:
        schema: the OpenAPI schema.
        base_url: URL of the server as the reader's request has it, with a slash at its end.
        models: the loaded models, which the examples name.
        needs_key: whether requests need the API key.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Bertsmith: endpoints</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_CSS}</style><h1>Endpoints</h1><p>Errors are JSON: ",
        '<code>{"error": {"message", "type", "code"}}</code>. ',
        f"A response has the header <code>{UNKNOWN_SHARE_HEADER}: 0.84</code> if more than ",
        f"{MAX_UNKNOWN_SHARE:.0%} of the tokens of the request's texts are [UNK] (here 84%). Then ",
        "the model's vocabulary does not cover the texts; choose a model for their language. ",
        "Machine-readable schema: <a href=/openapi.json>/openapi.json</a>.</p>",
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            heading = f"<code>{method.upper()} {escape(path)}</code>"
            parts.append(f'<h2 id="{escape(path)}">{heading}</h2>')
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            if path in _EXAMPLE_BODIES:
                url = base_url.removesuffix("/") + path
                parts.append(_render_example(path, url, models, needs_key=needs_key))
            parts.append(_render_fields(operation, schema))
    return "".join(parts)


def _render_example(path: str, url: str, models: Sequence[ServedModel], *, needs_key: bool) -> str:
    """Return a curl command for an endpoint that takes a body.

    The command names a loaded model; if no loaded model supports the endpoint, a note says so.
    """
    task = {"/predict": "classify"}.get(path, path.rpartition("/")[2])
    if task not in ("fill", "pair", "rerank", "classify", "tag", "answer", "choose"):
        task = "embed"  # Every model supports the other endpoints.
    names = [model.name for model in models if task in model.tasks]
    body = ({"model": names[0]} if names else {}) | _EXAMPLE_BODIES[path]
    key = '-H "Authorization: Bearer $BERTSMITH_API_KEY" ' if needs_key else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    command = f"curl -s {shlex.quote(url)} {key}-H 'Content-Type: application/json' \\\n  -d {data}"
    note = "" if names else f"<p>No loaded model can {task}.</p>"
    return f"{note}<pre>{escape(command)}</pre>"


def _render_fields(operation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a table of the fields of an operation's body; empty if it takes no body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    body = schema.get("components", {}).get("schemas", {}).get(name)
    if body is None:
        return ""
    rows = []
    for field, properties in body["properties"].items():
        is_required = field in body.get("required", ())
        default = "required" if is_required else json.dumps(properties.get("default"))
        description = escape(properties.get("description", ""))
        rows.append(f"<tr><td><code>{escape(field)}</code><td>{escape(default)}<td>{description}")
    return f"<table><tr><th>field<th>default<th>{''.join(rows)}</table>"
