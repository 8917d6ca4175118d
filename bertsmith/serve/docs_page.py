"""The page /docs: all endpoints as static HTML, rendered from the OpenAPI schema.

FastAPI's documentation pages load scripts from a CDN. This page loads nothing.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Iterator
from html import escape
from typing import Any, Final

from bertsmith.serve.examples import get_task
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER
from bertsmith.text.unknown import MAX_UNKNOWN_SHARE

_CSS = """
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}
h2{margin-top:2rem;font-size:1.1rem}code,pre{font-family:ui-monospace,monospace;font-size:.9rem}
pre{background:#8881;padding:.7rem;overflow-x:auto;border-radius:.4rem}
table{display:block;overflow-x:auto}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}
:root{color-scheme:light dark}
"""
_CSS_SHA256 = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode()
_NEEDS_KEY: Final = (
    "<p>Requests need the header <code>Authorization: Bearer KEY</code>. The commands read the key "
    "from the environment variable BERTSMITH_API_KEY.</p>"
)
#: Headers of the page. The policy allows exactly this style sheet.
DOCS_HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_CSS_SHA256}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
}


def render_docs(schema: dict[str, Any]) -> str:
    """Return the OpenAPI schema of ``build_openapi`` as an HTML page."""
    needs_key = "security" in schema
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Bertsmith: endpoints</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_CSS}</style><h1>Endpoints</h1>",
        _NEEDS_KEY if needs_key else "",
        "<p>Errors are JSON: ",
        '<code>{"error": {"message", "type", "code", "param"}}</code>. ',
        f"A response has the header <code>{UNKNOWN_SHARE_HEADER}: 0.84</code> if more than ",
        f"{MAX_UNKNOWN_SHARE:.0%} of the tokens of the request's texts are [UNK] (here 84%). Then ",
        "the model's vocabulary does not cover the texts; choose a model for their language. ",
        "Machine-readable schema: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            heading = f"<code>{method.upper()} {escape(path)}</code>"
            parts.append(f'<h2 id="{escape(path)}">{heading}</h2>')
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                url = schema["servers"][0]["url"] + path
                parts.append(_render_example(path, url, content["example"], needs_key=needs_key))
                parts.append(_render_object(content["schema"], schema, is_request=True))
            parts.append(_render_response(operation["responses"]["200"], schema))
    return "".join(parts)


def _render_example(path: str, url: str, body: dict[str, Any], *, needs_key: bool) -> str:
    """Return a curl command for an endpoint that takes a body.

    The body names a loaded model; if no loaded model supports the endpoint, a note says so.
    """
    key = '-H "Authorization: Bearer $BERTSMITH_API_KEY" ' if needs_key else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    command = f"curl -s {shlex.quote(url)} {key}-H 'Content-Type: application/json' \\\n  -d {data}"
    note = "" if "model" in body else f"<p>No loaded model can {get_task(path)}.</p>"
    return f"{note}<pre>{escape(command)}</pre>"


def _render_response(response: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the type of a JSON response, with a table of the fields of each object in it."""
    content = response["content"].get("application/json", {}).get("schema")
    if content is None:
        return ""
    parts = [f"<p>Response: <code>{escape(describe_type(content))}</code></p>"]
    references = list(dict.fromkeys(_iter_references(content, schema)))
    for reference in references:
        if len(references) > 1:
            parts.append(f"<p><code>{escape(_get_name(reference))}</code></p>")
        parts.append(_render_object({"$ref": reference}, schema))
    return "".join(parts)


def describe_type(content: dict[str, Any]) -> str:
    """Return a JSON schema in short, such as "list[number] | null"."""
    if "$ref" in content:
        return _get_name(content["$ref"])
    branches = content.get("anyOf") or content.get("oneOf")
    if branches is not None:
        return " | ".join(dict.fromkeys(map(describe_type, branches)))
    if "enum" in content or "const" in content:
        return " | ".join(map(json.dumps, content.get("enum") or [content["const"]]))
    if "prefixItems" in content:
        return f"[{', '.join(map(describe_type, content['prefixItems']))}]"
    if content.get("type") == "array":
        return f"list[{describe_type(content['items'])}]"
    name = content.get("type", "any")
    return " | ".join(name) if isinstance(name, list) else str(name)


def _iter_references(content: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the references to objects in a JSON schema, including those of the objects."""
    if isinstance(content, list):
        for item in content:
            yield from _iter_references(item, schema)
    elif isinstance(content, dict) and "$ref" in content:
        yield content["$ref"]
        body = schema["components"]["schemas"][_get_name(content["$ref"])]
        yield from _iter_references(body["properties"], schema)
    elif isinstance(content, dict):
        yield from _iter_references(list(content.values()), schema)


def _get_name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _render_object(
    content: dict[str, Any], schema: dict[str, Any], *, is_request: bool = False
) -> str:
    """Return a table of the fields of an object; the defaults only for requests."""
    body = schema["components"]["schemas"][_get_name(content["$ref"])]
    rows = []
    for field, properties in body["properties"].items():
        cells = [
            f"<code>{escape(field)}</code>",
            f"<code>{escape(describe_type(properties))}</code>",
        ]
        is_required = field in body.get("required", ())
        if is_request:
            default = json.dumps(properties.get("default"))
            cells.append("required" if is_required else escape(default))
        else:
            cells.append("" if is_required else "optional")
        cells.append(escape(properties.get("description", "")))
        rows.append(f"<tr><td>{'<td>'.join(cells)}")
    default = "default" if is_request else ""
    return f"<table><tr><th>field<th>type<th>{default}<th>{''.join(rows)}</table>"
