"""Add security headers to every response."""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    # With the value no-referrer, browsers send "Origin: null" for forms and some scripts.
    "Referrer-Policy": "same-origin",
    # For old browsers, which do not support frame-ancestors.
    "X-Frame-Options": "DENY",
    # The web page sets its own policy. /docs has inline styles.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
}


class SecurityHeaders:
    """ASGI middleware that adds security headers unless the response sets them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and add the headers to its response."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)
