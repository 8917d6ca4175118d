// The similarity of several texts, or of a word's occurrences: a matrix and a map.
import { h, lines, plural, section, shorten, svg } from "./dom.js";
import { project } from "./projection.js";

const WIDTH = 360;
const HEIGHT = 250;
const MARGIN = 22;

// A map of points; each item has a {title, hue}.
export function renderMap(points, items, caption) {
  const [centerX, centerY] = [WIDTH / 2, HEIGHT / 2];
  // One scale for both axes, to keep distances comparable.
  const sizes = points.map(([x, y]) => Math.max(Math.abs(x) / (centerX - MARGIN), Math.abs(y) / (centerY - MARGIN)));
  const scale = Math.max(...sizes) || 1;
  const dots = points.map(([x, y], index) => {
    const [left, top] = [centerX + x / scale, centerY - y / scale];
    return svg("g", { class: `hue-${items[index].hue % 8}` },
      svg("title", {}, `${index + 1}: ${items[index].title}`),
      svg("circle", { cx: left.toFixed(1), cy: top.toFixed(1), r: 11 }),
      svg("text", { x: left.toFixed(1), y: (top + 4).toFixed(1), "text-anchor": "middle" }, `${index + 1}`));
  });
  const label = `Map of ${plural(points.length, "point")}; the table has their values`;
  return h("figure", { class: "map" },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
      svg("line", { x1: 0, x2: WIDTH, y1: centerY, y2: centerY }),
      svg("line", { y1: 0, y2: HEIGHT, x1: centerX, x2: centerX }), ...dots),
    h("figcaption", {}, caption));
}

// A matrix of numbers as a table. ``heats`` are from 0 to 1.
export function renderMatrix(matrix, getHeat, label) {
  const numbers = matrix.map((_, index) => `${index + 1}`);
  const rows = matrix.map((row, index) => h("tr", {}, h("th", { scope: "row" }, numbers[index]),
    ...row.map((value) => h("td", { "--heat": `${(100 * getHeat(value)).toFixed(0)}%` }, value.toFixed(2)))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", { class: "heat" },
      h("thead", {}, h("tr", {}, h("td", {}), ...numbers.map((number) => h("th", { scope: "col" }, number)))),
      h("tbody", {}, ...rows)));
}

export function renderSimilarity(similarities, { values }) {
  const texts = lines(values.texts);
  const others = similarities.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [lowest, highest] = [Math.min(...others, 1), Math.max(...others, -1)];
  const getHeat = (value) => (highest > lowest ? Math.min(Math.max((value - lowest) / (highest - lowest), 0), 1) : 1);
  const { points, share } = project(similarities);
  const items = texts.map((text, hue) => ({ title: text, hue }));
  return [
    section("Cosine similarities", h("div", { class: "beside" },
      h("div", {}, renderMatrix(similarities, getHeat, "Cosine similarities"),
        h("ol", { class: "places" }, ...texts.map((text) => h("li", {}, shorten(text, 90))))),
      renderMap(points, items, `Similar texts are close: ${Math.round(100 * share)} % of the variance`))),
  ];
}
