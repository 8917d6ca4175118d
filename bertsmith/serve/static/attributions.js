// How much each token of a classified text changes the prediction.
import { request } from "./api.js";
import { h, notice } from "./dom.js";

const NUM_NAMED_TOKENS = 5;
const SPECIAL = new Set(["[CLS]", "[SEP]"]);

// Changes of a probability are in percentage points.
function formatChange(value, isProbability) {
  const sign = value < 0 ? "−" : "+";
  const size = Math.abs(value);
  return isProbability ? `${sign}${(100 * size).toFixed(1)}` : `${sign}${size.toFixed(3)}`;
}

function nameTokens(rows, isProbability, unit) {
  return rows.slice(0, NUM_NAMED_TOKENS).map(({ token, value }) => `${token} ${formatChange(value, isProbability)}`).join(", ") + unit;
}

function renderAttributions({ label, tokens, attributions }, labelName) {
  const isProbability = label !== null;
  const unit = isProbability ? " percentage points" : "";
  const highest = Math.max(...attributions.map(Math.abs)) || 1;
  const rows = tokens.map((token, index) => ({ token, value: attributions[index] }));
  const chips = rows.map(({ token, value }) => h("span", {
    class: SPECIAL.has(token) ? "token" : `token ${value < 0 ? "lowers" : "raises"}`,
    "--amount": `${Math.round(60 * Math.abs(value) / highest)}%`,
    title: formatChange(value, isProbability) + unit,
  }, token));
  const ordered = [...rows].sort((one, other) => other.value - one.value);
  // A change that rounds to zero is none.
  const isVisible = ({ value }) => /[1-9]/.test(formatChange(value, isProbability));
  const raising = ordered.filter((row) => row.value > 0 && isVisible(row));
  const lowering = ordered.filter((row) => row.value < 0 && isVisible(row)).reverse();
  const subject = isProbability ? `the probability of “${labelName(label)}”` : "the score";
  return [
    h("p", { class: "tokens" }, ...chips),
    h("p", { class: "summary" }, `Blue tokens raise ${subject}, orange ones lower it; each was replaced by [MASK] in turn. `,
      raising.length > 0 ? `Raise it: ${nameTokens(raising, isProbability, unit)}. ` : "",
      lowering.length > 0 ? `Lower it: ${nameTokens(lowering, isProbability, unit)}.` : ""),
  ];
}

// A box that computes the attributions when it is opened; it stays open for the next results.
export function createAttributionView(body, { state, signal, onError }, labelName) {
  const content = h("div", { "aria-live": "polite" });
  const box = h("details", { class: "token-view attributions", open: state.showsAttributions },
    h("summary", {}, "Attributions"), content);
  let isLoaded = false;
  const load = async () => {
    isLoaded = true;
    content.replaceChildren(h("p", { class: "waiting" }, h("span", { class: "spinner" }), "Computing…"));
    try {
      const { value } = await request("attributions", body, signal);
      content.replaceChildren(...renderAttributions(value, labelName));
    } catch (error) {
      isLoaded = false;
      // The banner of the page says that the server is unreachable.
      content.replaceChildren(...("status" in error ? [notice(error.message, "error")] : []));
      onError(error);
    }
  };
  box.addEventListener("toggle", () => {
    state.showsAttributions = box.open;
    if (box.open && !isLoaded) load();
  });
  if (box.open) load();
  return box;
}
