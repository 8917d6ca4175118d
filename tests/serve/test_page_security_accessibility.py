"""Security, accessibility, error messages and named endpoints of the page."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.service import Service
from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
from tests.serve.model_server import run_server
from tests.use.conftest import SENTENCES

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from gradio import Slider
from gradio_client import Client
from gradio_client.exceptions import AppError

from bertsmith.serve.page import mount
from bertsmith.serve.page.blocks import page as build_page
from tests.serve.browsing import (
    QUESTION,
    CountingService,
    browser,
    desktop_page,
    format_bars,
    needs_browser,
    open_page,
    open_tab,
    page_url,
    read_bars,
    run_page,
    service,
    submit_form,
)

__all__ = ["browser", "desktop_page", "page_url", "service"]

HTML_INJECTION = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'> ${window.hacked=1}"
)


@needs_browser
def test_html_in_texts_is_escaped(desktop_page: Any) -> None:
    """Scripts in input texts are displayed and not executed."""
    forms = {
        "Fill in": ("Fill in", {"Text with [MASK]": f"[MASK] {HTML_INJECTION}"}),
        "Entities": ("Find them", {"Text": HTML_INJECTION}),
        "Answer": ("Answer", {"Question": HTML_INJECTION, "Context": HTML_INJECTION}),
        "Choose": ("Choose", {"Beginning": HTML_INJECTION, "Endings": f"{HTML_INJECTION}\niron"}),
        "One word": (
            "Compare",
            {"Word": "script", "Sentences with the word": f"{HTML_INJECTION}\n" * 2},
        ),
        "Attention": ("Show attention", {"Text": HTML_INJECTION, "Second text": HTML_INJECTION}),
    }
    for tab, (button, fields) in forms.items():
        result = submit_form(open_tab(desktop_page, tab), button, fields)
        assert result.locator("script, img").count() == 0, tab
        assert result.locator(".bs-error").count() == 0, tab
        if tab != "Attention":
            assert "window.hacked" in result.inner_text().replace("PER 100 %", ""), tab
    assert desktop_page.evaluate("window.hacked") is None


@needs_browser
def test_errors_are_shown_in_the_page(desktop_page: Any) -> None:
    """Invalid inputs give a message that says what to do, without a traceback."""
    result = submit_form(
        open_tab(desktop_page, "Fill in"), "Fill in", {"Text with [MASK]": "no mask <b>here</b>"}
    )
    alert = result.get_by_role("alert").inner_text()
    assert "no [MASK] in 'no mask <b>here</b>'; put [MASK] where" in alert
    result = submit_form(
        open_tab(desktop_page, "One word"),
        "Compare",
        {"Word": "anvil", "Sentences with the word": "iron"},
    )
    assert "the word 'anvil' is not in 'iron'" in result.get_by_role("alert").inner_text()
    result = submit_form(
        open_tab(desktop_page, "Attention"), "Show attention", {"Text": " ", "Second text": ""}
    )
    assert "the text is empty" in result.get_by_role("alert").inner_text()
    assert "Traceback" not in desktop_page.inner_text("body")


@needs_browser
def test_model_dropdown_is_hidden_for_a_single_model(desktop_page: Any) -> None:
    """Two models answer questions and one chooses endings; only the first has a dropdown."""
    assert open_tab(desktop_page, "Answer").get_by_role("combobox", name="Model").count() == 1
    assert open_tab(desktop_page, "Choose").get_by_role("combobox", name="Model").count() == 0


TABS = ("Fill in", "Next sentence", "Classify", "Entities", "Answer", "Choose", "One word",
        "Attention")  # fmt: skip


@needs_browser
def test_page_fits_a_phone(browser: Any, page_url: str) -> None:
    """At a width of 375 pixels, no tab with an example's result scrolls horizontally."""
    phone = open_page(browser, page_url, 375, has_touch=True)
    for tab in TABS:
        panel = open_tab(phone, tab)
        panel.locator(".bs-examples button").first.click()
        panel.locator("button.primary").click()
        panel.locator(".bs-result, .bs-error").first.wait_for()
        assert phone.evaluate("document.documentElement.scrollWidth") <= 375, tab
        # Wider elements are inside scrollable containers.
        wide = phone.evaluate(
            "[...document.querySelectorAll('.bs-result *, button, textarea, input')].filter(e => "
            "!e.closest('.bs-scroll, [aria-hidden=true]') && "
            "e.getBoundingClientRect().right > 376)"
            ".map(e => e.outerHTML.slice(0, 120))"
        )
        assert not wide, tab
        scrollable = phone.evaluate(
            "[...document.querySelectorAll('.bs-scroll')].filter(e => e.scrollWidth > "
            "e.clientWidth).map(e => getComputedStyle(e).overflowX)"
        )
        assert set(scrollable) <= {"auto"}, tab
    assert scrollable, "no container was wider than the phone"
    phone.context.close()


