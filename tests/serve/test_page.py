"""What each panel of the page does, in a real browser.

These tests never look at the page as a whole: tests/serve/test_page_manners.py does.
"""

from typing import Any

import numpy as np

from bertsmith.use.explain import attention
from bertsmith.use.similar import similar
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
    service,
    shares,
)
from tests.use.conftest import TEXT

__all__ = ["address", "browser", "desk", "service"]

#: Tokens that no text of the fixtures has fewer of, for what is shown of 128.
LONG = " ".join(TEXT * 3)


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
def test_attention_of_128_tokens_has_few_lines(desk: Any, service: Counting) -> None:
    """128 tokens give at most three lines each, not 128, so that the page stays responsive."""
    found = attention(service.models["plain"].bundle, LONG, max_seqlen=128)
    assert len(found.tokens) == 128
    words = service.models["plain"].bundle.tokenizer.encode_with_offsets(LONG)[1]
    panel = go(desk, "Attention")
    given = {"Text": LONG[: words[125][1]], "Second text": ""}
    result = ask(panel, "Show attention", given)
    panel.locator(".bs-grid button").nth(11).wait_for()
    assert result.locator(".bs-from").count() == 128
    assert 128 <= result.locator(".bs-line").count() <= 3 * 128
    result.locator(".bs-from").nth(60).focus()
    assert result.locator(".bs-line:visible").count() <= 3
