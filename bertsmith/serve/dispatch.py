"""Call endpoints without FastAPI's routing and middleware, which cost as much as a short text.

FastAPI still describes the endpoints (OpenAPI), and answers all other requests.
"""

from collections.abc import Iterable

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.serve.clients import get_path
from bertsmith.serve.errors import create_exception_response


class EndpointDispatcher:
    """ASGI app that calls the POST endpoints of routers; another app answers other requests."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        """Find the POST endpoints.

        Args:
            app: answers other requests.
            routes: routes of all routers. Paths of POST endpoints must not have parameters.
        """
        self._app = app
        self._endpoints = {
            route.path: (route, route.get_route_handler())
            for route in routes
            if isinstance(route, APIRoute) and "POST" in (route.methods or ())
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(get_path(scope))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        # The path of the route is the endpoint's name in metrics and traces.
        scope["route"], handle = endpoint
        try:
            response = await handle(Request(scope, receive, send))
        except Exception as error:  # noqa: BLE001 - the client gets a response for every error
            response = create_exception_response(error)
        await response(scope, receive, send)
