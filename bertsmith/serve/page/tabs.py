"""Build the tabs of the page: task forms, word maps, attention."""

import json
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.resources import files
from typing import Any, ParamSpec

from bertsmith.errors import BertsmithError
from bertsmith.serve.page import heat, lines, wordmap
from bertsmith.serve.page.answers import split_lines
from bertsmith.serve.page.forms import ATTENTION_EXAMPLES, WORD_EXAMPLES, Field, Form
from bertsmith.serve.page.inspection import MAX_TOKENS, ModelInspector
from bertsmith.serve.page.library import gr
from bertsmith.serve.page.markup import escape_html, notice, section
from bertsmith.serve.service import Service
from bertsmith.use.explain import AttentionMaps

Params = ParamSpec("Params")
#: Options of the page's own events; programs use the named endpoints instead.
_EVENT = {"api_visibility": "private", "show_progress": "minimal"}
#: Options of slider events: while one runs, only the latest of further events is queued.
_SLIDER_EVENT = {**_EVENT, "trigger_mode": "always_last", "show_progress": "hidden"}


def show_errors(show: Callable[Params, str]) -> Callable[Params, str]:
    """Wrap a function to return the message of a BertsmithError as HTML."""

    @wraps(show)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> str:
        try:
            return show(*args, **kwargs)
        except BertsmithError as error:
            return notice(str(error))

    return wrapper


def form_tab(service: Service, form: Form) -> None:
    """Add a tab with text fields, a button and the result."""
    with gr.Tab(form.title, id=form.ability):
        _description(form.description)
        model = _model_dropdown(service, form.ability)
        fields = [_text_field(field) for field in form.fields]
        button = gr.Button(form.button, variant="primary")
        _example_buttons(fields, form.examples)
        result = _result_area(form.ability)
        show = show_errors(partial(form.show, service))
        _on_submit(button, fields, show, [model, *fields], result)


def word_tab(service: Service, inspector: ModelInspector) -> None:
    """Add the tab that compares one word in several sentences, with a slider for the layer."""
    with gr.Tab("One word", id="word"):
        _description("Similarity of one word's vectors in several sentences, layer by layer.")
        model = _model_dropdown(service, "embed")
        word = _text_field(Field("Word"))
        texts = _text_field(Field("Sentences with the word", 6, "one per line, two or more"))
        button = gr.Button("Compare", variant="primary")
        layers, _ = inspector.sizes(None)
        layer = gr.Slider(0, layers, layers, step=1, label="Layer (0: the embeddings)")
        _example_buttons([word, texts], WORD_EXAMPLES)
        result = _result_area("word")

        @show_errors
        def show(name: str | None, word: str, texts: str, layer: int) -> str:
            maps = inspector.word(name, word, tuple(split_lines(texts)))
            return wordmap.show(maps, min(int(layer), len(maps.points) - 1))

        inputs = [model, word, texts, layer]
        _on_submit(button, [word], show, inputs, result)
        layer.input(show, inputs, result, **_SLIDER_EVENT)

        def update_slider(name: str | None) -> Any:
            layers, _ = inspector.sizes(name)
            return gr.update(maximum=layers, value=layers)

        model.change(update_slider, model, layer, **_EVENT)


def attention_tab(service: Service, inspector: ModelInspector) -> None:
    """Add the tab of attention: one head as lines and heat map, and a grid of all heads."""
    with gr.Tab("Attention", id="attention"):
        _description(f"Attention of each head, for at most {MAX_TOKENS} tokens.")
        model = _model_dropdown(service, "embed")
        fields = [
            _text_field(Field("Text", 3)),
            _text_field(Field("Second text", 1, "may be empty")),
        ]
        button = gr.Button("Show attention", variant="primary")
        layers, heads = inspector.sizes(None)
        with gr.Row():
            layer, head = _slider("Layer", layers), _slider("Head", heads)
        _example_buttons(fields, ATTENTION_EXAMPLES)
        result = _result_area("attention")
        script = files("bertsmith.serve.page").joinpath("grid.js").read_text("utf-8")
        head_grid = gr.HTML(elem_id="grid", js_on_load=script)
        inputs = [model, *fields, layer, head]
        show_head = show_errors(partial(_show_head, inspector))
        event = _on_submit(button, fields[1:], show_head, inputs, result)
        show_grid = show_errors(partial(_show_grid, inspector))
        event.then(show_grid, [model, *fields], head_grid, **_EVENT)
        for slider in (layer, head):
            slider.input(show_head, inputs, result, **_SLIDER_EVENT)
        head_grid.select(
            _head_selector(inspector), inputs[:3], [layer, head, result], **_SLIDER_EVENT
        )

        def update_sliders(name: str | None) -> Any:
            return tuple(
                gr.update(maximum=max(size, 2), value=1, interactive=size > 1)
                for size in inspector.sizes(name)
            )

        model.change(update_sliders, model, [layer, head], **_EVENT)


