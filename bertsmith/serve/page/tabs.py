"""The tabs of the page: forms, one word in many sentences, attention. It never asks a model."""

import json
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.resources import files
from typing import Any, ParamSpec

from bertsmith.errors import BertsmithError
from bertsmith.serve.page import heat, lines, wordmap
from bertsmith.serve.page.answers import lines as lines_of
from bertsmith.serve.page.forms import ATTENTION_EXAMPLES, WORD_EXAMPLES, Field, Form
from bertsmith.serve.page.inspection import LONGEST, Looking
from bertsmith.serve.page.library import gr
from bertsmith.serve.page.markup import notice, safe, section
from bertsmith.serve.service import Service
from bertsmith.use.explain import AttentionMaps

Given = ParamSpec("Given")
#: The page's own events; programs ask the named endpoints. A visitor's newest step counts.
_OWN = {"api_visibility": "private", "show_progress": "minimal"}
_STEP = {**_OWN, "trigger_mode": "always_last", "show_progress": "hidden"}


def told(show: Callable[Given, str]) -> Callable[Given, str]:
    """Return a function that shows a BertsmithError as a message in the page."""

    @wraps(show)
    def shown(*given: Given.args, **named: Given.kwargs) -> str:
        try:
            return show(*given, **named)
        except BertsmithError as error:
            return notice(str(error))

    return shown


def form_tab(service: Service, form: Form) -> None:
    """Build a tab of text fields, a button and what the model says."""
    with gr.Tab(form.title, id=form.ability):
        _says(form.says)
        model = _model(service, form.ability)
        fields = [_field(own) for own in form.fields]
        button = gr.Button(form.button, variant="primary")
        _examples(fields, form.examples)
        result = _result(form.ability)
        show = told(partial(form.show, service))
        _asked(button, fields, show, [model, *fields], result)


def word_tab(service: Service, looking: Looking) -> None:
    """Build the tab of one word in several sentences, with a slider over the layers."""
    with gr.Tab("One word", id="word"):
        _says("How like one word's vectors are in several sentences, layer by layer.")
        model = _model(service, "embed")
        word = _field(Field("Word"))
        texts = _field(Field("Sentences with the word", 6, "one a line, two or more"))
        button = gr.Button("Compare", variant="primary")
        layers, _ = looking.sizes(None)
        layer = gr.Slider(0, layers, layers, step=1, label="Layer (0: the embeddings)")
        _examples([word, texts], WORD_EXAMPLES)
        result = _result("word")

        @told
        def show(name: str | None, word: str, texts: str, layer: int) -> str:
            maps = looking.word(name, word, tuple(lines_of(texts)))
            return wordmap.show(maps, min(int(layer), len(maps.kept) - 1))

        given = [model, word, texts, layer]
        _asked(button, [word], show, given, result)
        layer.input(show, given, result, **_STEP)

        def sized(name: str | None) -> Any:
            most, _ = looking.sizes(name)
            return gr.update(maximum=most, value=most)

        model.change(sized, model, layer, **_OWN)


def attention_tab(service: Service, looking: Looking) -> None:
    """Build the tab of attention: one head as lines and heat, and all heads as a grid."""
    with gr.Tab("Attention", id="attention"):
        _says(f"Which tokens each token looks at, head by head; at most {LONGEST} tokens.")
        model = _model(service, "embed")
        fields = [_field(Field("Text", 3)), _field(Field("Second text", 1, "may be empty"))]
        button = gr.Button("Show attention", variant="primary")
        layers, heads = looking.sizes(None)
        with gr.Row():
            layer, head = _slider("Layer", layers), _slider("Head", heads)
        _examples(fields, ATTENTION_EXAMPLES)
        result = _result("attention")
        script = files("bertsmith.serve.page").joinpath("grid.js").read_text("utf-8")
        heads_grid = gr.HTML(elem_id="grid", js_on_load=script)
        given = [model, *fields, layer, head]
        shown = partial(_head, looking)
        asked = _asked(button, fields[1:], told(shown), given, result)
        asked.then(told(partial(_grid, looking)), [model, *fields], heads_grid, **_OWN)
        for slider in (layer, head):
            slider.input(told(shown), given, result, **_STEP)
        heads_grid.select(_chosen(looking), given[:3], [layer, head, result], **_STEP)

        def sized(name: str | None) -> Any:
            return tuple(
                gr.update(maximum=max(size, 2), value=1, interactive=size > 1)
                for size in looking.sizes(name)
            )

        model.change(sized, model, [layer, head], **_OWN)


