// Create elements. Texts become text nodes, so that no text is ever parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";

// Set attributes, add listeners ("onclick": function) and append children. Attributes that are
// null, undefined or false, and such children, are left out.
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  const isShown = (child) => child !== null && child !== undefined && child !== false;
  element.append(...children.flat().filter(isShown));
  return element;
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A probability as text; small positive ones as "< 0.1 %".
export function percent(probability) {
  return probability > 0 && probability < 0.0005 ? "< 0.1 %" : `${(100 * probability).toFixed(1)} %`;
}

export function shorten(text, length) {
  const characters = Array.from(text);
  return characters.length <= length ? text : `${characters.slice(0, length - 1).join("")}…`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

// The non-empty lines of a text field.
export function lines(text) {
  return text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
}

export function notice(message, kind = "note") {
  return h("p", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "note" }, message);
}

export function section(title, ...content) {
  return h("section", {}, title ? h("h3", {}, title) : null, ...content);
}

// Rows of [text, probability] as bars on a scale from 0 to 100 %.
export function bars(rows, best = 0) {
  const items = rows.map(([text, probability], index) =>
    h("li", { class: index === best ? "best" : null },
      h("span", { class: "word" }, text),
      h("span", { class: "bar", "aria-hidden": "true" },
        h("span", { "--share": `${100 * Math.min(Math.max(probability, 0), 1)}%` })),
      h("span", { class: "share" }, percent(probability))));
  const scale = h("div", { class: "scale", "aria-hidden": "true" },
    h("span", {}), h("span", {}, h("i", {}, "0 %"), h("i", {}, "50 %"), h("i", {}, "100 %")), h("span", {}));
  return h("div", {}, h("ol", { class: "bars" }, ...items), scale);
}

// A text with marked spans {start, end, label, hue}. Offsets count characters (code points), not
// the UTF-16 units of JavaScript's strings; the spans are sorted and do not overlap.
export function highlight(text, spans) {
  const characters = Array.from(text);
  const slice = (start, end) => characters.slice(start, end).join("");
  const parts = [];
  let position = 0;
  for (const { start, end, label, hue } of spans) {
    parts.push(slice(position, start));
    parts.push(h("mark", { class: `hue-${hue % 8}` }, slice(start, end), label ? h("small", {}, label) : null));
    position = end;
  }
  return h("p", { class: "marked" }, ...parts, slice(position));
}