def _slider(label: str, size: int) -> Any:
    """Return a slider from 1 to ``size``; disabled for size 1, which Gradio does not support."""
    return gr.Slider(1, max(size, 2), 1, step=1, label=label, min_width=140, interactive=size > 1)


def _show_head(
    inspector: ModelInspector, model: str | None, text: str, pair: str, layer: int, head: int
) -> str:
    """Show one head; layer and head are clipped to those of the model."""
    maps = inspector.attention(model, text, pair)
    layers, heads = maps.probabilities.shape[:2]
    return _render_head(maps, max(1, min(int(layer), layers)), max(1, min(int(head), heads)))


def _render_head(maps: AttentionMaps, layer: int, head: int) -> str:
    message = (
        f"{maps.num_removed_tokens} tokens beyond the first {len(maps.tokens)} were truncated."
    )
    note = notice(message, "note") if maps.num_removed_tokens else ""
    # Outlines the head's button in the grid.
    selector = f'.bs-grid [data-layer="{layer}"][data-head="{head}"]'
    style = f"<style>{selector} {{ outline: 3px solid #d97706; outline-offset: 1px }}</style>"
    pictures = f"{lines.picture(maps, layer, head)}{heat.large(maps, layer, head)}"
    return (
        note
        + style
        + section(f"Layer {layer}, head {head}", f'<div class="bs-beside">{pictures}</div>')
    )


def _show_grid(inspector: ModelInspector, model: str | None, text: str, pair: str) -> str:
    try:
        return heat.grid(inspector.attention(model, text, pair))
    except BertsmithError:
        # ``_show_head`` already shows the error.
        return ""


def _head_selector(inspector: ModelInspector) -> Callable[..., Any]:
    """Return the event handler of the grid, which moves both sliders and shows the head."""
    show = show_errors(partial(_show_head, inspector))

    def chosen(model: str | None, text: str, pair: str, event: gr.EventData) -> Any:
        return event.layer, event.head, show(model, text, pair, event.layer, event.head)

    return chosen


def _description(text: str) -> None:
    gr.HTML(f'<p class="bs-says">{escape_html(text)}</p>')


def _model_dropdown(service: Service, ability: str) -> Any:
    """Return a dropdown of the models with an ability; hidden if there is only one."""
    names = service.get_model_names(ability)
    return gr.Dropdown(names, value=names[0], label="Model", visible=len(names) > 1)


def _text_field(field: Field) -> Any:
    return gr.Textbox(label=field.label, lines=field.lines, info=field.hint or None, max_lines=12)


def _result_area(name: str) -> Any:
    """Return the component for results; screen readers announce changes."""
    return gr.HTML(elem_id=f"result-{name}", html_template='<div aria-live="polite">${value}</div>')


def _example_buttons(fields: list[Any], examples: Sequence[tuple[str, ...]]) -> None:
    """Add a small button for each example, which fills the fields."""
    with gr.Row(elem_classes="bs-examples"):
        for values in examples:
            first = values[0] if len(values[0]) > 8 else f"{values[0]}: {values[1]}"
            label = " ".join(first.split())
            short_label = label if len(label) <= 44 else f"{label[:43]}…"
            button = gr.Button(short_label, size="sm", variant="secondary")
            # In JavaScript, to avoid a round trip to the server.
            values_js = json.dumps(values if len(values) > 1 else values[0])
            button.click(None, None, fields, js=f"() => ({values_js})", **_EVENT)


def _on_submit(
    button: Any, fields: list[Any], show: Callable[..., str], inputs: list[Any], result: Any
) -> Any:
    """Call ``show`` on a click, and on Enter in single-line fields; return the event."""
    triggers = [button.click, *(field.submit for field in fields if field.lines == 1)]
    return gr.on(triggers, show, inputs, result, **_EVENT)
