"""The app of a server: endpoints, errors, guard and page, around one service.

It never listens: see ``running``.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from bertsmith.serve.auth import ApiKey
from bertsmith.serve.docs_page import render_docs
from bertsmith.serve.embeddings import EmbeddingRoutes
from bertsmith.serve.errors import add_error_handlers, error_response
from bertsmith.serve.execution import RequestExecutor, to_json_response
from bertsmith.serve.hosts import HostCheck
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.models import ServedModel
from bertsmith.serve.routes import TaskRoutes
from bertsmith.serve.security_headers import SecurityHeaders
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.version import __version__

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def create_app(
    models: Sequence[ServedModel],
    settings: ServeSettings | None = None,
    *,
    key: str | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    page: Callable[[FastAPI, Service], FastAPI] | None = None,
) -> RequestMiddleware:
    """Return the ASGI app of some models.

    key: what clients must send, and visitors of the page give as a password; None lets everybody
    in. origins: pages of other hosts that may ask from a browser (CORS). hosts: names that the
    server answers to, see ``hosts.allowed_hosts``; None for all. page: what puts a page for people
    at /.
    """
    settings, metrics = settings or ServeSettings(), Metrics()
    service = Service(models, settings, metrics.count_batch, metrics.token_counter)
    metrics.watch_queue(lambda: float(service.batcher.waiting))
    asking = RequestExecutor(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        asking.close()

    app = FastAPI(
        title="Bertsmith", version=__version__, lifespan=lifespan, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    app.state.service = service
    add_error_handlers(app)
    # Without origins, which the guard answers: Gradio would let all of them in if the app that it
    # is in had no such middleware.
    app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"])
    if hosts is not None:
        app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(SecurityHeaders)
    _plain(app, service, metrics)
    app.include_router(EmbeddingRoutes(asking).router)
    app.include_router(TaskRoutes(asking).router)
    if page is not None:
        # Last, since it answers every path that is left, and even other methods of ours.
        _refuse_other_methods(app)
        app = page(app, service)
    asked = None if key is None else ApiKey(key, page=page is not None)
    return RequestMiddleware(app, settings=settings, metrics=metrics, key=asked, origins=origins)


def _refuse_other_methods(app: FastAPI) -> None:
    """Answer 405 to the methods that an endpoint does not take, before anything else is asked."""
    for path, methods in app.openapi()["paths"].items():
        taken = sorted(map(str.upper, methods))

        async def refuse(_: Request, allowed: str = ", ".join(taken)) -> Response:
            raise HTTPException(405, headers={"Allow": allowed})

        others = [name for name in _METHODS if name not in taken]
        app.router.add_route(path, refuse, others, include_in_schema=False)


def _plain(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Add what tells of the server itself."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Tell that the server lives."""
        return to_json_response({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Tell whether the server takes work."""
        if service.batcher.is_alive:
            return to_json_response({"status": "ready"})
        return error_response(503, "the server is being stopped, or a model thread has ended")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        """Tell Prometheus what was done."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", response_class=HTMLResponse)
    async def docs() -> Response:
        """Tell people the endpoints."""
        return HTMLResponse(render_docs(app.openapi()))
