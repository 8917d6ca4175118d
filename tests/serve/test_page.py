"""Each tab of the page, in a real browser."""

from typing import Any

import numpy as np

from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
from tests.serve.browsing import (
    QUESTION,
    CountingService,
    browser,
    desktop_page,
    format_bars,
    needs_browser,
    open_tab,
    page_url,
    read_bars,
    service,
    submit_form,
)
from tests.use.conftest import SENTENCES

__all__ = ["browser", "desktop_page", "page_url", "service"]

#: Text with more than 128 tokens.
LONG_TEXT = " ".join(SENTENCES * 3)


@needs_browser
def test_fill(desktop_page: Any, service: CountingService) -> None:
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
def test_next_sentence(desktop_page: Any, service: CountingService) -> None:
    """The probability that B follows A is a heading and bars."""
    panel = open_tab(desktop_page, "Next sentence")
    result = submit_form(
        panel, "Does B follow A?", {"Text A": SENTENCES[0], "Text B": SENTENCES[1]}
    )
    (expected,) = service.pair("plain", [(SENTENCES[0], SENTENCES[1])])
    follows = expected.next_sentence_probability
    assert read_bars(result) == format_bars(
        [("B follows A", follows), ("it does not", 1 - follows)]
    )
    title = "B follows A" if follows >= 0.5 else "B does not follow A"
    assert result.locator("h3").inner_text() == title


@needs_browser
def test_classify(desktop_page: Any, service: CountingService) -> None:
    """Labels have probabilities, for texts and pairs; a regression model has a score."""
    panel = open_tab(desktop_page, "Classify")
    result = submit_form(panel, "Classify", {"Text": SENTENCES[2]})
    (expected,) = service.classify("mood", [SENTENCES[2]])
    assert read_bars(result) == format_bars(expected.labels)
    assert result.locator("h3").inner_text() == expected.labels[0][0]
    result = submit_form(panel, "Classify", {"Second text": SENTENCES[3]})
    assert read_bars(result) == format_bars(
        service.classify("mood", [(SENTENCES[2], SENTENCES[3])])[0].labels
    )
    result = submit_form(panel, "Classify", {"Text": SENTENCES[2], "Second text": ""}, "stars")
    (number,) = service.classify("stars", [SENTENCES[2]])
    assert result.locator("output").inner_text() == f"{number.score:.3f}"


@needs_browser
def test_entities_are_highlighted(desktop_page: Any, service: CountingService) -> None:
    """Entities are highlighted with their labels and probabilities."""
    result = submit_form(open_tab(desktop_page, "Entities"), "Find them", {"Text": SENTENCES[3]})
    (expected,) = service.tag("names", [SENTENCES[3]])
    assert len(expected.spans) > 5
    marks = [mark.inner_text() for mark in result.locator("mark").all()]
    assert marks == [f"{span.text}PER {100 * span.probability:.0f} %" for span in expected.spans]


@needs_browser
def test_answer_is_highlighted_in_its_context(desktop_page: Any, service: CountingService) -> None:
    """The answer is highlighted with its probability; without an answer nothing is highlighted."""
    panel = open_tab(desktop_page, "Answer")
    fields = {"Question": QUESTION, "Context": SENTENCES[0]}
    result = submit_form(panel, "Answer", fields, "spans")
    (expected,) = service.answer("spans", [(QUESTION, SENTENCES[0])])
    mark = result.locator("mark").inner_text()
    assert mark == f"{expected.text}{100 * expected.probability:.1f} %"
    before = result.locator("mark").evaluate(
        "element => element.previousSibling?.textContent ?? ''"
    )
    assert before == SENTENCES[0][: expected.start]
    result = submit_form(panel, "Answer", fields, "silent")
    assert result.locator("h3").first.inner_text() == "The context gives no answer"
    assert result.locator("mark").count() == 0


@needs_browser
def test_choose(desktop_page: Any, service: CountingService) -> None:
    """Endings have probabilities in their order; the best ending is the heading."""
    fields = {"Beginning": SENTENCES[0], "Endings": "\n".join(SENTENCES[1:4])}
    result = submit_form(open_tab(desktop_page, "Choose"), "Choose", fields)
    (expected,) = service.choose("endings", [(SENTENCES[0], SENTENCES[1:4])])
    assert read_bars(result) == format_bars(
        list(zip(SENTENCES[1:4], expected.probabilities, strict=True))
    )
    assert result.locator("h3").inner_text() == SENTENCES[1 + expected.best_index]
    assert result.locator(".bs-best .bs-word").inner_text() == SENTENCES[1 + expected.best_index]


#: JavaScript that returns the coordinates of the dots of a map.
DOT_COORDINATES = (
    "map => [...map.querySelectorAll('circle')]"
    ".map(dot => [dot.cx.baseVal.value, dot.cy.baseVal.value])"
)


