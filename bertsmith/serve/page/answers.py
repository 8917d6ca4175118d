"""Run a task on a form's texts and render the result as HTML, one function per task."""

from collections.abc import Callable

from bertsmith.plurals import count_noun
from bertsmith.serve.page.markup import bars, highlight, notice, percent, section, truncation_note
from bertsmith.serve.service import Service
from bertsmith.text.mask import MASK_TOKEN
from bertsmith.use.fill import Filling

#: Number of predictions shown per mask.
NUM_WORDS = 8
#: Number of candidate answers shown.
NUM_CANDIDATES = 5
#: Takes the service, the name of a model and the texts of a form; returns HTML.
Show = Callable[..., str]


def fill(service: Service, model: str | None, text: str) -> str:
    """Show the most probable tokens of each mask as bars, and the text with the best of them."""
    (masks,) = service.fill(model, [text], NUM_WORDS)
    parts = [_fill_with_best(text, masks)]
    for number, mask in enumerate(masks, 1):
        highest = mask.predictions[0][1]
        title = f"Mask {number}" if len(masks) > 1 else "Predictions"
        parts.append(section(title, bars(mask.predictions, maximum=highest)))
    return "".join(parts)


def _fill_with_best(text: str, masks: list[Filling]) -> str:
    """Return the text with each mask replaced by its best token, highlighted."""
    filled = ""
    spans = []
    position = 0
    for mask in masks:
        filled += text[position : mask.start]
        word = mask.predictions[0][0]
        if word.startswith("##") and not filled[-1:].isspace():
            word = word[2:]
        spans.append((len(filled), len(filled) + len(word), "", 0))
        filled += word
        position = mask.start + len(MASK_TOKEN)
    return highlight(filled + text[position:], spans)


def pair(service: Service, model: str | None, a: str, b: str) -> str:
    """Show the probability that B follows A."""
    (prediction,) = service.pair(model, [(a, b)])
    probability = prediction.next_sentence_probability
    follows = probability >= 0.5
    title = "B follows A" if follows else "B does not follow A"
    probabilities = [("B follows A", probability), ("it does not", 1 - probability)]
    html = section(title, bars(probabilities, best=0 if follows else 1))
    if prediction.num_removed_tokens:
        html += notice(
            f"{count_noun(prediction.num_removed_tokens, 'token was', 'tokens were')} "
            "truncated to fit the model.",
            "note",
        )
    return html


def classify(service: Service, model: str | None, text: str, second: str) -> str:
    """Show labels as bars, or the score of a regression model."""
    (prediction,) = service.classify(model, [(text, second) if second.strip() else text])
    note = truncation_note(prediction.is_truncated)
    if prediction.score is not None:
        score = f'<p class="bs-number"><output>{prediction.score:.3f}</output></p>'
        return section("Score", score) + note
    return section(prediction.labels[0][0], bars(prediction.labels)) + note


def tag(service: Service, model: str | None, text: str) -> str:
    """Highlight the entities of a text, or the tags of its words."""
    (tagged,) = service.tag(model, [text])
    labels = sorted({span.label for span in tagged.spans})
    spans = [
        (
            span.start,
            span.end,
            f"{span.label} {100 * span.probability:.0f} %",
            labels.index(span.label),
        )
        for span in tagged.spans
    ]
    note = "" if spans else notice("The model finds no entity in this text.", "note")
    return section("", highlight(text, spans) + note)


def answer(service: Service, model: str | None, question: str, context: str) -> str:
    """Highlight the answer in its context, and show the best candidates."""
    (result,) = service.answer(model, [(question, context)])
    if result.start is None or result.end is None:
        title, spans = "The context gives no answer", []
    else:
        title, spans = result.text, [(result.start, result.end, percent(result.probability), 0)]
    candidates = result.candidates[:NUM_CANDIDATES]
    rows = [(span.text or "(no answer)", span.probability) for span in candidates]
    best = next((index for index, span in enumerate(candidates) if span == result.best), None)
    html = section(title, highlight(context, spans)) + section("Candidates", bars(rows, best=best))
    return html + truncation_note(result.is_truncated)


def choose(service: Service, model: str | None, prompt: str, endings: str) -> str:
    """Show the probability of each ending; ``endings`` has one per line."""
    choices = split_lines(endings)
    (result,) = service.choose(model, [(prompt, choices)])
    rows = list(zip(choices, result.probabilities, strict=True))
    html = section(choices[result.best_index], bars(rows, best=result.best_index))
    return html + truncation_note(result.is_truncated)


def split_lines(text: str) -> list[str]:
    """Return the non-empty lines of a text field."""
    return [line.strip() for line in text.splitlines() if line.strip()]
