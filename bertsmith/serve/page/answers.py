"""What the models answer, as HTML: one function an ability. It never reads a form's fields."""

from collections.abc import Callable

from bertsmith.serve.page.markup import bars, cut_note, marked, notice, percent, section
from bertsmith.serve.service import Service
from bertsmith.use.fill import MASK_TOKEN, Filling

#: Words shown for a mask, and further answers shown.
WORDS, OTHERS = 8, 5
#: A function of the service, a model's name and the texts of a form.
Show = Callable[..., str]


def fill(service: Service, model: str | None, text: str) -> str:
    """Show the likeliest words for each mask as bars, and the text with the best of them."""
    (found,) = service.fill(model, [text], WORDS)
    parts = [_with_best(text, found)]
    for number, own in enumerate(found, 1):
        whole = own.words[0][1]
        title = f"Mask {number}" if len(found) > 1 else "The likeliest words"
        parts.append(section(title, bars(own.words, whole=whole)))
    return "".join(parts)


def _with_best(text: str, found: list[Filling]) -> str:
    filled, spans, done = "", [], 0
    for own in found:
        filled += text[done : own.place]
        word = own.words[0][0]
        if word.startswith("##") and not filled[-1:].isspace():
            word = word[2:]
        spans.append((len(filled), len(filled) + len(word), "", 0))
        filled += word
        done = own.place + len(MASK_TOKEN)
    return marked(filled + text[done:], spans)


def pair(service: Service, model: str | None, a: str, b: str) -> str:
    """Show how probable it is that B follows A."""
    (found,) = service.pair(model, [(a, b)])
    follows = found.follows >= 0.5
    words = "B follows A" if follows else "B does not follow A"
    shares = [("B follows A", found.follows), ("it does not", 1 - found.follows)]
    shown = section(words, bars(shares, best=0 if follows else 1))
    if found.left_out:
        shown += notice(f"{found.left_out} tokens were left out to fit the model.", "note")
    return shown


def classify(service: Service, model: str | None, text: str, second: str) -> str:
    """Show labels as bars, or the number of a regression model."""
    (found,) = service.classify(model, [(text, second) if second.strip() else text])
    if found.score is not None:
        shown = f'<p class="bs-number"><output>{found.score:.3f}</output></p>'
        return section("Score", shown) + cut_note(found.cut_off)
    return section(found.labels[0][0], bars(found.labels)) + cut_note(found.cut_off)


def tag(service: Service, model: str | None, text: str) -> str:
    """Show a text with its entities, or the tags of its words."""
    (found,) = service.tag(model, [text])
    labels = sorted({span.label for span in found.spans})
    spans = [
        (one.start, one.end, f"{one.label} {100 * one.probability:.0f} %", labels.index(one.label))
        for one in found.spans
    ]
    none = "" if spans else notice("The model finds no entity in this text.", "note")
    return section("", marked(text, spans) + none)


def answer(service: Service, model: str | None, question: str, context: str) -> str:
    """Show the answer in its context, with its probability and the next best."""
    (found,) = service.answer(model, [(question, context)])
    if found.start is None or found.end is None:
        title, spans = "The context gives no answer", []
    else:
        title, spans = found.text, [(found.start, found.end, percent(found.probability), 0)]
    others = [(one.text or "(no answer)", one.probability) for one in found.candidates[:OTHERS]]
    best = next((n for n, one in enumerate(found.candidates[:OTHERS]) if one == found.best), None)
    shown = section(title, marked(context, spans))
    return shown + section("Candidates", bars(others, best=best)) + cut_note(found.cut_off)


def choose(service: Service, model: str | None, prompt: str, endings: str) -> str:
    """Show how well each ending fits; ``endings``: one a line."""
    given = lines(endings)
    (found,) = service.choose(model, [(prompt, given)])
    shares = list(zip(given, found.probabilities, strict=True))
    shown = section(given[found.best], bars(shares, best=found.best))
    return shown + cut_note(found.cut_off)


def lines(text: str) -> list[str]:
    """Return the lines of a field that say something."""
    return [line.strip() for line in text.splitlines() if line.strip()]
