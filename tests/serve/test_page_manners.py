"""The page as a whole: text as text, mistakes, a phone, the keyboard, and what programs see.

These tests never go through what each panel shows: tests/serve/test_page.py does.
"""

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
from tests.use.conftest import TEXT

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from gradio import Slider
from gradio_client import Client
from gradio_client.exceptions import AppError

from bertsmith.serve.page import mount
from bertsmith.serve.page.blocks import page as build_page
from tests.serve.browsing import (
    QUESTION,
    Counting,
    address,
    ask,
    bars,
    browser,
    desk,
    go,
    needs_browser,
    opened,
    running,
    service,
    shares,
)

__all__ = ["address", "browser", "desk", "service"]

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'> ${window.hacked=1}"
)


@needs_browser
def test_text_shows_as_text(desk: Any) -> None:
    """A text that is a script does nothing, anywhere; it is shown as it is."""
    ways = {
        "Fill in": ("Fill in", {"Text with [MASK]": f"[MASK] {HOSTILE}"}),
        "Entities": ("Find them", {"Text": HOSTILE}),
        "Answer": ("Answer", {"Question": HOSTILE, "Context": HOSTILE}),
        "Choose": ("Choose", {"Beginning": HOSTILE, "Endings": f"{HOSTILE}\niron"}),
        "One word": ("Compare", {"Word": "script", "Sentences with the word": f"{HOSTILE}\n" * 2}),
        "Attention": ("Show attention", {"Text": HOSTILE, "Second text": HOSTILE}),
    }
    for tab, (button, given) in ways.items():
        result = ask(go(desk, tab), button, given)
        assert result.locator("script, img").count() == 0, tab
        assert result.locator(".bs-fault").count() == 0, tab
        if tab != "Attention":
            assert "window.hacked" in result.inner_text().replace("PER 100 %", ""), tab
    assert desk.evaluate("window.hacked") is None


@needs_browser
def test_a_mistake_is_told_in_the_page(desk: Any) -> None:
    """What cannot be asked is answered with what to do, and no traceback."""
    result = ask(go(desk, "Fill in"), "Fill in", {"Text with [MASK]": "no mask <b>here</b>"})
    alert = result.get_by_role("alert").inner_text()
    assert "no [MASK] in 'no mask <b>here</b>'; put [MASK] where" in alert
    result = ask(go(desk, "One word"), "Compare",
                 {"Word": "anvil", "Sentences with the word": "iron"})  # fmt: skip
    assert "the word 'anvil' is not in 'iron'" in result.get_by_role("alert").inner_text()
    result = ask(go(desk, "Attention"), "Show attention", {"Text": " ", "Second text": ""})
    assert "the text is empty" in result.get_by_role("alert").inner_text()
    assert "Traceback" not in desk.inner_text("body")


@needs_browser
def test_a_chooser_only_where_there_is_a_choice(desk: Any) -> None:
    """Two models give answers, one chooses endings: only the first tab has a chooser."""
    assert go(desk, "Answer").get_by_role("combobox", name="Model").count() == 1
    assert go(desk, "Choose").get_by_role("combobox", name="Model").count() == 0


TABS = ("Fill in", "Next sentence", "Classify", "Entities", "Answer", "Choose", "One word",
        "Attention")  # fmt: skip


@needs_browser
def test_a_phone_needs_no_scrolling_to_the_side(browser: Any, address: str) -> None:
    """At 375 pixels every tab with its first example's result fits the width."""
    phone = opened(browser, address, 375, has_touch=True)
    for tab in TABS:
        panel = go(phone, tab)
        panel.locator(".bs-examples button").first.click()
        panel.locator("button.primary").click()
        panel.locator(".bs-result, .bs-fault").first.wait_for()
        assert phone.evaluate("document.documentElement.scrollWidth") <= 375, tab
        # Nothing is cut off either: what is wider stands in a frame that scrolls.
        wide = phone.evaluate(
            "[...document.querySelectorAll('.bs-result *, button, textarea, input')].filter(own => "
            "!own.closest('.bs-scroll, [aria-hidden=true]') && "
            "own.getBoundingClientRect().right > 376)"
            ".map(own => own.outerHTML.slice(0, 120))"
        )
        assert not wide, tab
        framed = phone.evaluate(
            "[...document.querySelectorAll('.bs-scroll')].filter(own => own.scrollWidth > "
            "own.clientWidth).map(own => getComputedStyle(own).overflowX)"
        )
        assert set(framed) <= {"auto"}, tab
    assert framed, "no frame of attention was wider than the phone"
    phone.context.close()


