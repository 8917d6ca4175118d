"""The whole page, and how it comes into a server. It never contacts another host."""

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount

from bertsmith.serve.faults import add_page_faults
from bertsmith.serve.page.endpoints import endpoints
from bertsmith.serve.page.forms import FORMS
from bertsmith.serve.page.library import gr
from bertsmith.serve.page.looking import Looking
from bertsmith.serve.page.markup import notice, safe
from bertsmith.serve.page.tabs import attention_tab, form_tab, word_tab
from bertsmith.serve.service import Service

#: What the page needs of nobody: files sent or fetched (from other hosts, too), and a chat with a
#: model of theirs that changes the page.
_CLOSED = (
    "upload", "upload_progress", "file={rest:path}", "file/{rest:path}", "proxy={rest:path}",
    "vibe-edit", "undo-vibe-edit", "process_recording", "run-history/{rest:path}", "deep_link",
    "dev/reload",
)  # fmt: skip
#: Visitors' questions that wait, of each kind; beyond it they are told to come again.
_WAITING = 64
_AT_ONCE = 4


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
                if service.able(form.ability):
                    form_tab(service, form)
            if service.models:
                word_tab(service, looking)
                attention_tab(service, looking)
        endpoints(service, looking)
    blocks.queue(default_concurrency_limit=_AT_ONCE, max_size=_WAITING)
    return blocks


def mount(app: FastAPI, service: Service) -> FastAPI:
    """Put the page at "/" of an app that has all its own routes already, and return the app.

    What comes later is hidden behind the page, for it answers every path that is left.
    """
    for path in _CLOSED:
        route = f"/gradio_api/{path}"
        app.router.add_route(route, _closed, ["GET", "POST"], include_in_schema=False)
    style = files("bertsmith.serve.page").joinpath("style.css").read_text("utf-8")
    mounted: FastAPI = gr.mount_gradio_app(
        app, page(service), path="/", theme=_theme(), css=style,
        footer_links=[], run_history=False, show_error=False, max_file_size=1, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False,
    )  # fmt: skip
    for own in mounted.routes:
        if isinstance(own, Mount) and isinstance(own.app, FastAPI):
            add_page_faults(own.app)
    return mounted


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


async def _closed(_request: Request) -> Response:
    return PlainTextResponse("the page has no such thing", 404)
