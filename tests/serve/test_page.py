"""Each tab of the page, in a real browser."""

import re
from typing import Any

import numpy as np
import pytest

from bertsmith.bundle import FineTunedBundle
from bertsmith.serve.models import ServedModel
from bertsmith.serve.page import Page
from bertsmith.serve.service import Service
from bertsmith.use.attributions import attribute
from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
from tests.serve.browsing import (
    QUESTION,
    browser,
    desktop_page,
    format_bars,
    format_percent,
    needs_browser,
    open_tab,
    page_models,
    page_url,
    read_bars,
    service,
    submit_form,
    wait_for_result,
)
from tests.use.conftest import SENTENCES

__all__ = ["browser", "desktop_page", "page_models", "page_url", "service"]

#: Text with more than 128 tokens.
LONG_TEXT = " ".join(SENTENCES * 3)


@needs_browser
def test_fill(desktop_page: Any, service: Service) -> None:
    """The predictions for two masks are bars, below the text with the best predictions."""
    text = "the [MASK] was [MASK] the iron"
    result = submit_form(open_tab(desktop_page, "Fill in"), "Fill in", {"Text with [MASK]": text})
    (expected,) = service.fill("plain", [text], 8)
    assert read_bars(result) == format_bars([*expected[0].predictions, *expected[1].predictions])
    assert result.locator("h3").all_inner_texts() == ["Mask 1", "Mask 2"]
    best = [mask.predictions[0][0].removeprefix("##") for mask in expected]
    marks = [mark.inner_text() for mark in result.locator("mark").all()]
    assert [word.removeprefix("##") for word in marks] == best


@needs_browser
def test_bars_have_a_scale_from_0_to_100_percent(desktop_page: Any, service: Service) -> None:
    """The width of a bar is the probability, not the probability relative to the best one."""
    panel = open_tab(desktop_page, "Fill in")
    result = submit_form(panel, "Fill in", {"Text with [MASK]": "a [MASK] sound"})
    probabilities = [
        value for _, value in service.fill("plain", ["a [MASK] sound"], 8)[0][0].predictions
    ]
    widths = result.locator(".bar").evaluate_all(
        "bars => bars.map(bar => bar.firstChild.getBoundingClientRect().width"
        " / bar.getBoundingClientRect().width)"
    )
    assert probabilities[0] < 0.9
    # A bar is at least one pixel wide.
    np.testing.assert_allclose(widths, probabilities, atol=0.005)
    assert result.locator(".scale i").all_inner_texts() == ["0 %", "50 %", "100 %"]


@needs_browser
def test_next_sentence(desktop_page: Any, service: Service) -> None:
    """The probability that B follows A is a heading and bars."""
    panel = open_tab(desktop_page, "Next sentence")
    result = submit_form(
        panel, "Does B follow A?", {"Text A": SENTENCES[0], "Text B": SENTENCES[1]}
    )
    (expected,) = service.pair("plain", [(SENTENCES[0], SENTENCES[1])])
    follows = expected.next_sentence_probability
    assert read_bars(result) == format_bars(
        [("B follows A", follows), ("B does not follow A", 1 - follows)]
    )
    title = "B follows A" if follows >= 0.5 else "B does not follow A"
    assert result.locator("h3").inner_text() == title


@needs_browser
def test_classify(desktop_page: Any, service: Service) -> None:
    """Labels have probabilities, for texts and pairs; a regression model has a score."""
    panel = open_tab(desktop_page, "Classify")
    fields = {"Text": SENTENCES[2], "Second text": ""}
    result = submit_form(panel, "Classify", fields, "mood")
    (expected,) = service.classify("mood", [SENTENCES[2]])
    assert read_bars(result) == format_bars(expected.labels)
    assert result.locator("h3").inner_text() == expected.labels[0][0]
    result = submit_form(panel, "Classify", {"Second text": SENTENCES[3]})
    assert read_bars(result) == format_bars(
        service.classify("mood", [(SENTENCES[2], SENTENCES[3])])[0].labels
    )
    result = submit_form(panel, "Classify", fields, "stars")
    (number,) = service.classify("stars", [SENTENCES[2]])
    assert result.locator("output").inner_text() == f"{number.score:.3f}"


