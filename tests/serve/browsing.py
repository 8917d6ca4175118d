"""Open the page of random models in a real browser, and helpers to operate it."""

import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.service import Service
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.use.embed import TokenVectors
from bertsmith.use.vector_settings import VectorSettings
from tests.use.conftest import SENTENCES

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn, of the extra serve, is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from fastapi import FastAPI  # noqa: E402 - needs the extra

from bertsmith.serve.page import mount  # noqa: E402

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
QUESTION = "where did the smith work?"


class CountingService(Service):
    """Service that counts the calls of ``embed_tokens``.

    Attributes:
        num_calls: number of calls.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        super().__init__(models)
        self.num_calls = 0

    def embed_tokens(
        self,
        model_name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        deadline: Deadline | None = None,
        *,
        max_vector_elements: int | None = None,
    ) -> list[TokenVectors]:
        """Count the call and return the token vectors."""
        self.num_calls += 1
        return super().embed_tokens(
            model_name, texts, settings, deadline, max_vector_elements=max_vector_elements
        )


def _model_config(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=3,
        width=24,
        heads=4,
        feed_forward=37,
        max_positions=160,
        init_range=0.3,
    )


#: Head of each fine-tuned model, and the bias of its output layer; None for a random bias. The bias
#: of "names" makes every word a person.
HEADS: dict[str, tuple[HeadConfig, list[float] | None]] = {
    "mood": (HeadConfig("single", ("glad", "sad", "angry")), None),
    "stars": (HeadConfig("regression"), None),
    "names": (HeadConfig("entities", ("O", "B-PER", "I-PER")), [0.0, 90.0, 0.0]),
    "spans": (HeadConfig("span"), None),
    "silent": (HeadConfig("span"), None),
    "endings": (HeadConfig("choice"), None),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> CountingService:
    """A service with a random model of each kind; all have the same vocabulary."""
    root = tmp_path_factory.mktemp("served")
    tokenizer = train_wordpiece(iter(SENTENCES * 3), 227)
    torch.manual_seed(3)
    bundle.save(root / "plain", BertForPreTraining(_model_config(tokenizer)), tokenizer, {})
    models = [load_served_model("plain", root / "plain")]
    for name, (head, bias) in HEADS.items():
        model = head.build_model(_model_config(tokenizer))
        if bias is not None:
            with torch.no_grad():
                list(model.parameters())[-1].copy_(torch.tensor(bias))
        # With this threshold, the answer is always "no answer".
        info = {"heldout_metrics": {"null_threshold": -1e9}} if name == "silent" else {}
        save_fine_tuned(root / name, model, tokenizer, head, info)
        models.append(load_served_model(name, root / name))
    return CountingService(models)


@contextmanager
def run_page(service: Service) -> Iterator[str]:
    """Serve the page in an app with other routes; yield its URL."""
    app = FastAPI()
    app.get("/health")(lambda: {"health": "good"})
    app.post("/embed")(lambda: [[1.0]])
    config = uvicorn.Config(
        mount(app, service), port=0, log_level="error", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def page_url(service: CountingService) -> Iterator[str]:
    """URL of the page of all models."""
    with run_page(service) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def open_page(browser: Any, url: str, width: int = 1280, **options: Any) -> Any:
    """Open the page in a new browser context; ``options`` are those of the context."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    # A busy machine loads the page slowly.
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.goto(url)
    page.get_by_role("tab").first.wait_for()
    return page


@pytest.fixture(scope="module")
def desktop_page(browser: Any, page_url: str) -> Any:
    """The page in a window of desktop width."""
    return open_page(browser, page_url)


def open_tab(page: Any, title: str) -> Any:
    """Open a tab, from the overflow menu if necessary; return its panel."""
    tab = page.get_by_role("tab", name=title, exact=True)
    if tab.count() == 0:
        page.get_by_label("More tabs").click()
        tab = page.locator(".overflow-dropdown button", has_text=re.compile(f"^{title}$"))
    tab.click()
    return page.locator("[role=tabpanel]:visible")


def submit_form(panel: Any, button: str, texts: dict[str, str], model: str | None = None) -> Any:
    """Fill in a form, click its button and wait; return the element with the result."""
    result = panel.locator("[aria-live=polite]").first
    if model is not None:
        panel.get_by_role("combobox", name="Model").click()
        panel.get_by_role("option", name=model, exact=True).click()
    for label, text in texts.items():
        # The element's label text includes the hint of the field.
        panel.get_by_label(re.compile(rf"^\s*{re.escape(label)}")).fill(text)
    # Removes the previous result.
    result.evaluate("element => element.innerHTML = ''")
    panel.get_by_role("button", name=button, exact=True).click()
    result.locator(".bs-result, .bs-error").first.wait_for()
    return result


def read_bars(result: Any) -> list[tuple[str, str]]:
    """Return the texts and percentages of all bars."""
    rows = result.locator(".bs-bars li").all()
    return [
        (row.locator(".bs-word").inner_text(), row.locator(".bs-share").inner_text())
        for row in rows
    ]


def format_bars(rows: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return texts and probabilities in the format of the page."""
    return [
        (text, "< 0.1 %" if 0 < probability < 0.0005 else f"{100 * probability:.1f} %")
        for text, probability in rows
    ]
