// One word in several sentences: a map and distances for each layer.
import { h, highlight, lines, section } from "./dom.js";
import { align, project } from "./projection.js";
import { renderMap, renderMatrix } from "./similarity.js";

// Maps of all layers. Each is rotated to resemble that of the next layer.
function projectLayers(layers) {
  const maps = [];
  for (const { distances } of [...layers].reverse()) {
    const map = project(distances.map((row) => row.map((distance) => 1 - distance)));
    if (maps.length > 0) map.points = align(map.points, maps.at(-1).points);
    maps.push(map);
  }
  return maps.reverse();
}

function describeLayer(layer) {
  return layer === 0 ? "the embeddings" : `layer ${layer}`;
}

export function renderWord({ word, occurrences, layers }, { values, state }) {
  const texts = lines(values.texts);
  const maps = projectLayers(layers);
  const content = h("div", {});
  const items = occurrences.map(({ text_index: index }) => ({ title: texts[index], hue: index }));
  const last = layers.length - 1;
  // The layer of the previous result, if the model has it.
  const first = Math.min(state.layer ?? last, last);
  const slider = h("input", { type: "range", min: 0, max: last, value: first, "aria-label": "Layer",
    oninput: () => show(Number(slider.value)) });
  const output = h("output", {});

  function show(layer) {
    state.layer = layer === last ? undefined : layer;
    output.textContent = layer === 0 ? "0 (embeddings)" : `${layer} of ${last}`;
    slider.setAttribute("aria-valuetext", describeLayer(layer));
    const { distances } = layers[layer];
    const highest = Math.max(...distances.flat()) || 1;
    const places = occurrences.map(({ text_index: index, start, end }) =>
      h("li", {}, highlight(texts[index], [{ start, end, hue: index }])));
    const caption = `Two principal components: ${Math.round(100 * maps[layer].share)} % of the variance`;
    content.replaceChildren(section(`“${word}” in ${describeLayer(layer)}`,
      h("div", { class: "beside" }, renderMap(maps[layer].points, items, caption),
        h("ol", { class: "places" }, ...places))),
    section("Cosine distances", renderMatrix(distances, (value) => value / highest, "Cosine distances")));
  }

  show(first);
  return [h("label", { class: "slider" }, "Layer", slider, output), content];
}