@needs_browser
def test_page_works_with_the_keyboard(
    browser: Any, page_url: str, service: CountingService
) -> None:
    """Tab reaches tabs, field and button, focus is visible, and Enter submits."""
    page = open_page(browser, page_url)
    focus = "document.activeElement"
    focused: list[str] = []
    while page.evaluate(f"{focus}.tagName") != "TEXTAREA":
        page.keyboard.press("Tab")
        focused.append(page.evaluate(f"{focus}.innerText"))
        assert len(focused) < 20, focused
    assert set(TABS) <= set(focused)
    assert page.evaluate(f"{focus}.labels[0].innerText.trim()") == "Text with [MASK]"
    page.keyboard.type("the [MASK] hammer")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focus}.innerText") == "Fill in"
    assert page.evaluate(f"getComputedStyle({focus}).outlineStyle") != "none"
    page.keyboard.press("Enter")
    result = page.locator("#result-fill .bs-result")
    result.wait_for()
    assert read_bars(result) == format_bars(
        service.fill("plain", ["the [MASK] hammer"], 8)[0][0].predictions
    )
    page.context.close()


#: JavaScript that computes the contrast of an element's text to its background (WCAG 2).
CONTRAST = """element => {
  const numbers = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const style = getComputedStyle(element);
  const color = numbers(element instanceof SVGElement ? style.fill : style.color);
  let parent = element, background = [];
  while (parent && (background.length === 0 || background[3] === 0)) {
    background = numbers(getComputedStyle(parent).backgroundColor);
    parent = parent.parentElement;
  }
  const [low, high] = [luminance(color), luminance(background)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Any, page_url: str, scheme: str) -> None:
    """In light and dark mode, all kinds of text have a contrast ratio of at least 4.5."""
    page = open_page(browser, page_url, color_scheme=scheme)
    submit_form(open_tab(page, "Fill in"), "Fill in", {"Text with [MASK]": "the [MASK]"})
    selectors = (".bs-word", ".bs-share", ".bs-result h3", ".bs-says", "h1", "button.primary",
             "[role=tab][aria-selected=true]", "label span", ".bs-examples button")  # fmt: skip
    background = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    for selector in selectors:
        assert page.locator(f"{selector}:visible").first.evaluate(CONTRAST) >= 4.5, selector
    submit_form(open_tab(page, "Attention"), "Show attention", {"Text": SENTENCES[0]})
    for selector in (".bs-from > text", ".bs-large text"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
    page.context.close()


@needs_browser
def test_page_requests_no_other_hosts(browser: Any, page_url: str) -> None:
    """All requests for fonts, scripts and data go to the server itself."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    requested: list[str] = []
    context.on("request", lambda request: requested.append(request.url))
    page = context.new_page()
    page.on("websocket", lambda socket: requested.append(socket.url))
    page.goto(page_url)
    page.get_by_role("tab").first.wait_for()
    for tab in TABS:
        panel = open_tab(page, tab)
        panel.locator(".bs-examples button").first.click()
        panel.locator("button.primary").click()
        panel.locator(".bs-result, .bs-error").first.wait_for()
    page.wait_for_timeout(500)
    assert len(requested) > 20
    external = [url for url in requested if not url.startswith((f"{page_url}/", "data:", "blob:"))]
    assert not external
    # Neither does the document refer to other hosts.
    references = page.evaluate(
        "[...document.querySelectorAll('script[src], link[href], img[src], iframe[src]')]"
        ".map(e => e.src || e.href)"
    )
    assert [url for url in references if not url.startswith((f"{page_url}/", "data:"))] == []
    context.close()


#: JavaScript that attempts what an injected script would, and collects policy violations.
ATTACK = """() => {
  window.refused = [];
  document.addEventListener("securitypolicyviolation",
    (event) => window.refused.push(event.effectiveDirective));
  const add = (name, values) =>
    document.body.append(Object.assign(document.createElement(name), values));
  fetch("http://127.0.0.1:1/").catch(() => 0);
  add("img", {src: "http://127.0.0.1:1/"});
  add("iframe", {src: "http://127.0.0.1:1/"});
  add("script", {src: "http://127.0.0.1:1/"});
  add("script", {textContent: "window.hacked = 1"});
  add("link", {rel: "stylesheet", href: "http://127.0.0.1:1/"});
}"""


@needs_browser
def test_content_security_policy_is_enforced(browser: Any, page_url: str) -> None:
    """The page works without violations, and other hosts and inline scripts are blocked."""
    page = browser.new_context().new_page()
    errors: list[str] = []
    page.on("console", lambda line: errors.extend([line.text] if line.type == "error" else []))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(page_url)
    page.get_by_role("tab").first.wait_for()
    panel = open_tab(page, "Attention")
    submit_form(panel, "Show attention", {"Text": SENTENCES[0]})
    panel.get_by_label("layer 2, head 3", exact=True).click()
    panel.locator("h3", has_text="Layer 2, head 3").wait_for()
    assert errors == []
    page.evaluate(ATTACK)
    page.wait_for_function("window.refused.length >= 6")
    assert set(page.evaluate("window.refused")) == {
        "connect-src",
        "img-src",
        "frame-src",
        "script-src-elem",
        "style-src-elem",
    }
    assert page.evaluate("window.hacked") is None
    page.context.close()


