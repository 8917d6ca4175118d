"""Open the page of random models in a real browser, and helpers to operate it."""

import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.service import Service
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from tests.serve.model_server import run_server
from tests.use.conftest import SENTENCES

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

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
TABS = ("Fill in", "Next sentence", "Classify", "Entities", "Answer", "Choose", "Rerank",
        "Similarity", "One word", "Attention")  # fmt: skip
KOREAN_SENTENCES = (
    "아이들은 아침에 학교에 가서 도시의 역사에 대한 책을 읽었다.",
    "대장장이는 두 길이 만나는 곳에서 어두워질 때까지 일했다.",
)


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration of a small model with three layers."""
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
    "sentiment": (HeadConfig("single", ("0", "1")), None),
    "names": (HeadConfig("entities", ("O", "B-PER", "I-PER")), [0.0, 90.0, 0.0]),
    "spans": (HeadConfig("span"), None),
    "silent": (HeadConfig("span"), None),
    "endings": (HeadConfig("choice"), None),
}
#: Content of bertsmith.json. With the threshold of "silent", the answer is always "no answer".
INFO: dict[str, dict[str, Any]] = {
    "silent": {"heldout_metrics": {"null_threshold": -1e9}},
    "sentiment": {"provenance": {"task": {"train_file": "/data/glue/SST-2/train.tsv"}}},
}


@pytest.fixture(scope="module")
def page_models(tmp_path_factory: pytest.TempPathFactory) -> list[ServedModel]:
    """A random model of each kind; all have the same vocabulary."""
    root = tmp_path_factory.mktemp("served")
    tokenizer = train_wordpiece(iter(SENTENCES * 3), 227)
    torch.manual_seed(3)
    bundle.save(root / "plain", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    models = [load_served_model("plain", root / "plain")]
    for name, (head, bias) in HEADS.items():
        model = head.build_model(model_config(tokenizer))
        if bias is not None:
            with torch.no_grad():
                list(model.parameters())[-1].copy_(torch.tensor(bias))
        save_fine_tuned(root / name, model, tokenizer, head, INFO.get(name, {}))
        models.append(load_served_model(name, root / name))
    return models


@pytest.fixture(scope="module")
def service(page_models: list[ServedModel]) -> Iterator[Service]:
    """A service of the same models, which computes the expected results."""
    service = Service(page_models)
    yield service
    service.close()


@pytest.fixture(scope="module")
def page_url(page_models: list[ServedModel]) -> Iterator[str]:
    """URL of the page of all models, without a slash at its end."""
    with run_server(page_models, has_page=True) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def open_page(browser: Any, url: str, width: int = 1280, height: int = 720, **options: Any) -> Any:
    """Open the page in a new browser context; ``options`` are those of the context."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    # A busy machine loads the page slowly.
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.goto(url)
    page.get_by_role("tab").first.wait_for()
    return page


@pytest.fixture(scope="module")
def desktop_page(browser: Any, page_url: str) -> Any:
    """The page in a window of the size of a laptop."""
    return open_page(browser, page_url)


def wait_for_result(panel: Any) -> Any:
    """Wait until the panel shows the result of its form; return the element of the result."""
    result = panel.locator(".result")
    result.locator(".answered, .notice.error").first.wait_for()
    panel.locator(".result[aria-busy=false]:not(.stale)").wait_for()
    return result


def open_tab(page: Any, title: str) -> Any:
    """Open a tab, wait for the result of its example, and return its panel."""
    page.get_by_role("tab", name=title, exact=True).click()
    panel = page.get_by_role("tabpanel", name=title, exact=True)
    wait_for_result(panel)
    return panel


def submit_form(panel: Any, button: str, texts: dict[str, str], model: str | None = None) -> Any:
    """Fill in a form, click its button and wait; return the element of the result."""
    if model is not None:
        panel.get_by_label("Model", exact=True).select_option(model)
        panel.locator(".answered b", has_text=re.compile(f"^{model}$")).wait_for()
    for label, text in texts.items():
        # The element's label text includes the hint of the field.
        panel.get_by_label(re.compile(rf"^\s*{re.escape(label)}")).fill(text)
    # Removes the previous result.
    panel.locator(".result").evaluate("element => element.replaceChildren()")
    panel.get_by_role("button", name=button, exact=True).click()
    return wait_for_result(panel)


def read_bars(result: Any) -> list[tuple[str, str]]:
    """Return the texts and percentages of all bars."""
    rows = result.locator(".bars li").all()
    return [(row.locator(".word").inner_text(), row.locator(".share").inner_text()) for row in rows]


def format_bars(rows: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return texts and probabilities in the format of the page."""
    return [(text, format_percent(probability)) for text, probability in rows]


def format_percent(probability: float) -> str:
    """Return a probability in the format of the page."""
    return "< 0.1 %" if 0 < probability < 0.0005 else f"{100 * probability:.1f} %"
