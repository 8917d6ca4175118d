// The similarity of several texts, or of a word's occurrences: a matrix and a map.
import { h, lines, notice, plural, section, shorten, svg } from "./dom.js";
import { project } from "./projection.js";

const WIDTH = 360;
const HEIGHT = 250;
const MARGIN = 22;
// Beyond this number of texts, the browser would freeze while it computes the map.
const MAX_TEXTS = 100;

// Angles at which a number may be placed around its dot, and its distance from the dot.
const ANGLES = [0, 4, 2, 6, 1, 3, 5, 7].map((step) => (step * Math.PI) / 4);
const LABEL_DISTANCE = 13;

// Place the number of each dot where it is farthest from other dots and numbers.
function placeLabels(dots) {
  const labels = [];
  dots.forEach(([left, top], index) => {
    const obstacles = [...dots.filter((_, other) => other !== index), ...labels];
    const measure = ([x, y]) => {
      const isInside = x > 8 && x < WIDTH - 8 && y > 8 && y < HEIGHT - 8;
      const distances = obstacles.map((obstacle) => Math.hypot(obstacle[0] - x, obstacle[1] - y));
      // Beyond this distance, numbers do not overlap.
      return isInside ? Math.min(...distances, 18) : -1;
    };
    const places = ANGLES.map((angle) => [left + LABEL_DISTANCE * Math.cos(angle), top + LABEL_DISTANCE * Math.sin(angle)]);
    labels.push(places.reduce((best, place) => (measure(place) > measure(best) ? place : best)));
  });
  return labels;
}

// A map of points; each item has a {title, hue}.
export function renderMap(points, items, caption) {
  const [centerX, centerY] = [WIDTH / 2, HEIGHT / 2];
  // One scale for both axes, to keep distances comparable.
  const sizes = points.map(([x, y]) => Math.max(Math.abs(x) / (centerX - MARGIN), Math.abs(y) / (centerY - MARGIN)));
  const scale = Math.max(...sizes) || 1;
  const places = points.map(([x, y]) => [centerX + x / scale, centerY - y / scale]);
  const labels = placeLabels(places);
  const dots = places.map(([left, top], index) => {
    const [labelLeft, labelTop] = labels[index];
    return svg("g", { class: `hue-${items[index].hue % 8}` },
      svg("title", {}, `${index + 1}: ${items[index].title}`),
      svg("circle", { cx: left.toFixed(1), cy: top.toFixed(1), r: 6 }),
      svg("text", { x: labelLeft.toFixed(1), y: (labelTop + 4.5).toFixed(1), "text-anchor": "middle" }, `${index + 1}`));
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
  const texts = lines(values.texts).slice(0, MAX_TEXTS);
  const shown = similarities.slice(0, MAX_TEXTS).map((row) => row.slice(0, MAX_TEXTS));
  const others = shown.flatMap((row, i) => row.filter((_, j) => i !== j));
  // A call of Math.min has a maximum number of arguments.
  const lowest = others.reduce((minimum, value) => Math.min(minimum, value), 1);
  const highest = others.reduce((maximum, value) => Math.max(maximum, value), -1);
  const getHeat = (value) => (highest > lowest ? Math.min(Math.max((value - lowest) / (highest - lowest), 0), 1) : 1);
  const { points, share } = project(shown);
  const items = texts.map((text, hue) => ({ title: text, hue }));
  const isLimited = similarities.length > MAX_TEXTS;
  return [
    isLimited ? notice(`The page shows the first ${MAX_TEXTS} of ${plural(similarities.length, "text")}.`) : null,
    section("Cosine similarities", h("div", { class: "beside" },
      h("div", {}, renderMatrix(shown, getHeat, "Cosine similarities"),
        h("ol", { class: "places" }, ...texts.map((text) => h("li", {}, shorten(text, 90))))),
      renderMap(points, items, `Similar texts are close: ${Math.round(100 * share)} % of the variance`))),
  ];
}