@needs_browser
def test_attributions_of_a_classification(
    desktop_page: Any, page_models: list[ServedModel]
) -> None:
    """The tokens are shaded by their attributions, and a sentence names the strongest ones."""
    bundle = next(model.bundle for model in page_models if model.name == "mood")
    assert isinstance(bundle, FineTunedBundle)
    expected = attribute(bundle, SENTENCES[2])
    panel = open_tab(desktop_page, "Classify")
    fields = {"Text": SENTENCES[2], "Second text": ""}
    result = submit_form(panel, "Classify", fields, "mood")
    view = result.locator(".attributions")
    assert view.locator(".token").count() == 0
    view.locator("summary").click()
    view.locator(".token").first.wait_for()
    assert view.locator(".token").all_inner_texts() == expected.tokens
    changes = [f"{'−' if value < 0 else '+'}{100 * abs(value):.1f}" for value in expected.values]
    titles = [token.get_attribute("title") for token in view.locator(".token").all()]
    assert titles == [f"{change} percentage points" for change in changes]
    strongest = int(np.argmax(np.abs(expected.values)))
    styles = [token.get_attribute("style") for token in view.locator(".token").all()]
    assert styles[strongest] == "--amount: 60%;"
    kind = "raises" if expected.values[strongest] > 0 else "lowers"
    assert kind in str(view.locator(".token").nth(strongest).get_attribute("class"))
    best = int(np.argmax(expected.values))
    summary = view.locator(".summary").inner_text()
    assert f"the probability of “{expected.label}”" in summary
    assert f"Raise it: {expected.tokens[best]} {changes[best]}" in summary
    assert " percentage points. Lower it: " in summary
    # The box stays open for the next result.
    result = submit_form(panel, "Classify", {"Text": "iron " * 150}, "mood")
    result.locator(".attributions .token").nth(100).wait_for()
    result.locator(".attributions summary").click()


@needs_browser
def test_attributions_that_round_to_zero_are_not_named(desktop_page: Any) -> None:
    """A token that changes the probability by 0.01 percentage points is not named."""
    answer = {
        "label": "good",
        "score": 0.5,
        "tokens": ["[CLS]", "forge", "road", "smith", "[SEP]"],
        "segments": [0] * 5,
        "attributions": [0.0, 0.2, 0.0001, -0.0001, -0.1],
        "truncated": False,
    }
    desktop_page.route("**/attributions", lambda route: route.fulfill(json=answer))
    panel = open_tab(desktop_page, "Classify")
    result = submit_form(panel, "Classify", {"Text": "forge road smith", "Second text": ""}, "mood")
    view = result.locator(".attributions")
    if view.get_attribute("open") is None:
        view.locator("summary").click()
    summary = view.locator(".summary")
    summary.wait_for()
    assert summary.inner_text().endswith(
        "Raise it: forge +20.0 percentage points. Lower it: [SEP] −10.0 percentage points."
    )
    view.locator("summary").click()
    desktop_page.unroute("**/attributions")


@needs_browser
def test_labels_are_words(desktop_page: Any, service: Service) -> None:
    """The labels 0 and 1 of SST-2 are "negative" and "positive", and PER is "person"."""
    panel = open_tab(desktop_page, "Classify")
    result = submit_form(panel, "Classify", {"Text": SENTENCES[2], "Second text": ""}, "sentiment")
    (expected,) = service.classify("sentiment", [SENTENCES[2]])
    names = {"0": "negative", "1": "positive"}
    assert read_bars(result) == format_bars(
        [(names[label], score) for label, score in expected.labels]
    )
    result = submit_form(open_tab(desktop_page, "Entities"), "Find them", {"Text": "the smith"})
    assert re.match(r"person \d+ %", result.locator("mark small").first.inner_text())


