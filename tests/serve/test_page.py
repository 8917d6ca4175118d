"""The page in a real browser: each thing that it offers, by mouse, by keyboard, on a phone."""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import Head, save_task
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.serve.batching import Patience
from bertsmith.serve.models import Served, served
from bertsmith.serve.service import Service
from bertsmith.text.training import train
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import TokenVectors
from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
from bertsmith.use.vectors import VectorSettings
from tests.use.conftest import TEXT

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn, of the extra serve, is not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from fastapi import FastAPI  # noqa: E402 - after the extra is known to be there
from gradio_client import Client  # noqa: E402
from gradio_client.exceptions import AppError  # noqa: E402

from bertsmith.serve.page import mount  # noqa: E402
from tests.serve.little import listening  # noqa: E402

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome")
     if (found := shutil.which(name))), None,
)  # fmt: skip
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
#: Tokens that no text of the fixtures has fewer of, for what is shown of 128.
LONG = " ".join(TEXT * 3)
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'> ${window.hacked=1}"
)
QUESTION = "where did the smith work?"


class Counting(Service):
    """Counts how often vectors of tokens are made."""

    def __init__(self, models: Sequence[Served]) -> None:
        super().__init__(models)
        self.embedded = 0

    def tokens(
        self,
        name: str | None,
        texts: Sequence[str],
        settings: VectorSettings,
        patience: Patience | None = None,
    ) -> list[TokenVectors]:
        """Return the vectors of tokens."""
        self.embedded += 1
        return super().tokens(name, texts, settings, patience)


def _config(words: Tokenizer, **more: Any) -> ModelConfig:
    values = {"layers": 3, "width": 24, "heads": 4, "feed_forward": 37, "max_positions": 160}
    return ModelConfig(vocab_size=words.vocab_size, init_range=0.3, **(values | more))


