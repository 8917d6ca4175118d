// The panel of a tab: a form, and the result of its request.
import { endpointUrl, getKey, request, UnreachableError } from "./api.js";
import { copy, toCurl, toPython } from "./commands.js";
import { h, notice, shorten } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { findLanguages } from "./languages.js";
import { createTokenView } from "./tokens.js";

const COPIED_SECONDS = 2;
const MAX_EXAMPLE_CHARACTERS = 44;

export class Panel {
  #tab;
  #models;
  #onSubmit;
  #onError;
  // Cancels the request of the form, and those of the controls and tokens of the result.
  #formController = new AbortController();
  #resultController = new AbortController();
  // Whether the request failed because the server was unreachable, and is to be sent again.
  #needsRetry = false;
  // Whether the fields have the text of an example, which a model of another language replaces.
  #hasExample = false;
  #showsTokens = true;
  // What the controls of a result keep for the next one, such as the selected layer.
  #state = {};
  #inputs = new Map();

  // ``onSubmit`` is called with each request, and ``onError`` with each error.
  constructor(tab, models, { onSubmit, onError }) {
    this.#tab = tab;
    this.#models = models;
    this.#onSubmit = onSubmit;
    this.#onError = onError;
    this.#build();
  }

  get values() {
    return Object.fromEntries([...this.#inputs].map(([name, input]) => [name, input.value]));
  }

  get isEmpty() {
    return Object.values(this.values).every((value) => value === "");
  }

  get model() {
    return this.#models.find((model) => model.name === this.select.value);
  }

  #build() {
    const tab = this.#tab;
    this.select = h("select", { id: `${tab.id}-model`, onchange: () => this.#changeModel() },
      ...this.#models.map((model) => h("option", { value: model.name }, model.name)));
    const fields = tab.fields.map((field) => this.#createField(field));
    this.examples = h("div", { class: "examples", role: "group", "aria-label": "Examples" });
    const form = h("form", {
      onsubmit: (event) => { event.preventDefault(); this.#submitAndShow(); },
      oninput: (event) => { if (event.target !== this.select) this.#changeInput(); },
      onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#submitAndShow(); },
    },
    h("p", { class: "says" }, tab.sentence),
    h("div", { class: "field", hidden: this.#models.length < 2 },
      h("label", { for: this.select.id }, "Model"), this.select),
    ...fields,
    h("div", { class: "actions" },
      h("button", { type: "submit", class: "primary" }, tab.button),
      h("kbd", {}, "Ctrl + Enter")),
    this.examples);
    this.status = h("p", { class: "status", role: "status" });
    this.result = h("div", { class: "result", "aria-live": "polite" });
    this.output = h("div", { class: "output" }, this.status, this.result);
    this.element = h("div", { id: `panel-${tab.id}`, class: "panel", role: "tabpanel", "aria-labelledby": `tab-${tab.id}` },
      form, this.output);
  }

  #createField({ name, label, rows, hint }) {
    const id = `${this.#tab.id}-${name}`;
    const input = rows === 1
      ? h("input", { id, type: "text", autocomplete: "off" })
      : h("textarea", { id, rows });
    this.#inputs.set(name, input);
    return h("div", { class: "field" },
      h("label", { for: id }, label, hint ? h("small", {}, ` ${hint}`) : null), input);
  }

  // Fill in the form. Unknown models and fields are ignored.
  setValues(values, model) {
    if (this.#models.some(({ name }) => name === model)) this.select.value = model;
    for (const [name, input] of this.#inputs) input.value = values[name] ?? "";
  }

  // Show the examples, and run the first one if the form is empty.
  async open() {
    const examples = await this.#showExamples();
    if (this.isEmpty && examples.length > 0) this.#runExample(examples[0]);
  }

  // Send the request again if it failed because the server was unreachable.
  retry() {
    if (this.#needsRetry) this.submit({ isRetry: true });
  }

  #submitAndShow() {
    this.submit();
    this.#scrollToResult();
  }

  // On a phone, the result is below the form.
  #scrollToResult() {
    const { top } = this.output.getBoundingClientRect();
    if (top > 0.6 * window.innerHeight) this.output.scrollIntoView({ block: "start" });
  }

  async #showExamples() {
    const model = this.model.name;
    const languages = await findLanguages(model);
    if (model !== this.model.name) return [];
    const examples = languages.flatMap((language) => EXAMPLES[this.#tab.id][language] ?? []);
    this.examples.replaceChildren(h("span", {}, "Examples"), ...examples.map((texts) => {
      const label = texts.filter((text) => text !== "").join(" · ").replace(/\s+/g, " ");
      return h("button", { type: "button", onclick: () => { this.#runExample(texts); this.#scrollToResult(); } },
        shorten(label, MAX_EXAMPLE_CHARACTERS));
    }));
    return examples;
  }

  #runExample(texts) {
    [...this.#inputs.values()].forEach((input, index) => { input.value = texts[index]; });
    this.submit();
    this.#hasExample = true;
  }

  async #changeModel() {
    this.#cancel();
    const examples = await this.#showExamples();
    const texts = JSON.stringify(Object.values(this.values));
    const isKnown = examples.some((example) => JSON.stringify(example) === texts);
    if (this.#hasExample && !isKnown && examples.length > 0) this.#runExample(examples[0]);
    else if (!this.isEmpty) this.submit();
  }

  #changeInput() {
    this.#hasExample = false;
    this.#cancel();
  }

  // The shown result is no longer that of the form: cancel the request and dim the result.
  #cancel() {
    this.#formController.abort();
    this.#needsRetry = false;
    this.#setPending(false);
    this.result.classList.toggle("stale", this.result.hasChildNodes());
  }

  #setPending(isPending) {
    this.element.classList.toggle("pending", isPending);
    this.result.setAttribute("aria-busy", String(isPending));
    this.status.replaceChildren(...(isPending ? [h("span", { class: "spinner" }), `${this.model.name} computes…`] : []));
  }

  async submit({ isRetry = false } = {}) {
    const [tab, model, values] = [this.#tab, this.model, this.values];
    this.#cancel();
    this.#resultController.abort();
    this.#formController = new AbortController();
    this.#resultController = new AbortController();
    const { signal } = this.#formController;
    this.#onSubmit();
    this.#setPending(true);
    const body = { model: model.name, ...tab.body(values) };
    const startedAt = performance.now();
    try {
      const { value, unknownShare } = await request(tab.path, body, signal);
      const milliseconds = performance.now() - startedAt;
      this.#showResult(value, { body, model, values, milliseconds, unknownShare });
    } catch (error) {
      if (error.name === "AbortError") return;
      const isUnreachable = error instanceof UnreachableError;
      // A request that fails again is not sent a third time: a proxy may reject it each time although
      // the server can be reached.
      this.#needsRetry = isUnreachable && !isRetry;
      const message = isUnreachable || "status" in error ? error.message : `The page cannot show the result: ${error.message}`;
      if (!this.#needsRetry) this.result.replaceChildren(notice(message, "error"));
      this.#onError(error);
    }
    // A newer request has its own controller, and this one is then aborted.
    if (!signal.aborted) {
      this.#setPending(false);
      this.result.classList.toggle("stale", this.#needsRetry && this.result.hasChildNodes());
    }
  }

  #showResult(value, { body, model, values, milliseconds, unknownShare }) {
    const { signal } = this.#resultController;
    const onError = (error) => { if (error.name !== "AbortError") this.#onError(error); };
    const context = { body, model, onError, signal, state: this.#state, values };
    const tokens = createTokenView(model.name, this.#tab.texts(values), {
      isOpen: this.#showsTokens, onToggle: (isOpen) => { this.#showsTokens = isOpen; }, onError, signal,
    });
    this.result.replaceChildren(
      h("div", { class: "answered" },
        h("p", {}, "Answered by ", h("b", {}, model.name), ` in ${Math.round(milliseconds)} ms`),
        ...this.#createLinks(body)),
      ...(unknownShare > 0 ? [this.#describeUnknown(unknownShare, model)] : []),
      ...this.#tab.render(value, context).filter((element) => element !== null),
      tokens);
  }

  #describeUnknown(share, model) {
    const tokens = share > 0.5 ? "Most of this text is" : "Some tokens of this text are";
    return notice(`${tokens} [UNK] (${Math.round(100 * share)} % of the tokens): the vocabulary of `
      + `${model.name} does not cover it, so the result means little. Use a model for this language.`);
  }

  #createLinks(body) {
    const url = endpointUrl(this.#tab.path);
    const needsKey = getKey() !== null;
    return [
      createCopyButton("Copy as curl", () => toCurl(url, body, needsKey)),
      createCopyButton("Copy as Python", () => toPython(url, body, needsKey)),
      h("a", { class: "link", href: `docs#/${this.#tab.path}` }, "API docs"),
    ];
  }
}

function createCopyButton(label, getText) {
  const button = h("button", { type: "button", class: "link", onclick: async () => {
    button.textContent = (await copy(getText())) ? "Copied" : "Copying failed";
    setTimeout(() => { button.textContent = label; }, 1000 * COPIED_SECONDS);
  } }, label);
  return button;
}