@needs_browser
def test_entities_are_highlighted(desktop_page: Any, service: Service) -> None:
    """Entities are highlighted with their labels, also behind characters outside the BMP."""
    text = f"\N{GRINNING FACE} {SENTENCES[3]}"
    result = submit_form(open_tab(desktop_page, "Entities"), "Find them", {"Text": text})
    (expected,) = service.tag("names", [text])
    assert len(expected.spans) > 5
    marks = [mark.inner_text() for mark in result.locator("mark").all()]
    assert marks == [f"{span.text}person {100 * span.probability:.0f} %" for span in expected.spans]


@needs_browser
def test_answer_is_highlighted_in_its_context(desktop_page: Any, service: Service) -> None:
    """The answer is highlighted with its probability; without an answer nothing is highlighted."""
    panel = open_tab(desktop_page, "Answer")
    fields = {"Question": QUESTION, "Context": SENTENCES[0]}
    result = submit_form(panel, "Answer", fields, "spans")
    (expected,) = service.answer("spans", [(QUESTION, SENTENCES[0])])
    mark = result.locator("mark").inner_text()
    assert mark == f"{expected.text}{format_percent(expected.probability)}"
    before = result.locator("mark").evaluate(
        "element => element.previousSibling?.textContent ?? ''"
    )
    assert before == SENTENCES[0][: expected.start]
    result = submit_form(panel, "Answer", fields, "silent")
    assert result.locator("h3").first.inner_text() == "The context gives no answer"
    assert result.locator("mark").count() == 0


@needs_browser
def test_choose(desktop_page: Any, service: Service) -> None:
    """Endings have probabilities in their order; the best ending is the heading."""
    fields = {"Beginning": SENTENCES[0], "Endings": "\n".join(SENTENCES[1:4])}
    result = submit_form(open_tab(desktop_page, "Choose"), "Choose", fields)
    (expected,) = service.choose("endings", [(SENTENCES[0], SENTENCES[1:4])])
    assert read_bars(result) == format_bars(
        list(zip(SENTENCES[1:4], expected.probabilities, strict=True))
    )
    assert result.locator("h3").inner_text() == SENTENCES[1 + expected.best_index]
    assert result.locator(".best .word").inner_text() == SENTENCES[1 + expected.best_index]


@needs_browser
def test_rerank(desktop_page: Any, service: Service) -> None:
    """The texts are bars, most relevant first."""
    fields = {"Query": QUESTION, "Texts": "\n".join(SENTENCES[:4])}
    result = submit_form(open_tab(desktop_page, "Rerank"), "Rerank", fields)
    outputs = [item.score or 0.0 for item in service.rerank("stars", QUESTION, SENTENCES[:4])]
    rows = [
        (text, 1 / (1 + np.exp(-score))) for text, score in zip(SENTENCES, outputs, strict=False)
    ]
    assert read_bars(result) == format_bars(sorted(rows, key=lambda row: -row[1]))


#: JavaScript that returns the coordinates of the dots of a map.
DOT_COORDINATES = (
    "map => [...map.querySelectorAll('circle')]"
    ".map(dot => [dot.cx.baseVal.value, dot.cy.baseVal.value])"
)


def measure_map_distances(result: Any) -> Any:
    """Return the distances between the dots of the shown map, relative to the largest one."""
    dots = np.array(result.locator(".map svg").evaluate(DOT_COORDINATES))
    distances = np.linalg.norm(dots[:, None] - dots, axis=-1)
    return distances / distances.max()


def compute_map_distances(vectors: Any) -> Any:
    """Return the same from principal components, computed with an eigendecomposition."""
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    centered = units - units.mean(0)
    eigenvalues, eigenvectors = np.linalg.eigh(centered @ centered.T)
    points = eigenvectors[:, -2:] * np.sqrt(eigenvalues[-2:].clip(0))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    return distances / distances.max()


