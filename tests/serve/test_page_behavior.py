"""First view, examples, address, pending state, errors and copied commands of the page."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.service import Service
from bertsmith.text.wordpiece_trainer import train_wordpiece
from tests.serve.browsing import (
    KOREAN_SENTENCES,
    TABS,
    browser,
    desktop_page,
    format_bars,
    model_config,
    needs_browser,
    open_page,
    open_tab,
    page_models,
    page_url,
    read_bars,
    service,
    submit_form,
    wait_for_result,
)
from tests.serve.model_pause import TIMEOUT, paused_model, wait_until
from tests.serve.model_server import run_server
from tests.use.conftest import SENTENCES

__all__ = ["browser", "desktop_page", "page_models", "page_url", "service"]

HTML_INJECTION = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'> ${window.hacked=1}"
)


@needs_browser
def test_first_view_has_an_example_with_its_result(
    browser: Any, page_url: str, service: Service
) -> None:
    """Without a click: one sentence, the models, and a result, all visible on a laptop."""
    page = open_page(browser, page_url, 1366, 650)
    result = wait_for_result(page.get_by_role("tabpanel"))
    text = page.get_by_label("Text with [MASK]").input_value()
    (expected,) = service.fill("plain", [text], 8)
    assert read_bars(result) == format_bars(expected[0].predictions)
    assert page.locator("header p").inner_text().startswith("Try the models of this server.")
    assert page.locator(".model b").all_inner_texts() == list(service.models)
    assert "Answered by plain in " in result.locator(".answered").inner_text()
    for locator in (page.locator(".model").last, result.locator(".bars li").last):
        box = locator.bounding_box()
        assert box["y"] + box["height"] <= 650
    page.context.close()


@needs_browser
def test_tabs_depend_on_the_models(browser: Any, page_models: list[ServedModel]) -> None:
    """A tagging model has the tabs for entities and vectors only, and no field for the model."""
    names = next(model for model in page_models if model.name == "names")
    with run_server([names], has_page=True) as server:
        page = open_page(browser, server.url)
        tabs = page.get_by_role("tab").all_inner_texts()
        assert tabs == ["Entities", "Similarity", "One word", "Attention"]
        wait_for_result(page.get_by_role("tabpanel"))
        assert not page.get_by_label("Model", exact=True).is_visible()
        page.context.close()


@needs_browser
def test_examples_are_in_a_language_of_the_model(
    browser: Any, page_url: str, desktop_page: Any, tmp_path: Path
) -> None:
    """A model with a Korean vocabulary has Korean examples, and one with English words none."""
    tokenizer = train_wordpiece(iter(KOREAN_SENTENCES * 3), 227)
    torch.manual_seed(5)
    bundle.save(tmp_path / "ko", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    with run_server([load_served_model("ko", tmp_path / "ko")], has_page=True) as server:
        page = open_page(browser, server.url)
        wait_for_result(page.get_by_role("tabpanel"))
        korean = page.locator(".examples button").all_inner_texts()
        assert re.search("[가-힣]", page.get_by_label("Text with [MASK]").input_value())
        page.context.close()
    english = open_tab(desktop_page, "Fill in").locator(".examples button").all_inner_texts()
    assert len(korean) > 1
    assert len(english) > 1
    assert all(re.search("[가-힣]", text) for text in korean)
    assert not any(re.search("[가-힣]", text) for text in english)


@needs_browser
def test_examples_run_on_click(desktop_page: Any, service: Service) -> None:
    """A click on an example fills in the form and shows its result."""
    panel = open_tab(desktop_page, "Fill in")
    panel.locator(".result").evaluate("element => element.replaceChildren()")
    panel.locator(".examples button").nth(1).click()
    result = wait_for_result(panel)
    text = panel.get_by_label("Text with [MASK]").input_value()
    assert text == "The [MASK] was too [MASK] to cross the river."
    (expected,) = service.fill("plain", [text], 8)
    assert read_bars(result) == format_bars(
        [prediction for mask in expected for prediction in mask.predictions]
    )


@needs_browser
def test_unknown_text_has_a_hint(desktop_page: Any) -> None:
    """Text of which most tokens are [UNK] has a hint, and these tokens are marked."""
    panel = open_tab(desktop_page, "Fill in")
    result = submit_form(panel, "Fill in", {"Text with [MASK]": f"{KOREAN_SENTENCES[0]} [MASK]"})
    hint = result.get_by_role("note").inner_text()
    assert re.match(r"Most of this text is \[UNK\] \(\d\d % of the tokens\)", hint)
    result.locator(".tokens").wait_for()
    assert result.locator(".token.unknown").count() > 5
    result = submit_form(panel, "Fill in", {"Text with [MASK]": "the [MASK] was white"})
    assert result.get_by_role("note").count() == 0


@needs_browser
def test_address_has_the_tab_and_the_input(browser: Any, page_url: str) -> None:
    """Opening the address shows the same tab, input, model and result; Back opens the last tab."""
    page = open_page(browser, page_url)
    panel = open_tab(page, "Answer")
    fields = {"Question": "who & what?", "Context": f"{SENTENCES[3]}\n#? line"}
    result = submit_form(panel, "Answer", fields, "spans").locator("h3").first.inner_text()
    address = page.url
    tab, _, query = address.partition("#")[2].partition("?")
    assert tab == "answer"
    expected = {"model": "spans", "question": fields["Question"], "context": fields["Context"]}
    assert parse_qs(query) == {name: [value] for name, value in expected.items()}
    page.go_back()
    page.get_by_role("tabpanel", name="Fill in").wait_for()
    page.context.close()
    other = open_page(browser, address)
    panel = other.get_by_role("tabpanel", name="Answer", exact=True)
    assert wait_for_result(panel).locator("h3").first.inner_text() == result
    assert panel.get_by_label("Context").input_value() == fields["Context"]
    assert panel.get_by_label("Model", exact=True).input_value() == "spans"
    other.context.close()


@needs_browser
def test_pending_request_is_shown_and_cancelled(
    browser: Any, page_models: list[ServedModel]
) -> None:
    """While a model computes, the old result is dim below a spinner; typing cancels the request."""
    with run_server(page_models[:1], has_page=True) as server:
        page = open_page(browser, server.url)
        panel = page.get_by_role("tabpanel")
        wait_for_result(panel)
        with paused_model() as pause:
            panel.get_by_label("Text with [MASK]").fill("the [MASK] was white")
            opacity = "element => getComputedStyle(element).opacity"
            assert float(panel.locator(".result").evaluate(opacity)) < 0.5
            panel.get_by_role("button", name="Fill in", exact=True).click()
            assert pause.started.wait(TIMEOUT)
            panel.locator(".spinner").wait_for()
            assert "plain computes" in panel.get_by_role("status").inner_text()
            assert float(panel.locator(".result").evaluate(opacity)) < 0.5
            panel.get_by_label("Text with [MASK]").fill("the [MASK] was red")
            panel.locator(".spinner").wait_for(state="detached")
            cancelled = 'bertsmith_requests_total{endpoint="/fill",status="499"} 1.0'
            wait_until(lambda: cancelled in httpx.get(f"{server.url}/metrics").text)
        assert panel.locator(".result.stale").count() == 1
        panel.get_by_label("Text with [MASK]").press("Control+Enter")
        wait_for_result(panel)
        page.context.close()


@needs_browser
def test_unreachable_server_has_a_banner(browser: Any, page_url: str) -> None:
    """The banner disappears once the server answers again, and the request is repeated."""
    page = open_page(browser, page_url)
    panel = page.get_by_role("tabpanel")
    wait_for_result(panel)
    page.context.set_offline(True)
    panel.get_by_label("Text with [MASK]").fill("the [MASK] was white")
    panel.get_by_role("button", name="Fill in", exact=True).click()
    banner = page.get_by_role("alert")
    banner.wait_for()
    assert "The server does not respond." in banner.inner_text()
    assert panel.locator(".result.stale").count() == 1
    page.context.set_offline(False)
    banner.wait_for(state="hidden")
    panel.locator(".marked", has_text=re.compile("^the .+ was white$")).wait_for()
    wait_for_result(panel)
    page.context.close()


@needs_browser
def test_request_that_a_proxy_rejects_is_sent_again_only_once(browser: Any, page_url: str) -> None:
    """The second error is shown, although the server can be reached; a click sends it again."""
    page = open_page(browser, page_url)
    panel = page.get_by_role("tabpanel")
    wait_for_result(panel)
    routes: list[Any] = []

    def reject(route: Any) -> None:
        routes.append(route)
        route.fulfill(status=504, content_type="text/html", body="<h1>504 Gateway Time-out</h1>")

    page.route("**/fill", reject)
    button = panel.get_by_role("button", name="Fill in", exact=True)
    button.click()
    error = panel.get_by_role("alert")
    error.wait_for()
    assert error.inner_text() == "the server answered with status 504"
    page.locator("#banner").wait_for(state="hidden")
    # A third request would follow after two seconds.
    page.wait_for_timeout(2500)
    assert len(routes) == 2
    page.unroute("**/fill")
    button.click()
    panel.locator(".answered").wait_for()
    page.context.close()


@needs_browser
def test_failed_request_of_another_tab_is_sent_when_the_tab_is_opened(
    browser: Any, page_url: str
) -> None:
    """After an outage, the page repeats the request of the open tab first, the other later."""
    page = open_page(browser, page_url)
    wait_for_result(page.get_by_role("tabpanel"))
    page.context.set_offline(True)
    banner = page.get_by_role("alert")
    for title in ("Attention", "Similarity", "Attention", "Similarity"):
        page.get_by_role("tab", name=title, exact=True).click()
        banner.wait_for()
    page.context.set_offline(False)
    banner.wait_for(state="hidden")
    wait_for_result(page.get_by_role("tabpanel", name="Similarity", exact=True))
    assert open_tab(page, "Attention").locator(".answered").count() == 1
    page.context.close()


@needs_browser
def test_error_of_a_selected_head_is_shown(browser: Any, page_url: str) -> None:
    """If the matrix of a selected head cannot be loaded, its error replaces the previous head."""
    page = open_page(browser, page_url)
    panel = open_tab(page, "Attention")
    # The grid has smaller matrices, so that the page requests that of the selected head.
    submit_form(panel, "Show attention", {"Text": "iron and water " * 15})
    panel.locator(".head h3", has_text="Layer 1, head 1").wait_for()
    error = {"error": {"message": "the server is busy"}}
    page.route("**/attention", lambda route: route.fulfill(status=429, json=error))
    panel.locator("#attention-layer").select_option("3")
    panel.locator(".head [role=alert]", has_text="the server is busy").wait_for()
    assert panel.locator(".head h3").count() == 0
    page.unroute("**/attention")
    panel.locator("#attention-head").select_option("2")
    panel.locator(".head h3", has_text="Layer 3, head 2").wait_for()
    page.context.close()


@needs_browser
@pytest.mark.parametrize("title", ["Fill in", "Similarity"])
def test_copied_commands_work(browser: Any, page_url: str, title: str) -> None:
    """The copied curl command and Python program get the response that the page shows."""
    page = open_page(browser, page_url)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    panel = open_tab(page, title)
    text = 'it\'s "the" [MASK] \\ $HOME `id` ☕'
    field = "Text with [MASK]" if title == "Fill in" else "Texts"
    button = "Fill in" if title == "Fill in" else "Compare"
    value = text if title == "Fill in" else f"{text}\nthe iron"
    result = submit_form(panel, button, {field: value})
    outputs = []
    for index, command in enumerate((["bash", "-c"], [sys.executable, "-c"])):
        copy_button = result.locator(".answered button").nth(index)
        copy_button.click()
        copy_button.filter(has_text="Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        process = subprocess.run([*command, copied], capture_output=True, text=True, check=True)
        parse = json.loads if index == 0 else ast.literal_eval
        outputs.append(parse(process.stdout))
    assert outputs[0] == outputs[1]
    if title == "Fill in":
        expected = [tuple(row) for row in outputs[0]["masks"][0]["predictions"]]
        assert read_bars(result) == format_bars(expected)
    else:
        cells = [float(cell) for cell in result.locator("tbody td").all_inner_texts()]
        assert cells == [round(number, 2) for row in outputs[0] for number in row]
    link = result.get_by_role("link", name="API docs").get_attribute("href")
    assert f'id="/{link.partition("#/")[2]}"' in httpx.get(f"{page_url}/docs").text
    page.context.close()


@needs_browser
def test_html_in_texts_is_escaped(desktop_page: Any) -> None:
    """Scripts in input texts are displayed and not executed."""
    forms = {
        "Fill in": ("Fill in", {"Text with [MASK]": f"[MASK] {HTML_INJECTION}"}),
        "Entities": ("Find them", {"Text": HTML_INJECTION}),
        "Answer": ("Answer", {"Question": HTML_INJECTION, "Context": HTML_INJECTION}),
        "Choose": ("Choose", {"Beginning": HTML_INJECTION, "Endings": f"{HTML_INJECTION}\niron"}),
        "Similarity": ("Compare", {"Texts": f"{HTML_INJECTION}\niron"}),
        "One word": (
            "Compare",
            {"Word": "script", "Sentences with the word": f"{HTML_INJECTION}\n" * 2},
        ),
        "Attention": ("Show attention", {"Text": HTML_INJECTION, "Second text": HTML_INJECTION}),
    }
    for tab, (button, fields) in forms.items():
        result = submit_form(open_tab(desktop_page, tab), button, fields)
        assert result.locator("script, img").count() == 0, tab
        assert result.locator(".error").count() == 0, tab
        if tab != "Attention":
            assert "window.hacked" in re.sub(r"person \d+ %", "", result.inner_text()), tab
    assert desktop_page.evaluate("window.hacked") is None


@needs_browser
def test_errors_are_shown_in_the_page(desktop_page: Any) -> None:
    """Invalid inputs give the message of the endpoint, which says what to do."""
    result = submit_form(
        open_tab(desktop_page, "Fill in"), "Fill in", {"Text with [MASK]": "no mask <b>here</b>"}
    )
    alert = result.get_by_role("alert").inner_text()
    assert "no [MASK] in 'no mask <b>here</b>'; put [MASK] where" in alert
    fields = {"Word": "anvil", "Sentences with the word": "iron"}
    result = submit_form(open_tab(desktop_page, "One word"), "Compare", fields)
    assert "the word 'anvil' is not in 'iron'" in result.get_by_role("alert").inner_text()
    fields = {"Text": " ", "Second text": ""}
    result = submit_form(open_tab(desktop_page, "Attention"), "Show attention", fields)
    assert "the text is empty" in result.get_by_role("alert").inner_text()
    for tab in ("Fill in", "One word", "Attention"):
        open_tab(desktop_page, tab).locator(".examples button").first.click()


@needs_browser
def test_similarities_of_many_texts_are_limited(browser: Any, page_url: str) -> None:
    """The page shows the first 100 of 400 texts."""
    page = open_page(browser, page_url)
    texts = "\n".join(f"{number} {SENTENCES[number % 5]}" for number in range(400))
    result = submit_form(open_tab(page, "Similarity"), "Compare", {"Texts": texts})
    assert "The page shows the first 100 of 400 texts." in result.inner_text()
    assert result.locator("tbody tr").count() == 100
    assert result.locator("tbody td").count() == 100**2
    assert result.locator(".map circle").count() == 100
    page.context.close()


@needs_browser
def test_result_that_cannot_be_shown_has_a_notice(browser: Any, page_url: str) -> None:
    """An exception in the page is an error message, not an unreachable server."""
    page = open_page(browser, page_url)
    panel = open_tab(page, "Similarity")
    page.route("**/similarity", lambda route: route.fulfill(body="null"))
    result = submit_form(panel, "Compare", {"Texts": "iron\nwater"})
    assert "The page cannot show the result: " in result.get_by_role("alert").inner_text()
    assert not page.locator("#banner").is_visible()
    page.context.close()


@needs_browser
def test_page_fits_a_phone(browser: Any, page_url: str) -> None:
    """At a width of 375 pixels, no tab scrolls horizontally, and controls have 44 pixels."""
    phone = open_page(browser, page_url, 375, 740, has_touch=True, is_mobile=True)
    for tab in TABS:
        open_tab(phone, tab)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 375, tab
        # Wider elements are inside scrollable containers.
        wide = phone.evaluate(
            "[...document.querySelectorAll('main *, header *')].filter(e => "
            "!e.closest('.scroll, .models, .examples') && e.getBoundingClientRect().right > 376)"
            ".map(e => e.outerHTML.slice(0, 120))"
        )
        assert not wide, tab
        small = phone.evaluate(
            "[...document.querySelectorAll('a, button, input, select, textarea, summary')].filter("
            "e => e.checkVisibility() && (e.getBoundingClientRect().height < 44 || "
            "e.getBoundingClientRect().width < 44)).map(e => e.outerHTML.slice(0, 120))"
        )
        assert not small, tab
    phone.context.close()


@needs_browser
def test_result_is_scrolled_into_view_on_a_phone(browser: Any, page_url: str) -> None:
    """The result is below the form; a click on the button scrolls to it."""
    phone = open_page(browser, page_url, 375, 500, has_touch=True, is_mobile=True)
    panel = open_tab(phone, "Answer")
    assert panel.locator(".answered").bounding_box()["y"] > 500
    panel.get_by_role("button", name="Answer", exact=True).click()
    wait_for_result(panel)
    assert panel.locator(".answered").bounding_box()["y"] < 250
    phone.context.close()


@needs_browser
def test_page_works_with_the_keyboard(browser: Any, page_url: str, service: Service) -> None:
    """Arrow keys move between tabs, focus is visible, and Ctrl+Enter submits."""
    page = open_page(browser, page_url)
    wait_for_result(page.get_by_role("tabpanel"))
    focus = "document.activeElement"
    while page.evaluate(f"{focus}.innerText") != "Fill in":
        page.keyboard.press("Tab")
    reached = ["Fill in"]
    for _ in range(len(TABS) - 1):
        page.keyboard.press("ArrowRight")
        reached.append(page.evaluate(f"{focus}.innerText"))
        assert page.evaluate(f"getComputedStyle({focus}).outlineStyle") != "none"
    assert tuple(reached) == TABS
    page.keyboard.press("Home")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focus}.labels[0].innerText.trim()") == "Text with [MASK]"
    page.keyboard.press("Control+A")
    page.keyboard.type("the [MASK] hammer")
    page.keyboard.press("Control+Enter")
    page.locator(".marked", has_text=re.compile("^the .+ hammer$")).wait_for()
    result = wait_for_result(page.get_by_role("tabpanel"))
    (expected,) = service.fill("plain", ["the [MASK] hammer"], 8)
    assert read_bars(result) == format_bars(expected[0].predictions)
    page.context.close()


#: JavaScript that computes the contrast of an element's text to its background (WCAG 2).
CONTRAST = """element => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const toRgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const style = getComputedStyle(element);
  const color = toRgba(element instanceof SVGElement ? style.fill : style.color);
  let parent = element, background = [0, 0, 0, 0];
  while (parent && background[3] === 0) {
    background = toRgba(getComputedStyle(parent).backgroundColor);
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
    selectors = {
        "Fill in": (".word", ".share", ".scale i", "h3", ".says", "h1", "header p", "header a",
                    "button.primary", "[role=tab][aria-selected=true]", "[aria-selected=false]",
                    "label", ".examples button", ".answered", ".link", ".token", "mark", "kbd"),
        "Entities": ("mark small",),
        "Similarity": ("td", "th", "figcaption", "label small"),
        "Attention": (".from > text", ".large text"),
    }  # fmt: skip
    background = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    for tab, names in selectors.items():
        open_tab(page, tab)
        page.locator(".token").first.wait_for()
        for selector in names:
            contrast = page.locator(f"{selector}:visible").first.evaluate(CONTRAST)
            assert contrast >= 4.5, (tab, selector)
    page.context.close()
