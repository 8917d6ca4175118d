// Attention: one head as lines and as a heat map, and a grid of all heads.
import { request } from "./api.js";
import { h, notice, percent, plural, section, shorten, svg } from "./dom.js";

// Smallest probability that is drawn as a line.
const MIN_PROBABILITY = 0.02;
// With more tokens, rows are lower and have fewer lines.
const MANY_TOKENS = 40;
const GAP = 110;
const PERCENT_WIDTH = 54;
const FONT_SIZE = 0.62;
const LABEL_SIZE = 92;
// RGB of a probability of 1, visible on white and black; a probability of 0 is transparent.
const COLOR = [59, 130, 246];

// A heat map with one pixel per cell; CSS scales it.
function drawHeat(probabilities) {
  const size = probabilities.length;
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const pixels = new ImageData(size, size);
  probabilities.flat().forEach((probability, index) => {
    // The square root makes small probabilities visible.
    const alpha = Math.round(255 * Math.sqrt(Math.min(Math.max(probability, 0), 1)));
    pixels.data.set([...COLOR, alpha], 4 * index);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// Width of a text in characters; East Asian characters are twice as wide.
function measure(text) {
  return Array.from(text).reduce((sum, character) => sum + (character.codePointAt(0) >= 0x1100 ? 2 : 1), 0);
}

// The strongest weights of each token as lines between two columns of tokens. Hovering or focusing
// a token hides the lines of the others and shows percentages.
function drawLines(tokens, probabilities, label) {
  const isLarge = tokens.length > MANY_TOKENS;
  const [rowHeight, maxLines] = isLarge ? [17, 3] : [22, 6];
  const names = tokens.map((token) => shorten(token, 15));
  const column = 8 + Math.round(Math.max(...names.map(measure)) * rowHeight * FONT_SIZE * 0.62);
  const [right, width] = [column + GAP, 2 * column + GAP + PERCENT_WIDTH];
  const center = (row) => (row + 0.5) * rowHeight;
  const groups = probabilities.map((row, query) => {
    const keys = row.map((_, key) => key).sort((one, other) => row[other] - row[one])
      .slice(0, maxLines).filter((key) => row[key] >= MIN_PROBABILITY);
    const summary = keys.map((key) => `${names[key]} ${percent(row[key])}`).join(", ");
    const weights = keys.map((key) => svg("g", { class: "weight" },
      svg("line", { x1: column + 5, y1: center(query), x2: right - 5, y2: center(key),
        "stroke-width": (0.8 + 2.6 * row[key]).toFixed(2), "stroke-opacity": Math.max(row[key], 0.08).toFixed(2) }),
      svg("text", { x: width - 2, y: center(key), dy: "0.35em", "text-anchor": "end" }, percent(row[key]))));
    return svg("g", { class: "from", tabindex: "0", role: "img", "aria-label": `${names[query]} attends to ${summary}` },
      svg("rect", { x: 0, y: query * rowHeight, width: column + 4, height: rowHeight }),
      svg("text", { x: column, y: center(query), dy: "0.35em", "text-anchor": "end" }, names[query]), ...weights);
  });
  const keys = names.map((name, key) => svg("text", { x: right, y: center(key), dy: "0.35em" }, name));
  return h("div", { class: "lines", "--width": `${Math.round(1.15 * width)}px` },
    svg("svg", { viewBox: `0 0 ${width} ${names.length * rowHeight}`, role: "group", "aria-label": label,
      "font-size": (FONT_SIZE * rowHeight).toFixed(1) },
    svg("g", { "aria-hidden": "true" }, ...keys), ...groups));
}

// The heat map of one head with its tokens: one row per attending token.
function drawLarge(tokens, probabilities, label) {
  const cell = tokens.length > 48 ? 9 : 16;
  const side = LABEL_SIZE + tokens.length * cell;
  const labels = tokens.flatMap((token, index) => {
    const center = LABEL_SIZE + (index + 0.5) * cell;
    const name = shorten(token, 14);
    return [
      svg("text", { x: LABEL_SIZE - 4, y: center, dy: "0.35em", "text-anchor": "end" }, name),
      svg("text", { transform: `translate(${center} ${LABEL_SIZE - 4}) rotate(-90)`, dy: "0.35em" }, name),
    ];
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("div", { class: "large", "--side": `${side}px`, "--cells": `${tokens.length * cell}px`, "--labels": `${LABEL_SIZE}px` },
      svg("svg", { width: side, height: side, role: "img", "aria-label": label, "font-size": (0.7 * cell).toFixed(1) }, ...labels),
      drawHeat(probabilities)));
}

// All heads as buttons. The grid is a single tab stop; arrow keys move within it.
function drawGrid(maps, numLayers, numHeads, select) {
  const buttons = maps.map(({ layer, head, probabilities }) => h("button",
    { type: "button", "aria-label": `layer ${layer}, head ${head}`, "aria-pressed": "false", tabindex: "-1",
      onclick: () => select(layer, head) }, drawHeat(probabilities)));
  const find = (layer, head) =>
    (layer >= 1 && layer <= numLayers && head >= 1 && head <= numHeads ? buttons[(layer - 1) * numHeads + head - 1] : null);
  const steps = { ArrowUp: -numHeads, ArrowDown: numHeads, ArrowLeft: -1, ArrowRight: 1 };
  const onkeydown = (event) => {
    const next = buttons[buttons.indexOf(event.target) + steps[event.key]];
    if (!(event.key in steps)) return;
    event.preventDefault();
    next?.focus();
  };
  const numbers = Array.from({ length: numHeads }, (_, index) => h("span", { "aria-hidden": "true" }, `${index + 1}`));
  const cells = [h("span", {}), ...numbers];
  buttons.forEach((button, index) => {
    if (index % numHeads === 0) cells.push(h("span", { "aria-hidden": "true" }, `${index / numHeads + 1}`));
    cells.push(button);
  });
  const mark = (layer, head) => buttons.forEach((button) => {
    const isSelected = button === find(layer, head);
    button.setAttribute("aria-pressed", String(isSelected));
    button.tabIndex = isSelected ? 0 : -1;
  });
  const element = section("All heads", h("p", { class: "says" }, "One row per layer, one column per head."),
    h("div", { class: "scroll" }, h("div", { class: "grid", role: "group", "aria-label": "All heads", "--heads": numHeads, onkeydown }, ...cells)));
  return { element, mark };
}

function select(label, count, value, onchange) {
  const options = Array.from({ length: count }, (_, index) =>
    h("option", { value: index + 1, selected: index + 1 === value }, `${index + 1}`));
  const id = `attention-${label.toLowerCase()}`;
  return h("div", { class: "pick" }, h("label", { for: id }, label), h("select", { id, onchange }, ...options));
}

export function renderAttention(result, { body, model, onError, signal, state }) {
  const { tokens, maps, num_removed_tokens: numRemoved } = result;
  const [numLayers, numHeads] = [model.num_layers, model.num_heads];
  const head = h("div", { class: "head", "aria-live": "polite" });
  const clip = (value, maximum) => Math.min(value ?? 1, maximum);
  const layerField = select("Layer", numLayers, clip(state.layer, numLayers), () => showSelected());
  const headField = select("Head", numHeads, clip(state.head, numHeads), () => showSelected());
  const [layers, heads] = [layerField, headField].map((field) => field.querySelector("select"));
  const grid = drawGrid(maps, numLayers, numHeads, (layer, number) => {
    layers.value = layer;
    heads.value = number;
    showSelected();
  });

  async function showSelected() {
    const [layer, number] = [Number(layers.value), Number(heads.value)];
    Object.assign(state, { layer, head: number });
    grid.mark(layer, number);
    let { probabilities } = maps[(layer - 1) * numHeads + number - 1];
    if (probabilities.length < tokens.length) {
      // The matrices of the grid are max-pooled; request this one with all its cells.
      const isSelected = () => Number(layers.value) === layer && Number(heads.value) === number;
      try {
        const { value } = await request("attention", { ...body, layer, head: number, max_cells: null }, signal);
        if (!isSelected()) return;
        ({ probabilities } = value.maps[0]);
      } catch (error) {
        if (error.name !== "AbortError" && isSelected()) head.replaceChildren(notice(error.message, "error"));
        onError(error);
        return;
      }
    }
    const title = `Layer ${layer}, head ${number}`;
    head.replaceChildren(section(title, h("div", { class: "beside" },
      drawLines(tokens, probabilities, `${title}: ${plural(tokens.length, "token")}`),
      drawLarge(tokens, probabilities, `Heat map of ${title}: one row per attending token`))));
  }

  showSelected();
  return [
    numRemoved > 0 ? notice(`Only the first ${tokens.length} tokens are used; ${plural(numRemoved, "token")} removed.`) : null,
    h("div", { class: "picks" }, layerField, headField),
    head,
    grid.element,
  ];
}