@needs_browser
def test_similarity_of_texts(desktop_page: Any, service: Service) -> None:
    """The matrix has the cosines of the vectors, and the map their principal components."""
    panel = open_tab(desktop_page, "Similarity")
    result = submit_form(panel, "Compare", {"Texts": "\n".join(SENTENCES[:4])}, "plain")
    vectors = service.models["plain"].embedder.encode(SENTENCES[:4])
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cells = [float(cell) for cell in result.locator("tbody td").all_inner_texts()]
    np.testing.assert_allclose(cells, (units @ units.T).ravel(), atol=0.0051)
    np.testing.assert_allclose(
        measure_map_distances(result), compute_map_distances(vectors), atol=0.01
    )
    assert result.locator(".places li").all_inner_texts() == SENTENCES[:4]


@needs_browser
def test_word_distances_of_each_layer(desktop_page: Any, service: Service) -> None:
    """They equal those of ``similar``; the slider needs no further request."""
    texts = [SENTENCES[0], SENTENCES[3], "the smith and the smith"]
    panel = open_tab(desktop_page, "One word")
    fields = {"Word": "smith", "Sentences with the word": "\n".join(texts)}
    result = submit_form(panel, "Compare", fields, "plain")
    requested: list[str] = []
    desktop_page.on("request", lambda request: requested.append(request.url))
    embedder = service.models["plain"].embedder
    slider = panel.get_by_role("slider", name="Layer")
    for layer in (3, 0, 1):
        slider.fill(str(layer))
        name = f"layer {layer}" if layer else "the embeddings"
        result.locator("h3", has_text=f"“smith” in {name}").wait_for()
        expected = similar(embedder, texts, "smith", layer=layer)
        cells = [float(cell) for cell in result.locator("tbody td").all_inner_texts()]
        np.testing.assert_allclose(cells, expected.distances.ravel(), atol=0.0051)
        vectors = np.stack([occurrence.vector for occurrence in expected.occurrences])
        np.testing.assert_allclose(
            measure_map_distances(result), compute_map_distances(vectors), atol=0.01
        )
    assert requested == []


@needs_browser
@pytest.mark.parametrize("sign", [1, -1])
def test_maps_are_rotated_to_resemble_the_next_layer(
    desktop_page: Any, page_url: str, sign: int
) -> None:
    """Points that are rotated, or mirrored too, are aligned with the original ones."""
    points = np.array([[0.0, 1.0], [2.0, 0.5], [-1.0, -2.0], [0.3, 0.7]])
    cosine, sine = np.cos(0.7), np.sin(0.7)
    rotated = points @ np.array([[cosine, sine], [-sign * sine, sign * cosine]])
    url = f"{page_url}/page/{Page().version}/projection.js"
    aligned = desktop_page.evaluate(
        "async ([url, points, target]) => (await import(url)).align(points, target)",
        [url, rotated.tolist(), points.tolist()],
    )
    np.testing.assert_allclose(aligned, points, atol=1e-9)


@needs_browser
def test_attention_of_selected_heads(desktop_page: Any, service: Service) -> None:
    """A head has lines with probabilities; the grid selects heads by mouse and keyboard."""
    panel = open_tab(desktop_page, "Attention")
    fields = {"Text": "the smith worked", "Second text": "the iron was white"}
    result = submit_form(panel, "Show attention", fields, "plain")
    expected = attention(service.models["plain"].bundle, *fields.values())
    assert panel.locator(".grid button").count() == 12
    first = result.locator(".from").nth(3)
    row = expected.probabilities[0, 0, 3]
    strongest = int(row.argmax())
    label = f"{expected.tokens[3]} attends to {expected.tokens[strongest]} "
    assert first.get_attribute("aria-label").startswith(label + format_percent(row[strongest]))
    # Hovering or focusing a token hides the lines of the others.
    num_lines = result.locator(".weight:visible").count()
    num_lines_of_token = first.locator(".weight").count()
    assert num_lines > num_lines_of_token > 0
    first.locator("rect").hover()
    assert result.locator(".weight:visible").count() == num_lines_of_token
    desktop_page.mouse.move(0, 0)
    assert result.locator(".weight:visible").count() == num_lines
    first.focus()
    assert result.locator(".weight:visible").count() == num_lines_of_token
    panel.get_by_label("layer 2, head 3", exact=True).click()
    result.locator("h3", has_text="Layer 2, head 3").wait_for()
    desktop_page.keyboard.press("ArrowDown")
    desktop_page.keyboard.press("Enter")
    result.locator("h3", has_text="Layer 3, head 3").wait_for()
    assert panel.get_by_label("Layer", exact=True).input_value() == "3"
    row = expected.probabilities[2, 2, 5]
    label = f"attends to {expected.tokens[int(row.argmax())]} {format_percent(row.max())}"
    assert label in result.locator(".from").nth(5).get_attribute("aria-label")


