"""Build the page and mount it in the server's app. The page loads nothing from other hosts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from bertsmith.serve.errors import add_page_error_handlers
from bertsmith.serve.page.calls import CallRoutes
from bertsmith.serve.page.endpoints import add_endpoints
from bertsmith.serve.page.forms import FORMS
from bertsmith.serve.page.gateway import Gateway
from bertsmith.serve.page.inspection import ModelInspector
from bertsmith.serve.page.jobs import JobQueue
from bertsmith.serve.page.library import gr
from bertsmith.serve.page.markup import escape_html, notice
from bertsmith.serve.page.tabs import attention_tab, form_tab, word_tab
from bertsmith.serve.service import Service


def page(service: Service) -> Any:
    """Return a ``gradio.Blocks`` with a tab for each ability of the loaded models."""
    inspector = ModelInspector(service)
    with gr.Blocks(analytics_enabled=False, title="Bertsmith") as blocks:
        names = escape_html(", ".join(service.models) or "none")
        gr.HTML(f'<h1>Bertsmith</h1><p class="bs-says">Loaded: {names}</p>')
        if not service.models:
            gr.HTML(notice("No model is loaded; start `bertsmith serve` with a model."))
        with gr.Tabs():
            for form in FORMS:
                if service.get_model_names(form.ability):
                    form_tab(service, form)
            if service.models:
                word_tab(service, inspector)
                attention_tab(service, inspector)
        add_endpoints(service, inspector)
    # Gradio checks file paths in inputs only if this is set. CallRoutes rejects them anyway.
    blocks.has_launched = True
    return blocks


def mount(app: FastAPI, service: Service) -> FastAPI:
    """Mount the page at "/" of an app and return the app.

    The page handles all remaining paths, so routes added later would never match.
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
    """Return Gradio's app of the page, without its lifespan, which would start its queue."""
    style = files("bertsmith.serve.page").joinpath("style.css").read_text("utf-8")
    parent: FastAPI = gr.mount_gradio_app(
        FastAPI(),
        blocks,
        path="/",
        theme=_theme(),
        css=style,
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=1,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
    )
    gradio_app = next(route.app for route in parent.routes if isinstance(route, Mount))
    assert isinstance(gradio_app, FastAPI)
    add_page_error_handlers(gradio_app)
    return gradio_app


def _theme() -> Any:
    """Return Gradio's default theme with system fonts and more contrast in small text."""
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
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
    )
