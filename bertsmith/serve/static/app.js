// Start the page: load the models, create the tabs, and keep the address in step with them.
import { connection, getKey, request, setKey, UnreachableError } from "./api.js";
import { h, notice, plural } from "./dom.js";
import { Panel } from "./panel.js";
import { TABS } from "./tasks.js";

// Longer inputs are left out of the address.
const MAX_ADDRESS_CHARACTERS = 8000;
const KINDS = { single: "classifier", multi: "classifier with several labels", regression: "regression",
  entities: "entities", tags: "word tags", span: "question answering", choice: "multiple choice" };

const banner = document.getElementById("banner");
const modelList = document.getElementById("models");
const tabList = document.getElementById("tabs");
const main = document.getElementById("panels");
// Panels by the id of their tab.
const panels = new Map();
let current = null;
let isReachable = true;

async function start() {
  const models = await loadModels();
  if (models === null) return;
  showModels(models);
  createTabs(models);
  if (panels.size === 0) main.replaceChildren(notice("No model is loaded; start bertsmith serve with a model."));
  else openAddress();
}

// Load the models, asking for the API key if necessary. Return null if an error is shown instead.
async function loadModels() {
  try {
    return (await request("models")).value;
  } catch (error) {
    if (error.status === 401) askForKey();
    else if (!(error instanceof UnreachableError)) main.replaceChildren(notice(error.message, "error"));
    return null;
  }
}

function askForKey() {
  modelList.replaceChildren();
  tabList.replaceChildren();
  panels.clear();
  const input = h("input", { id: "key", type: "password", autocomplete: "current-password", required: true });
  const onsubmit = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    start();
  };
  main.replaceChildren(h("form", { class: "key", onsubmit },
    getKey() ? notice("The API key is wrong.", "error") : null,
    h("div", { class: "field" }, h("label", { for: "key" }, "This server needs an API key"), input),
    h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Continue"))));
  input.focus();
}

function describeModel({ kind, tasks, labels = [] }) {
  if (kind === "single") return `${KINDS.single}, ${plural(labels.length, "label")}`;
  if (kind) return KINDS[kind];
  return tasks.includes("fill") ? "masked LM" : "embeddings";
}

function showModels(models) {
  modelList.replaceChildren(h("span", {}, models.length === 1 ? "Model" : "Models"), ...models.map((model) =>
    h("span", { class: "model", title: `${plural(model.num_layers, "layer")}, width ${model.hidden_size}, `
      + `${plural(model.vocab_size, "token")} in the vocabulary, at most ${plural(model.max_seqlen, "token")}` },
    h("b", {}, model.name), ` ${describeModel(model)}`)));
}

function createTabs(models) {
  panels.clear();
  current = null;
  tabList.replaceChildren();
  for (const tab of TABS) {
    const usable = models.filter((model) => model.tasks.includes(tab.task));
    if (tab.prefers) usable.sort((one, other) => tab.prefers(other) - tab.prefers(one));
    if (usable.length === 0) continue;
    panels.set(tab.id, new Panel(tab, usable, {
      onSubmit: () => { if (current === tab.id) history.replaceState(null, "", formatAddress(tab.id)); },
      onError: (error) => { if (error.status === 401) askForKey(); },
    }));
    tabList.append(h("button", { id: `tab-${tab.id}`, type: "button", role: "tab", "aria-selected": "false",
      "aria-controls": `panel-${tab.id}`, tabindex: "-1",
      onclick: () => {
        if (current === tab.id) return;
        history.pushState(null, "", formatAddress(tab.id));
        showTab(tab.id);
        panels.get(tab.id).open();
        if (isReachable) panels.get(tab.id).retry();
      } }, tab.title));
  }
}

function showTab(id) {
  current = id;
  for (const button of tabList.children) {
    const isSelected = button.id === `tab-${id}`;
    button.setAttribute("aria-selected", String(isSelected));
    button.tabIndex = isSelected ? 0 : -1;
  }
  main.replaceChildren(panels.get(id).element);
}

// The address of a tab with its input, after the "#", which browsers do not send to servers.
function formatAddress(id) {
  const panel = panels.get(id);
  const input = new URLSearchParams({ model: panel.select.value, ...panel.values });
  const isShort = input.toString().length <= MAX_ADDRESS_CHARACTERS;
  return panel.isEmpty || !isShort ? `#${id}` : `#${id}?${input}`;
}

// Open the tab of the address, with its input.
async function openAddress() {
  const [id, query] = location.hash.slice(1).split(/\?(.*)/s);
  const shown = panels.has(id) ? id : [...panels.keys()][0];
  const panel = panels.get(shown);
  showTab(shown);
  if (shown === id && query) {
    const input = new URLSearchParams(query);
    panel.setValues(Object.fromEntries(input), input.get("model"));
  }
  const isNew = !panel.isEmpty;
  await panel.open();
  if (isNew) panel.submit();
}

tabList.addEventListener("keydown", (event) => {
  const tabs = [...tabList.children];
  const index = tabs.indexOf(document.activeElement);
  const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: -1 };
  if (!(event.key in moves)) return;
  event.preventDefault();
  tabs.at(moves[event.key] % tabs.length).focus();
});
window.addEventListener("popstate", () => { if (panels.size > 0) openAddress(); });
connection.addEventListener("unreachable", () => {
  banner.textContent = "The server does not respond. The page tries again every two seconds.";
  banner.hidden = false;
  isReachable = false;
});
connection.addEventListener("reachable", () => {
  banner.hidden = true;
  isReachable = true;
  if (panels.size === 0) start();
  else panels.get(current)?.retry();
});

start();