@needs_browser
def test_by_keyboard_alone(browser: Any, address: str, service: Counting) -> None:
    """The Tab key reaches tabs, field and button; Enter asks; what has focus can be seen."""
    page = opened(browser, address)
    focus = "document.activeElement"
    met: list[str] = []
    while page.evaluate(f"{focus}.tagName") != "TEXTAREA":
        page.keyboard.press("Tab")
        met.append(page.evaluate(f"{focus}.innerText"))
        assert len(met) < 20, met
    assert set(TABS) <= set(met)
    assert page.evaluate(f"{focus}.labels[0].innerText.trim()") == "Text with [MASK]"
    page.keyboard.type("the [MASK] hammer")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focus}.innerText") == "Fill in"
    assert page.evaluate(f"getComputedStyle({focus}).outlineStyle") != "none"
    page.keyboard.press("Enter")
    result = page.locator("#result-fill .bs-result")
    result.wait_for()
    assert bars(result) == shares(service.fill("plain", ["the [MASK] hammer"], 8)[0][0].words)
    page.context.close()


#: Contrast of an element's text to what is behind it, by WCAG 2.
CONTRAST = """own => {
  const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const style = getComputedStyle(own);
  const ink = parts(own instanceof SVGElement ? style.fill : style.color);
  let behind = own, paper = [];
  while (behind && (paper.length === 0 || paper[3] === 0)) {
    paper = parts(getComputedStyle(behind).backgroundColor);
    behind = behind.parentElement;
  }
  const [low, high] = [light(ink), light(paper)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(browser: Any, address: str, scheme: str) -> None:
    """In the light and in the dark, all kinds of text have a contrast of 4.5 at least."""
    page = opened(browser, address, color_scheme=scheme)
    ask(go(page, "Fill in"), "Fill in", {"Text with [MASK]": "the [MASK]"})
    kinds = (".bs-word", ".bs-share", ".bs-result h3", ".bs-says", "h1", "button.primary",
             "[role=tab][aria-selected=true]", "label span", ".bs-examples button")  # fmt: skip
    dark = page.locator("body").evaluate("own => getComputedStyle(own).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")
    for kind in kinds:
        assert page.locator(f"{kind}:visible").first.evaluate(CONTRAST) >= 4.5, kind
    ask(go(page, "Attention"), "Show attention", {"Text": TEXT[0]})
    for kind in (".bs-from > text", ".bs-large text"):
        assert page.locator(kind).first.evaluate(CONTRAST) >= 4.5, kind
    page.context.close()


@needs_browser
def test_no_other_host_is_asked(browser: Any, address: str) -> None:
    """Fonts, scripts, figures of use: every request goes to the server itself."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("websocket", lambda socket: asked.append(socket.url))
    page.goto(address)
    page.get_by_role("tab").first.wait_for()
    for tab in TABS:
        panel = go(page, tab)
        panel.locator(".bs-examples button").first.click()
        panel.locator("button.primary").click()
        panel.locator(".bs-result, .bs-fault").first.wait_for()
    page.wait_for_timeout(500)
    assert len(asked) > 20
    outside = [url for url in asked if not url.startswith((f"{address}/", "data:", "blob:"))]
    assert not outside
    # Nor does a page name one that is asked later: a font, a script, a style.
    named = page.evaluate(
        "[...document.querySelectorAll('script[src], link[href], img[src], iframe[src]')]"
        ".map(own => own.src || own.href)"
    )
    assert [url for url in named if not url.startswith((f"{address}/", "data:"))] == []
    context.close()


#: Tries what a script from elsewhere would, and collects what the browser refuses.
ESCAPES = """() => {
  window.refused = [];
  document.addEventListener("securitypolicyviolation",
    (event) => window.refused.push(event.effectiveDirective));
  const add = (name, values) => document.body.append(Object.assign(document.createElement(name), values));
  fetch("http://127.0.0.1:1/").catch(() => 0);
  add("img", {src: "http://127.0.0.1:1/"});
  add("iframe", {src: "http://127.0.0.1:1/"});
  add("script", {src: "http://127.0.0.1:1/"});
  add("script", {textContent: "window.hacked = 1"});
  add("link", {rel: "stylesheet", href: "http://127.0.0.1:1/"});
}"""


@needs_browser
def test_the_browser_confines_the_page(browser: Any, address: str) -> None:
    """The policy of the page breaks nothing of it, and refuses other hosts and other scripts."""
    page = browser.new_context().new_page()
    errors: list[str] = []
    page.on("console", lambda line: errors.extend([line.text] if line.type == "error" else []))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.get_by_role("tab").first.wait_for()
    panel = go(page, "Attention")
    ask(panel, "Show attention", {"Text": TEXT[0]})
    panel.get_by_label("layer 2, head 3", exact=True).click()
    panel.locator("h3", has_text="Layer 2, head 3").wait_for()
    assert errors == []
    page.evaluate(ESCAPES)
    page.wait_for_function("window.refused.length >= 6")
    assert set(page.evaluate("window.refused")) == {
        "connect-src", "img-src", "frame-src", "script-src-elem", "style-src-elem",
    }  # fmt: skip
    assert page.evaluate("window.hacked") is None
    page.context.close()


