"""Allow list in front of Gradio's app: the page, its assets and its API description."""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serve.errors import create_error_response
from bertsmith.serve.page.calls import API

#: Paths whose responses are cached; they are the same for all visitors.
_CACHED = ("/", "/config", f"{API}/info")
_FILES = ("/theme.css", "/robots.txt", "/manifest.json", "/favicon.ico")
_FOLDERS = ("/assets/", "/static/")
#: Headers passed to Gradio. With Host or X-Forwarded-Host, clients could set the page's root URL.
_HEADERS = {b"accept-encoding", b"if-none-match", b"if-modified-since", b"range"}
#: Root URL that Gradio sees and shows in its code examples.
_ROOT = "http://localhost:8080"
#: Root URL as a JavaScript expression, correct behind a proxy that adds TLS, a name or a path.
_BROWSER_ROOT = 'new URL(".",location.href).href.replace(/\\/$/,"")'
_INLINE_SCRIPT = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True)
class _Page:
    content: bytes
    headers: Mapping[str, str]
    media_type: str


class Gateway:
    """ASGI app that serves an allow list of Gradio's paths with GET and HEAD."""

    def __init__(self, gradio_app: ASGIApp) -> None:
        self._gradio_app = gradio_app
        self._cached: dict[str, _Page] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in {*_CACHED, *_FILES} and not path.startswith(_FOLDERS):
            message = f"there is no endpoint {path}; see /docs"
            await create_error_response(404, message)(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            allow = {"Allow": "GET, HEAD"}
            await create_error_response(405, f"{path} accepts GET only", allow)(
                scope, receive, send
            )
        elif path in _CACHED:
            if path not in self._cached:
                self._cached[path] = await self._build(path)
            page = self._cached[path]
            # A new response each time, because middleware changes its headers.
            response = Response(page.content, headers=page.headers, media_type=page.media_type)
            await response(scope, receive, send)
        else:
            headers = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
            await self._gradio_app(_scope(path, scope["method"], headers), receive, send)

    async def _build(self, path: str) -> _Page:
        """Return Gradio's response for a path, independent of the request's host."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        await self._gradio_app(_scope(path, "GET", []), receive, send)
        body = b"".join(message.get("body", b"") for message in messages)
        assert messages[0]["status"] == 200
        if path != "/":
            # Clients replace an empty root by the server's address.
            return _Page(body.replace(orjson.dumps(_ROOT), b'""'), {}, "application/json")
        html = body.decode().replace(f'"{_ROOT}"', _BROWSER_ROOT)
        return _Page(html.encode(), _page_headers(html), "text/html")


def _scope(path: str, method: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    host = _ROOT.rpartition("/")[2].encode()
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [(b"host", host), *headers],
        "server": ("localhost", 8080), "client": None,
    }  # fmt: skip


def _page_headers(html: str) -> Mapping[str, str]:
    """Return headers that restrict the page to its own scripts and this server."""
    digests = [hashlib.sha256(script.encode()).digest() for script in _INLINE_SCRIPT.findall(html)]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = {
        "default-src": "'none'",
        # Gradio compiles the templates of its components.
        "script-src": f"'self' 'unsafe-eval' {hashes}",
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data:",
        "font-src": "'self'",
        "connect-src": "'self'",
        "manifest-src": "'self'",
        "base-uri": "'self'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    value = "; ".join(f"{name} {sources}" for name, sources in policy.items())
    return {"Content-Security-Policy": value, "Cache-Control": "no-cache"}
