"""ASGI middleware that adds security headers to responses."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Headers of responses that do not set them themselves.
_SECURITY_HEADERS: Final[dict[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    # With the value no-referrer, browsers send "Origin: null" for forms and some scripts.
    "Referrer-Policy": "same-origin",
    # For old browsers, which do not support frame-ancestors.
    "X-Frame-Options": "DENY",
    # Other sites cannot load responses as images or scripts. CORS requests are not affected.
    "Cross-Origin-Resource-Policy": "same-origin",
    # The web page and /docs set their own policies.
    "Content-Security-Policy": (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # The web page sets its own value.
    "Cache-Control": "no-store",
}
_RAW_HEADERS: Final = [
    (name.lower().encode(), value.encode()) for name, value in _SECURITY_HEADERS.items()
]


class SecurityHeaders:
    """ASGI middleware that adds security headers unless the response sets them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and add the headers to its response."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                names = {name for name, _ in headers}
                headers += [header for header in _RAW_HEADERS if header[0] not in names]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)