#: Model's name -> its head, and the bias of its outputs if it is to say one thing always.
HEADS: dict[str, tuple[Head, list[float] | None]] = {
    "mood": (Head("single", ("glad", "sad", "angry")), None),
    "stars": (Head("regression"), None),
    "names": (Head("entities", ("O", "B-PER", "I-PER")), [0.0, 90.0, 0.0]),
    "spans": (Head("span"), None),
    "silent": (Head("span"), None),
    "endings": (Head("choice"), None),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    """A random model of each kind, all with one vocabulary."""
    root = tmp_path_factory.mktemp("served")
    words = train(iter(TEXT * 3), 173)
    torch.manual_seed(3)
    bundle.save(root / "plain", PreTrainingModel(_config(words)), words, {})
    models = [served("plain", root / "plain")]
    for name, (head, bias) in HEADS.items():
        model = head.model(_config(words))
        if bias is not None:
            with torch.no_grad():
                list(model.parameters())[-1].copy_(torch.tensor(bias))
        info = {"heldout": {"null_threshold": -1e9}} if name == "silent" else {}
        save_task(root / name, model, words, head, info)
        models.append(served(name, root / name))
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


@needs_browser
def test_a_mask_is_filled_in(desk: Any, service: Counting) -> None:
    """For each of two masks the likeliest words stand as bars, the text with the best above."""
    text = "the [MASK] was [MASK] the iron"
    result = ask(go(desk, "Fill in"), "Fill in", {"Text with [MASK]": text})
    (wanted,) = service.fill("plain", [text], 8)
    assert bars(result) == shares([*wanted[0].words, *wanted[1].words])
    assert result.locator("h3").all_inner_texts() == ["Mask 1", "Mask 2"]
    best = [own.words[0][0].removeprefix("##") for own in wanted]
    found = [mark.inner_text() for mark in result.locator("mark").all()]
    assert [word.removeprefix("##") for word in found] == best


@needs_browser
def test_next_sentence(desk: Any, service: Counting) -> None:
    """The share that B follows A, in words and as bars."""
    panel = go(desk, "Next sentence")
    result = ask(panel, "Does B follow A?", {"Text A": TEXT[0], "Text B": TEXT[1]})
    (wanted,) = service.pair("plain", [(TEXT[0], TEXT[1])])
    follows = wanted.follows
    assert bars(result) == shares([("B follows A", follows), ("it does not", 1 - follows)])
    said = "B follows A" if follows >= 0.5 else "B does not follow A"
    assert result.locator("h3").inner_text() == said


@needs_browser
def test_classify(desk: Any, service: Counting) -> None:
    """Labels with their shares; of the model that is chosen instead, a number; and of pairs."""
    panel = go(desk, "Classify")
    result = ask(panel, "Classify", {"Text": TEXT[2]})
    (wanted,) = service.classify("mood", [TEXT[2]])
    assert bars(result) == shares(wanted.labels)
    assert result.locator("h3").inner_text() == wanted.labels[0][0]
    result = ask(panel, "Classify", {"Second text": TEXT[3]})
    assert bars(result) == shares(service.classify("mood", [(TEXT[2], TEXT[3])])[0].labels)
    result = ask(panel, "Classify", {"Text": TEXT[2], "Second text": ""}, "stars")
    (number,) = service.classify("stars", [TEXT[2]])
    assert result.locator("output").inner_text() == f"{number.score:.3f}"


@needs_browser
def test_entities_are_highlighted(desk: Any, service: Counting) -> None:
    """Each entity is marked where it stands, with its label."""
    result = ask(go(desk, "Entities"), "Find them", {"Text": TEXT[3]})
    (wanted,) = service.tag("names", [TEXT[3]])
    assert len(wanted.spans) > 5
    marks = [mark.inner_text() for mark in result.locator("mark").all()]
    assert marks == [f"{one.text}PER {100 * one.probability:.0f} %" for one in wanted.spans]


@needs_browser
def test_an_answer_is_highlighted_in_its_context(desk: Any, service: Counting) -> None:
    """The span is marked with its share; a model that gives no answer says so and marks none."""
    panel = go(desk, "Answer")
    given = {"Question": QUESTION, "Context": TEXT[0]}
    result = ask(panel, "Answer", given, "spans")
    (wanted,) = service.answer("spans", [(QUESTION, TEXT[0])])
    marked = result.locator("mark").inner_text()
    assert marked == f"{wanted.text}{100 * wanted.probability:.1f} %"
    before = result.locator("mark").evaluate("own => own.previousSibling?.textContent ?? ''")
    assert before == TEXT[0][: wanted.start]
    result = ask(panel, "Answer", given, "silent")
    assert result.locator("h3").first.inner_text() == "The context gives no answer"
    assert result.locator("mark").count() == 0


@needs_browser
def test_choose(desk: Any, service: Counting) -> None:
    """Each ending has its share, in the order given; the best is told above."""
    given = {"Beginning": TEXT[0], "Endings": "\n".join(TEXT[1:4])}
    result = ask(go(desk, "Choose"), "Choose", given)
    (wanted,) = service.choose("endings", [(TEXT[0], TEXT[1:4])])
    assert bars(result) == shares(list(zip(TEXT[1:4], wanted.probabilities, strict=True)))
    assert result.locator("h3").inner_text() == TEXT[1 + wanted.best]
    assert result.locator(".bs-best .bs-word").inner_text() == TEXT[1 + wanted.best]


#: Where the dots of a map stand.
PLACES = (
    "own => [...own.querySelectorAll('circle')]"
    ".map(one => [one.cx.baseVal.value, one.cy.baseVal.value])"
)


def word_maps_of(embedder: Any, texts: list[str], layer: int) -> Any:
    """Return how far the principal components lie apart, worked out another way."""
    vectors = np.stack([own.vector for own in embedder.word(texts, "smith", layer=layer)])
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    centred = units - units.mean(0)
    sizes, own = np.linalg.eigh(centred @ centred.T)
    points = own[:, -2:] * np.sqrt(sizes[-2:].clip(0))
    return np.linalg.norm(points[:, None] - points, axis=-1)


@needs_browser
def test_one_word_layer_by_layer(desk: Any, service: Counting) -> None:
    """The distances of each layer are those of ``similar``, and computed once for all layers."""
    texts = [TEXT[0], TEXT[3], "the smith and the smith"]
    before = service.embedded
    panel = go(desk, "One word")
    given = {"Word": "smith", "Sentences with the word": "\n".join(texts)}
    result = ask(panel, "Compare", given)
    embedder = service.models["plain"].embedder
    slider = panel.get_by_label("number input for Layer")
    for layer in (3, 0, 1):
        if layer != 3:
            slider.fill(str(layer))
            slider.press("Tab")
        name = f"layer {layer}" if layer else "the embeddings"
        result.locator("h3", has_text=f"'smith' in {name}").wait_for()
        wanted = similar(embedder, texts, "smith", layer=layer).distances
        cells = [float(cell) for cell in result.locator("tbody td").all_inner_texts()]
        np.testing.assert_allclose(cells, wanted.ravel(), atol=0.0051)
        assert result.locator(".bs-map circle").count() == 4
        drawn = result.locator(".bs-map").evaluate(PLACES)
        apart = np.linalg.norm(np.array(drawn)[:, None] - np.array(drawn), axis=-1)
        maps = word_maps_of(embedder, texts, layer)
        np.testing.assert_allclose(apart / apart.max(), maps / maps.max(), atol=0.01)
    assert service.embedded == before + 1


@needs_browser
def test_attention_lines_heat_and_grid(desk: Any, service: Counting) -> None:
    """Lines and heat of a head; a button of the grid, by mouse or arrow keys, shows its own."""
    panel = go(desk, "Attention")
    given = {"Text": TEXT[3], "Second text": TEXT[4]}
    result = ask(panel, "Show attention", given)
    wanted = attention(service.models["plain"].bundle, TEXT[3], TEXT[4])
    panel.locator(".bs-grid button").nth(11).wait_for()
    assert panel.locator(".bs-grid button").count() == 12
    first = result.locator(".bs-from").nth(3)
    row = wanted.probabilities[0, 0, 3]
    strongest = int(row.argmax())
    told = f"{wanted.tokens[3]} looks at {wanted.tokens[strongest]} {100 * row[strongest]:.1f} %"
    assert first.get_attribute("aria-label").startswith(told)
    # Its own lines alone, by the mouse and by the keyboard.
    every = result.locator(".bs-line:visible").count()
    own = first.locator(".bs-line").count()
    assert every > own > 0
    first.locator("rect").hover()
    assert result.locator(".bs-line:visible").count() == own
    desk.mouse.move(0, 0)
    assert result.locator(".bs-line:visible").count() == every
    first.focus()
    assert result.locator(".bs-line:visible").count() == own
    panel.get_by_label("layer 2, head 3", exact=True).click()
    result.locator("h3", has_text="Layer 2, head 3").wait_for()
    desk.keyboard.press("ArrowDown")
    desk.keyboard.press("Enter")
    result.locator("h3", has_text="Layer 3, head 3").wait_for()
    assert panel.get_by_label("number input for Layer").input_value() == "3"
    row = wanted.probabilities[2, 2, 5]
    told = f"looks at {wanted.tokens[int(row.argmax())]} {100 * row.max():.1f} %"
    assert told in result.locator(".bs-from").nth(5).get_attribute("aria-label")


@needs_browser
def test_attention_of_128_tokens_is_quick(desk: Any, service: Counting) -> None:
    """The lines of 128 tokens are few, come in seconds, and the page still answers at once."""
    found = attention(service.models["plain"].bundle, LONG, longest=128)
    assert len(found.tokens) == 128
    words = service.models["plain"].bundle.tokenizer.encode_with_offsets(LONG)[1]
    panel = go(desk, "Attention")
    start = time.monotonic()
    given = {"Text": LONG[: words[125][1]], "Second text": ""}
    result = ask(panel, "Show attention", given)
    panel.locator(".bs-grid button").nth(11).wait_for()
    assert time.monotonic() - start < 8
    assert result.locator(".bs-from").count() == 128
    assert 128 <= result.locator(".bs-line").count() <= 3 * 128
    start = time.monotonic()
    result.locator(".bs-from").nth(60).focus()
    assert result.locator(".bs-line:visible").count() <= 3
    assert time.monotonic() - start < 2


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


def test_the_page_stands_beside_the_endpoints(models: list[Served]) -> None:
    """In the server itself: / is the page, every endpoint answers, what is nowhere is 404."""
    with listening(models[:1], page=mount) as own:
        found = httpx.get(own.url)
        assert (found.status_code, found.headers["content-type"][:9]) == (200, "text/html")
        assert own.post("/embed", {"inputs": "a"}).status_code == 200
        assert httpx.get(f"{own.url}/health").json() == {"status": "ok"}
        assert "bertsmith_requests_total" in httpx.get(f"{own.url}/metrics").text
        assert httpx.get(f"{own.url}/nowhere").status_code == 404
