"""The whole page, and how it comes into a server. It never contacts another host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from bertsmith.serve.errors import add_page_error_handlers
from bertsmith.serve.page.calls import CallRoutes
from bertsmith.serve.page.endpoints import endpoints
from bertsmith.serve.page.forms import FORMS
from bertsmith.serve.page.gateway import Gateway
from bertsmith.serve.page.inspection import Looking
from bertsmith.serve.page.jobs import JobQueue
from bertsmith.serve.page.library import gr
from bertsmith.serve.page.markup import notice, safe
from bertsmith.serve.page.tabs import attention_tab, form_tab, word_tab
from bertsmith.serve.service import Service


def page(service: Service) -> Any:
    """Return a ``gradio.Blocks`` with a tab for each thing that the loaded models can do."""
    looking = Looking(service)
    with gr.Blocks(analytics_enabled=False, title="Bertsmith") as blocks:
        names = safe(", ".join(service.models) or "none")
        gr.HTML(f'<h1>Bertsmith</h1><p class="bs-says">Loaded: {names}</p>')
        if not service.models:
            gr.HTML(notice("No model is loaded; give `bertsmith serve` one."))
        with gr.Tabs():
            for form in FORMS:
                if service.models_with(form.ability):
                    form_tab(service, form)
            if service.models:
                word_tab(service, looking)
                attention_tab(service, looking)
        endpoints(service, looking)
    # Gradio checks paths in inputs only after this. CallRoutes refuses them before.
    blocks.has_launched = True
    return blocks


def mount(app: FastAPI, service: Service) -> FastAPI:
    """Put the page at "/" of an app that has all its own routes already, and return the app.

    What comes later is hidden behind the page, for it answers every path that is left.
    """
    blocks, jobs = page(service), JobQueue()
    app.router.routes.extend(CallRoutes(blocks, jobs).routes())
    app.mount("/", GZipMiddleware(Gateway(_gradio_app(blocks))))
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def closing(owner: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(owner) as state:
            yield state
        jobs.close()

    app.router.lifespan_context = closing
    return app


def _gradio_app(blocks: Any) -> FastAPI:
    """Return Gradio's app of the page, without its lifespan, which would run its queue."""
    style = files("bertsmith.serve.page").joinpath("style.css").read_text("utf-8")
    parent: FastAPI = gr.mount_gradio_app(
        FastAPI(), blocks, path="/", theme=_theme(), css=style,
        footer_links=[], run_history=False, show_error=False, max_file_size=1, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False,
    )  # fmt: skip
    gradio_app = next(route.app for route in parent.routes if isinstance(route, Mount))
    assert isinstance(gradio_app, FastAPI)
    add_page_error_handlers(gradio_app)
    return gradio_app


def _theme() -> Any:
    """Return the usual look with the visitor's own fonts, and small print that can be read."""
    theme = gr.themes.Default(
        primary_hue="blue",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    return theme.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_hover_dark="*primary_700",
        body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300",
    )  # fmt: skip
