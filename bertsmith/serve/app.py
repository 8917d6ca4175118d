"""Build the ASGI app of a server: endpoints, error handlers, middleware and web page."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from bertsmith.serve.admission import EarlyAdmission
from bertsmith.serve.batching import ComputedBatch
from bertsmith.serve.control import ServerControl
from bertsmith.serve.dispatch import EndpointDispatcher
from bertsmith.serve.docs_page import DOCS_HEADERS, render_docs
from bertsmith.serve.embeddings import EmbeddingRoutes
from bertsmith.serve.errors import add_error_handlers, create_error_response
from bertsmith.serve.execution import RequestExecutor, to_json_response
from bertsmith.serve.hosts import HostCheck
from bertsmith.serve.inference_api import InferenceRoutes
from bertsmith.serve.inspection import InspectionRoutes
from bertsmith.serve.keys import FailedLogins, KeyRing
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.models import ServedModel
from bertsmith.serve.openapi import build_openapi
from bertsmith.serve.page import Page
from bertsmith.serve.rerank import RerankRoutes
from bertsmith.serve.responses import Status
from bertsmith.serve.routes import TaskRoutes
from bertsmith.serve.security_headers import SecurityHeaders
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.shared_table import CounterTable
from bertsmith.serve.sparse import SparseRoutes
from bertsmith.serve.tei import TeiRoutes
from bertsmith.version import __version__

if TYPE_CHECKING:
    from bertsmith.serve.tracing import Tracing


def create_app(
    models: Sequence[ServedModel],
    settings: ServeSettings | None = None,
    *,
    keys: KeyRing | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    has_page: bool = False,
    metrics_directory: Path | None = None,
    login_table: CounterTable | None = None,
    tracing: "Tracing | None" = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RequestMiddleware:
    """Return the ASGI app of a server with these models.

    Args:
        models: the loaded models.
        settings: the limits of the server.
        keys: API keys of which clients must send one; None for no authentication.
        origins: origins of other sites whose scripts may send requests (CORS).
        hosts: host names that ``HostCheck`` allows, see ``get_allowed_hosts``; None for all.
        has_page: whether the app has a web page at "/".
        metrics_directory: folder in which several processes share metrics, see ``Metrics``.
        login_table: table of failed logins, which several processes can share; None for a table of
            its own.
        tracing: creates the spans of requests; None for no tracing.
        sleep: waits a number of seconds, before the answer to a wrong key.
    """
    settings = settings or ServeSettings()
    metrics = Metrics(metrics_directory)

    def on_batch(batch: ComputedBatch) -> None:
        metrics.count_batch(batch)
        if tracing is not None:
            tracing.record_batch(batch)

    service = Service(models, settings, on_batch, metrics.get_token_counter)
    executor = RequestExecutor(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        executor.close()
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="Bertsmith",
        version=__version__,
        lifespan=lifespan,
        # The endpoints /openapi.json and /docs depend on the address of the request.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    control = ServerControl(service.replace_models, lambda: service.batcher.has_dead_thread)
    add_error_handlers(app)
    _add_probes(app, service, control)
    _add_server_endpoints(app, service, metrics, needs_key=keys is not None)
    routes = _add_routes(app, executor)
    if has_page:
        app.router.routes.extend(Page().routes())
    handler: ASGIApp = EndpointDispatcher(app, routes)
    if hosts is not None:
        handler = HostCheck(handler, hosts)
    middleware = RequestMiddleware(
        SecurityHeaders(handler),
        settings=settings,
        metrics=metrics,
        admission=EarlyAdmission(service.batcher, settings.request_timeout_seconds),
        keys=keys,
        origins=origins,
        has_page=has_page,
        control=control,
        failed_logins=FailedLogins(table=login_table),
        tracing=tracing,
        sleep=sleep,
    )
    metrics.set_gauges(
        lambda: service.batcher.queued_tokens, lambda: middleware.num_running_requests
    )
    return middleware


def _add_routes(app: FastAPI, executor: RequestExecutor) -> list[BaseRoute]:
    """Add the endpoints of models, and return their routes."""
    embeddings = EmbeddingRoutes(executor)
    routers = [
        embeddings.router,
        SparseRoutes(executor).router,
        InferenceRoutes(executor, embeddings).router,
        TaskRoutes(executor).router,
        RerankRoutes(executor).router,
        TeiRoutes(executor).router,
        InspectionRoutes(executor).router,
    ]
    for router in routers:
        app.include_router(router)
    return [route for router in routers for route in router.routes]


def _add_probes(app: FastAPI, service: Service, control: ServerControl) -> None:
    """Add the health and readiness endpoints."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=Status)
    async def health() -> Response:
        """Liveness probe: 200 while the server works, 503 if it must be restarted."""
        if control.has_failed():
            return create_error_response(503, "a model thread has died; restart the server")
        return to_json_response({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=Status)
    async def ready() -> Response:
        """Readiness probe: 200 while the server accepts requests, else 503."""
        if control.is_draining or not service.batcher.is_alive:
            return create_error_response(
                503, "the server is shutting down, or a model thread has died"
            )
        return to_json_response({"status": "ready"})


def _add_server_endpoints(
    app: FastAPI, service: Service, metrics: Metrics, *, needs_key: bool
) -> None:
    """Add metrics and documentation endpoints."""

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        """Return metrics for Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def build_schema(request: Request) -> dict[str, Any]:
        models = list(service.models.values())
        return build_openapi(app, str(request.base_url), models, needs_key=needs_key)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        """Return the OpenAPI schema, with the address of the request and the loaded models."""
        return to_json_response(build_schema(request))

    @app.get("/docs", response_class=HTMLResponse)
    async def docs(request: Request) -> Response:
        """Document the endpoints (HTML)."""
        return HTMLResponse(render_docs(build_schema(request)), headers=DOCS_HEADERS)