def _slider(label: str, size: int) -> Any:
    """Return a slider from 1 to ``size``; Gradio has none of a single value, so it is disabled."""
    return gr.Slider(1, max(size, 2), 1, step=1, label=label, min_width=140, interactive=size > 1)


def _head(looking: Looking, model: str | None, text: str, pair: str, layer: int, head: int) -> str:
    """Show one head large."""
    found = looking.attention(model, text, pair)
    layers, heads = found.probabilities.shape[:2]
    return _large(found, max(1, min(int(layer), layers)), max(1, min(int(head), heads)))


def _large(found: AttentionMaps, layer: int, head: int) -> str:
    cut = f"{found.left_out} tokens beyond the first {len(found.tokens)} were left out."
    note = notice(cut, "note") if found.left_out else ""
    # The button in the grid that this is.
    mark = f'.bs-grid [data-layer="{layer}"][data-head="{head}"]'
    style = f"<style>{mark} {{ outline: 3px solid #d97706; outline-offset: 1px }}</style>"
    both = f"{lines.picture(found, layer, head)}{heat.large(found, layer, head)}"
    return note + style + section(
        f"Layer {layer}, head {head}", f'<div class="bs-beside">{both}</div>'
    )  # fmt: skip


def _grid(looking: Looking, model: str | None, text: str, pair: str) -> str:
    try:
        return heat.grid(looking.attention(model, text, pair))
    except BertsmithError:
        # Said above, where the head would stand.
        return ""


def _chosen(looking: Looking) -> Callable[..., Any]:
    """Return what a button of the grid does: both sliders go there, and the head is shown."""
    show = told(partial(_head, looking))

    def chosen(model: str | None, text: str, pair: str, event: gr.EventData) -> Any:
        return event.layer, event.head, show(model, text, pair, event.layer, event.head)

    return chosen


def _says(text: str) -> None:
    gr.HTML(f'<p class="bs-says">{safe(text)}</p>')


def _model(service: Service, ability: str) -> Any:
    """Return a chooser among the models that can; where there is one only, it is not seen."""
    able = service.models_with(ability)
    return gr.Dropdown(able, value=able[0], label="Model", visible=len(able) > 1)


def _field(own: Field) -> Any:
    return gr.Textbox(label=own.label, lines=own.lines, info=own.hint or None, max_lines=12)


def _result(name: str) -> Any:
    """Return where results are shown; screen readers tell them when they come."""
    return gr.HTML(elem_id=f"result-{name}", html_template='<div aria-live="polite">${value}</div>')


def _examples(fields: list[Any], examples: Sequence[tuple[str, ...]]) -> None:
    """Put a small button for each example; it fills the fields."""
    with gr.Row(elem_classes="bs-examples"):
        for values in examples:
            first = values[0] if len(values[0]) > 8 else f"{values[0]}: {values[1]}"
            label = " ".join(first.split())
            short = label if len(label) <= 44 else f"{label[:43]}…"
            button = gr.Button(short, size="sm", variant="secondary")
            # In the browser: nobody waits for a server to copy words.
            values_js = json.dumps(values if len(values) > 1 else values[0])
            button.click(None, None, fields, js=f"() => ({values_js})", **_OWN)


def _asked(
    button: Any, entered: list[Any], show: Callable[..., str], given: list[Any], result: Any
) -> Any:
    """Ask by the button, and by Enter in fields of one line; return the event."""
    events = [button.click, *(own.submit for own in entered if own.lines == 1)]
    return gr.on(events, show, given, result, **_OWN)