def pairwise_map_distances(embedder: Any, texts: list[str], layer: int) -> Any:
    """Return the distances between the principal components, from an eigendecomposition."""
    words = embedder.encode_word(texts, "smith", layer=layer)
    vectors = np.stack([word.vector for word in words])
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    centered = units - units.mean(0)
    eigenvalues, eigenvectors = np.linalg.eigh(centered @ centered.T)
    points = eigenvectors[:, -2:] * np.sqrt(eigenvalues[-2:].clip(0))
    return np.linalg.norm(points[:, None] - points, axis=-1)


@needs_browser
def test_word_distances_of_each_layer(desktop_page: Any, service: CountingService) -> None:
    """They equal those of ``similar``; the vectors of all layers are computed once."""
    texts = [SENTENCES[0], SENTENCES[3], "the smith and the smith"]
    num_calls = service.num_calls
    panel = open_tab(desktop_page, "One word")
    fields = {"Word": "smith", "Sentences with the word": "\n".join(texts)}
    result = submit_form(panel, "Compare", fields)
    embedder = service.models["plain"].embedder
    slider = panel.get_by_label("number input for Layer")
    for layer in (3, 0, 1):
        if layer != 3:
            slider.fill(str(layer))
            slider.press("Tab")
        name = f"layer {layer}" if layer else "the embeddings"
        result.locator("h3", has_text=f"'smith' in {name}").wait_for()
        expected = similar(embedder, texts, "smith", layer=layer).distances
        cells = [float(cell) for cell in result.locator("tbody td").all_inner_texts()]
        np.testing.assert_allclose(cells, expected.ravel(), atol=0.0051)
        assert result.locator(".bs-map circle").count() == 4
        dots = np.array(result.locator(".bs-map").evaluate(DOT_COORDINATES))
        actual = np.linalg.norm(dots[:, None] - dots, axis=-1)
        on_map = pairwise_map_distances(embedder, texts, layer)
        np.testing.assert_allclose(actual / actual.max(), on_map / on_map.max(), atol=0.01)
    assert service.num_calls == num_calls + 1


@needs_browser
def test_attention_of_selected_heads(desktop_page: Any, service: CountingService) -> None:
    """A head has lines with probabilities; the grid selects heads by mouse and keyboard."""
    panel = open_tab(desktop_page, "Attention")
    fields = {"Text": SENTENCES[3], "Second text": SENTENCES[4]}
    result = submit_form(panel, "Show attention", fields)
    expected = attention(service.models["plain"].bundle, SENTENCES[3], SENTENCES[4])
    panel.locator(".bs-grid button").nth(11).wait_for()
    assert panel.locator(".bs-grid button").count() == 12
    first = result.locator(".bs-from").nth(3)
    row = expected.probabilities[0, 0, 3]
    strongest = int(row.argmax())
    label = (
        f"{expected.tokens[3]} attends to {expected.tokens[strongest]} {100 * row[strongest]:.1f} %"
    )
    assert first.get_attribute("aria-label").startswith(label)
    # Hovering or focusing a token hides the lines of the others.
    num_lines = result.locator(".bs-line:visible").count()
    num_lines_of_token = first.locator(".bs-line").count()
    assert num_lines > num_lines_of_token > 0
    first.locator("rect").hover()
    assert result.locator(".bs-line:visible").count() == num_lines_of_token
    desktop_page.mouse.move(0, 0)
    assert result.locator(".bs-line:visible").count() == num_lines
    first.focus()
    assert result.locator(".bs-line:visible").count() == num_lines_of_token
    panel.get_by_label("layer 2, head 3", exact=True).click()
    result.locator("h3", has_text="Layer 2, head 3").wait_for()
    desktop_page.keyboard.press("ArrowDown")
    desktop_page.keyboard.press("Enter")
    result.locator("h3", has_text="Layer 3, head 3").wait_for()
    assert panel.get_by_label("number input for Layer").input_value() == "3"
    row = expected.probabilities[2, 2, 5]
    label = f"attends to {expected.tokens[int(row.argmax())]} {100 * row.max():.1f} %"
    assert label in result.locator(".bs-from").nth(5).get_attribute("aria-label")


@needs_browser
def test_attention_of_many_tokens_has_few_lines(
    desktop_page: Any, service: CountingService
) -> None:
    """128 tokens have at most three lines each, so that the page stays responsive."""
    maps = attention(service.models["plain"].bundle, LONG_TEXT, max_seqlen=128)
    assert len(maps.tokens) == 128
    offsets = service.models["plain"].bundle.tokenizer.encode_with_offsets(LONG_TEXT)[1]
    panel = open_tab(desktop_page, "Attention")
    fields = {"Text": LONG_TEXT[: offsets[125][1]], "Second text": ""}
    result = submit_form(panel, "Show attention", fields)
    panel.locator(".bs-grid button").nth(11).wait_for()
    assert result.locator(".bs-from").count() == 128
    assert 128 <= result.locator(".bs-line").count() <= 3 * 128
    result.locator(".bs-from").nth(60).focus()
    assert result.locator(".bs-line:visible").count() <= 3