@needs_browser
def test_only_what_the_models_can_do(browser: Any, service: Counting) -> None:
    """A model that tags is offered for that, for words and attention, and for nothing else."""
    with running(Counting([service.models["names"]])) as own:
        page = opened(browser, own)
        assert page.get_by_role("tab").all_inner_texts() == ["Entities", "One word", "Attention"]
        page.context.close()


def test_programs_ask_by_name(address: str, service: Counting) -> None:
    """Each endpoint gives the Gradio client the values that the service gives."""
    client = Client(address, verbose=False, analytics_enabled=False)
    ask = client.predict
    text = "the [MASK] was cold"
    filled = service.fill("plain", [text], 2)[0]
    close(ask(text, 2, api_name="/fill"), [asdict(own) for own in filled])
    wanted = asdict(service.pair("plain", [(TEXT[0], TEXT[1])])[0])
    close(ask(TEXT[0], TEXT[1], api_name="/pair"), wanted)
    wanted = asdict(service.classify("stars", [TEXT[0]])[0])
    close(ask(text=TEXT[0], model="stars", api_name="/classify"), wanted)
    close(ask(TEXT[0], api_name="/tag"), asdict(service.tag("names", [TEXT[0]])[0]))
    wanted = asdict(service.answer("spans", [(QUESTION, TEXT[0])])[0])
    close(ask(QUESTION, TEXT[0], api_name="/answer"), wanted)
    wanted = asdict(service.choose("endings", [(TEXT[0], TEXT[1:3])])[0])
    close(ask(TEXT[0], TEXT[1:3], api_name="/choose"), wanted)
    texts = [TEXT[0], TEXT[3]]
    found = ask("smith", texts, -2, api_name="/word")
    near = similar(service.models["plain"].embedder, texts, "smith", layer=-2)
    assert found["layer"] == 2
    close(found["distances"], near.distances.tolist())
    found = ask(TEXT[0], TEXT[1], 2, 3, "mood", api_name="/attention")
    seen = attention(service.models["mood"].bundle, TEXT[0], TEXT[1])
    assert found["tokens"] == seen.tokens
    close(found["probabilities"], seen.probabilities[1, 2].tolist())
    with pytest.raises(AppError, match=r"no \[MASK\] in 'iron'"):
        ask("iron", api_name="/fill")
    with pytest.raises(AppError, match="there is no layer 4, head 1; expected layers 1 to 3"):
        ask("iron", "", 4, api_name="/attention")


def close(found: Any, wanted: Any) -> None:
    """Fail unless two values of JSON are the same, numbers to 1e-5; a tuple is a list."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, own in wanted.items():
            close(found[key], own)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, own in zip(found, wanted, strict=True):
            close(one, own)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert found == wanted


def test_the_other_routes_stay(address: str) -> None:
    """Routes that were there before the page answer as before; files cannot be sent or fetched."""
    assert httpx.get(f"{address}/health").json() == {"health": "good"}
    assert httpx.post(f"{address}/embed").json() == [[1.0]]
    assert "/gradio_api" not in httpx.get(f"{address}/openapi.json").text
    assert httpx.get(f"{address}/").status_code == 200
    within = f"{address}/gradio_api"
    for path in (f"file={address}/health", f"file={__file__}", "proxy=https://a.hf.space/b"):
        assert httpx.get(f"{within}/{path}").status_code == 404
    sent = httpx.post(f"{within}/upload", files={"files": b"some text"})
    assert sent.status_code == 404


def test_without_gradio() -> None:
    """Where the package is missing, the error says how to install it."""
    code = (
        "import sys\nsys.modules['gradio'] = None\nfrom bertsmith.errors import MissingExtraError\n"
        "try:\n    import bertsmith.serve.page\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'bertsmith[serve]'" in done.stdout


def test_the_page_stands_beside_the_endpoints(models: list[ServedModel]) -> None:
    """In the server itself: / is the page, every endpoint answers, what is nowhere is 404."""
    with run_server(models[:1], page=mount) as own:
        found = httpx.get(own.url)
        assert (found.status_code, found.headers["content-type"][:9]) == (200, "text/html")
        assert own.post("/embed", {"inputs": "a"}).status_code == 200
        assert httpx.get(f"{own.url}/health").json() == {"status": "ok"}
        assert "bertsmith_requests_total" in httpx.get(f"{own.url}/metrics").text
        assert httpx.get(f"{own.url}/nowhere").status_code == 404


def test_a_model_of_one_layer_has_a_page(root: Path) -> None:
    """A slider cannot have a single value, so that of the layers is disabled."""
    model = load_served_model(
        "m", root / "tests" / "cli" / "fixtures" / "v0.1" / "base", device="cpu"
    )
    service = Service([model])
    try:
        blocks = build_page(service)
    finally:
        service.close()
    sliders = {block.label: block for block in blocks.blocks.values()
               if isinstance(block, Slider)}  # fmt: skip
    assert not sliders["Layer"].interactive
    assert sliders["Head"].interactive
