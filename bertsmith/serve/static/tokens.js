// The tokens of the texts of a result.
import { request } from "./api.js";
import { h, notice, plural } from "./dom.js";
import { isUnknown } from "./languages.js";

const MASK = "[MASK]";

function renderTokens(label, tokens) {
  const chips = tokens.map((token) =>
    h("span", { class: isUnknown(token) ? "token unknown" : "token", title: `id ${token.id}` }, token.text));
  return h("p", { class: "tokens" }, h("b", {}, `${label}: ${plural(tokens.length, "token")}`), " ", ...chips);
}

// Request the tokens of each text. The endpoint reads "[MASK]" as text, and a model that fills in
// masks as one token: the texts around it are tokenized separately.
async function loadTokens(model, texts, signal) {
  const parts = texts.map(([, text, hasMasks]) => (hasMasks ? text.split(MASK) : [text]));
  const body = { model, inputs: parts.flat(), add_special_tokens: false };
  const { value } = await request("tokenize", body, signal);
  return parts.map((group) => value.splice(0, group.length)
    .flatMap((tokens, index) => (index === 0 ? tokens : [{ text: MASK, id: "of the mask" }, ...tokens])));
}

// A box that loads the tokens when it is opened. ``texts`` are
// [label, text, whether "[MASK]" is a token].
export function createTokenView(model, texts, { isOpen, onToggle, onError, signal }) {
  const content = h("div", {});
  let isLoaded = false;
  const box = h("details", { class: "token-view", open: isOpen }, h("summary", {}, "Tokens"), content);
  const load = async () => {
    isLoaded = true;
    const shown = texts.filter(([, text]) => text.trim() !== "");
    try {
      const tokens = await loadTokens(model, shown, signal);
      content.replaceChildren(...shown.map(([label], index) => renderTokens(label, tokens[index])));
    } catch (error) {
      isLoaded = false;
      // The banner of the page says that the server is unreachable.
      if ("status" in error) content.replaceChildren(notice(error.message, "error"));
      onError(error);
    }
  };
  box.addEventListener("toggle", () => {
    onToggle(box.open);
    if (box.open && !isLoaded) load();
  });
  if (isOpen) load();
  return box;
}