@needs_browser
def test_tabs_depend_on_the_models(browser: Any, service: CountingService) -> None:
    """A tagging model has the tabs for entities, words and attention only."""
    with run_page(CountingService([service.models["names"]])) as url:
        page = open_page(browser, url)
        assert page.get_by_role("tab").all_inner_texts() == ["Entities", "One word", "Attention"]
        page.context.close()


def test_named_endpoints_equal_the_service(page_url: str, service: CountingService) -> None:
    """Gradio's client gets the results of the service."""
    call = Client(page_url, verbose=False, analytics_enabled=False).predict
    text = "the [MASK] was cold"
    masks = service.fill("plain", [text], 2)[0]
    assert_json_close(call(text, 2, api_name="/fill"), [asdict(mask) for mask in masks])
    expected = asdict(service.pair("plain", [(SENTENCES[0], SENTENCES[1])])[0])
    assert_json_close(call(SENTENCES[0], SENTENCES[1], api_name="/pair"), expected)
    expected = asdict(service.classify("stars", [SENTENCES[0]])[0])
    assert_json_close(call(text=SENTENCES[0], model="stars", api_name="/classify"), expected)
    expected = asdict(service.tag("names", [SENTENCES[0]])[0])
    assert_json_close(call(SENTENCES[0], api_name="/tag"), expected)
    expected = asdict(service.answer("spans", [(QUESTION, SENTENCES[0])])[0])
    assert_json_close(call(QUESTION, SENTENCES[0], api_name="/answer"), expected)
    expected = asdict(service.choose("endings", [(SENTENCES[0], SENTENCES[1:3])])[0])
    assert_json_close(call(SENTENCES[0], SENTENCES[1:3], api_name="/choose"), expected)
    texts = [SENTENCES[0], SENTENCES[3]]
    word = call("smith", texts, -2, api_name="/word")
    distances = similar(service.models["plain"].embedder, texts, "smith", layer=-2).distances
    assert word["layer"] == 2
    assert_json_close(word["distances"], distances.tolist())
    result = call(SENTENCES[0], SENTENCES[1], 2, 3, "mood", api_name="/attention")
    maps = attention(service.models["mood"].bundle, SENTENCES[0], SENTENCES[1])
    assert result["tokens"] == maps.tokens
    assert_json_close(result["probabilities"], maps.probabilities[1, 2].tolist())
    with pytest.raises(AppError, match=r"no \[MASK\] in 'iron'"):
        call("iron", api_name="/fill")
    with pytest.raises(AppError, match="there is no layer 4, head 1; expected layers 1 to 3"):
        call("iron", "", 4, api_name="/attention")


def assert_json_close(actual: Any, expected: Any) -> None:
    """Compare two JSON values, numbers to 1e-5; tuples equal lists."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_json_close(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_json_close(actual_item, expected_item)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-5)
    else:
        assert actual == expected


def test_mounting_keeps_other_routes(page_url: str) -> None:
    """Existing routes still work, and Gradio's file routes are not available."""
    assert httpx.get(f"{page_url}/health").json() == {"health": "good"}
    assert httpx.post(f"{page_url}/embed").json() == [[1.0]]
    assert "/gradio_api" not in httpx.get(f"{page_url}/openapi.json").text
    assert httpx.get(f"{page_url}/").status_code == 200
    api_url = f"{page_url}/gradio_api"
    for path in (f"file={page_url}/health", f"file={__file__}", "proxy=https://a.hf.space/b"):
        assert httpx.get(f"{api_url}/{path}").status_code == 404
    response = httpx.post(f"{api_url}/upload", files={"files": b"some text"})
    assert response.status_code == 404


def test_missing_gradio_is_an_error() -> None:
    """The error says how to install gradio."""
    program = (
        "import sys\nsys.modules['gradio'] = None\nfrom bertsmith.errors import MissingExtraError\n"
        "try:\n    import bertsmith.serve.page\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'bertsmith[serve]'" in process.stdout


def test_server_has_page_and_endpoints(models: list[ServedModel]) -> None:
    """The page is at /, the endpoints work, and unknown paths are 404."""
    with run_server(models[:1], mount_page=mount) as server:
        response = httpx.get(server.url)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert server.post("/embed", {"inputs": "a"}).status_code == 200
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        assert "bertsmith_requests_total" in httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/nowhere").status_code == 404


def test_layer_slider_is_disabled_for_a_single_layer(root: Path) -> None:
    """Gradio does not support sliders with a single value."""
    model = load_served_model(
        "m", root / "tests" / "cli" / "fixtures" / "v0.1" / "base", device="cpu"
    )
    service = Service([model])
    try:
        blocks = build_page(service)
    finally:
        service.close()
    sliders = {block.label: block for block in blocks.blocks.values() if isinstance(block, Slider)}
    assert not sliders["Layer"].interactive
    assert sliders["Head"].interactive
