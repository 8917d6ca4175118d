"""Security headers of every response."""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers then send "Origin: null" with forms and some requests of scripts.
    "Referrer-Policy": "same-origin",
    # The oldest browsers do not know frame-ancestors.
    "X-Frame-Options": "DENY",
    # The page has a policy of its own. /docs has its style in the document.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
}


class SecurityHeaders:
    """ASGI middleware that adds security headers where a response has none of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its response back with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)
