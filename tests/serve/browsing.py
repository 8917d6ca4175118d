"""The page of random models of every kind, opened in a real browser, and how a test uses it.

It never tests.
"""

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
from tests.use.conftest import TEXT

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn, of the extra serve, is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from fastapi import FastAPI  # noqa: E402 - after the extra is known to be there

from bertsmith.serve.page import mount  # noqa: E402

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome")
     if (found := shutil.which(name))), None,
)  # fmt: skip
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
QUESTION = "where did the smith work?"


class Counting(Service):
    """Counts how often vectors of tokens are made."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        super().__init__(models)
        self.embedded = 0

    def tokens(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Deadline | None = None,
        *,
        most: int | None = None,
    ) -> list[TokenVectors]:
        """Return the vectors of tokens."""
        self.embedded += 1
        return super().tokens(name, texts, settings, patience, most=most)


def _config(words: Tokenizer, **more: Any) -> ModelConfig:
    values = {"layers": 3, "width": 24, "heads": 4, "feed_forward": 37, "max_positions": 160}
    return ModelConfig(vocab_size=words.vocab_size, init_range=0.3, **(values | more))


#: Model's name -> its head, and the bias of its outputs if it is to say one thing always.
HEADS: dict[str, tuple[HeadConfig, list[float] | None]] = {
    "mood": (HeadConfig("single", ("glad", "sad", "angry")), None),
    "stars": (HeadConfig("regression"), None),
    "names": (HeadConfig("entities", ("O", "B-PER", "I-PER")), [0.0, 90.0, 0.0]),
    "spans": (HeadConfig("span"), None),
    "silent": (HeadConfig("span"), None),
    "endings": (HeadConfig("choice"), None),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    """A random model of each kind, all with one vocabulary."""
    root = tmp_path_factory.mktemp("served")
    words = train_wordpiece(iter(TEXT * 3), 227)
    torch.manual_seed(3)
    bundle.save(root / "plain", BertForPreTraining(_config(words)), words, {})
    models = [load_served_model("plain", root / "plain")]
    for name, (head, bias) in HEADS.items():
        model = head.build_model(_config(words))
        if bias is not None:
            with torch.no_grad():
                list(model.parameters())[-1].copy_(torch.tensor(bias))
        info = {"heldout": {"null_threshold": -1e9}} if name == "silent" else {}
        save_fine_tuned(root / name, model, words, head, info)
        models.append(load_served_model(name, root / name))
    return Counting(models)


@contextmanager
def running(service: Service) -> Iterator[str]:
    """Serve the page beside other routes, as the server does; give its address."""
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
def address(service: Counting) -> Iterator[str]:
    """Where the page of all models is."""
    with running(service) as own:
        yield own


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def opened(browser: Any, address: str, width: int = 1280, **more: Any) -> Any:
    """Open the page in a fresh visitor's window."""
    context = browser.new_context(viewport={"width": width, "height": 800}, **more)
    # A loaded machine is slow to load the page.
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("tab").first.wait_for()
    return page


@pytest.fixture(scope="module")
def desk(browser: Any, address: str) -> Any:
    """The page on a desk."""
    return opened(browser, address)


def go(page: Any, tab: str) -> Any:
    """Open a tab, also one for which there was no room; return its panel."""
    own = page.get_by_role("tab", name=tab, exact=True)
    if own.count() == 0:
        page.get_by_label("More tabs").click()
        own = page.locator(".overflow-dropdown button", has_text=re.compile(f"^{tab}$"))
    own.click()
    return page.locator("[role=tabpanel]:visible")


def ask(panel: Any, button: str, texts: dict[str, str], model: str | None = None) -> Any:
    """Fill a form, press its button and wait; return what came."""
    result = panel.locator("[aria-live=polite]").first
    if model is not None:
        panel.get_by_role("combobox", name="Model").click()
        panel.get_by_role("option", name=model, exact=True).click()
    for label, text in texts.items():
        # A label's text goes on with the hint to its field.
        panel.get_by_label(re.compile(rf"^\s*{re.escape(label)}")).fill(text)
    # What an earlier question left there must not pass for the answer.
    result.evaluate("own => own.innerHTML = ''")
    panel.get_by_role("button", name=button, exact=True).click()
    result.locator(".bs-result, .bs-fault").first.wait_for()
    return result


def bars(result: Any) -> list[tuple[str, str]]:
    """Return the words and shares of all bars."""
    rows = result.locator(".bs-bars li").all()
    return [(row.locator(".bs-word").inner_text(), row.locator(".bs-share").inner_text())
            for row in rows]  # fmt: skip


def shares(given: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return words and shares as the page writes them."""
    return [(word, "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %")
            for word, share in given]  # fmt: skip