@needs_browser
def test_attention_of_many_tokens(desktop_page: Any, service: Service) -> None:
    """128 tokens have at most three lines each, with the probabilities of the unpooled matrix."""
    offsets = service.models["plain"].bundle.tokenizer.encode_with_offsets(LONG_TEXT)[1]
    text = LONG_TEXT[: offsets[125][1]]
    maps = attention(service.models["plain"].bundle, text)
    assert len(maps.tokens) == 128
    panel = open_tab(desktop_page, "Attention")
    panel.get_by_label("Layer", exact=True).select_option("1")
    panel.get_by_label("Head", exact=True).select_option("1")
    result = submit_form(panel, "Show attention", {"Text": text, "Second text": ""}, "plain")
    result.locator(".from").nth(127).wait_for()
    assert 128 <= result.locator(".weight").count() <= 3 * 128
    row = maps.probabilities[0, 0, 60]
    label = f"attends to {maps.tokens[int(row.argmax())]} {format_percent(row.max())}"
    assert label in result.locator(".from").nth(60).get_attribute("aria-label")
    result.locator(".from").nth(60).focus()
    assert result.locator(".weight:visible").count() <= 3


@needs_browser
def test_heat_map_has_the_probabilities(desktop_page: Any, service: Service) -> None:
    """The opacity of a cell is the square root of the probability."""
    panel = open_tab(desktop_page, "Attention")
    fields = {"Text": "the smith worked", "Second text": ""}
    result = submit_form(panel, "Show attention", fields, "plain")
    panel.get_by_label("layer 2, head 4", exact=True).click()
    result.locator("h3", has_text="Layer 2, head 4").wait_for()
    alphas = result.locator(".large canvas").evaluate(
        "canvas => [...canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data]"
        ".filter((_, index) => index % 4 === 3)"
    )
    expected = attention(service.models["plain"].bundle, "the smith worked").probabilities[1, 3]
    np.testing.assert_allclose(np.array(alphas) / 255, np.sqrt(expected).ravel(), atol=0.003)


@needs_browser
@pytest.mark.parametrize("title", ["Fill in", "Answer"])
def test_tokens_are_shown_next_to_the_result(
    desktop_page: Any, service: Service, title: str
) -> None:
    """They are those that the model reads, with [MASK] as one token."""
    panel = open_tab(desktop_page, title)
    text = "the [MASK] was white" if title == "Fill in" else SENTENCES[0]
    field = "Text with [MASK]" if title == "Fill in" else "Context"
    result = submit_form(panel, title, {field: text})
    tokens = result.locator(".tokens").last
    tokens.wait_for()
    encoded = service.models["plain"].bundle.tokenizer
    ids = encoded.encode(text.replace("[MASK]", "smith"))
    expected = encoded.ids_to_tokens(ids)
    token_texts = tokens.locator(".token").all_inner_texts()
    smith = encoded.ids_to_tokens(encoded.encode("smith"))
    if title == "Fill in":
        assert token_texts == ["the", "[MASK]", *expected[1 + len(smith) :]]
    else:
        assert token_texts == expected
    result.locator("summary").click()
    assert not tokens.is_visible()


@needs_browser
def test_changing_the_model_runs_it(desktop_page: Any) -> None:
    """Selecting another model shows its result, which names the model."""
    panel = open_tab(desktop_page, "Classify")
    for model in ("stars", "mood"):
        panel.get_by_label("Model", exact=True).select_option(model)
        panel.locator(".answered", has_text=f"Answered by {model} in ").wait_for()
        wait_for_result(panel)
