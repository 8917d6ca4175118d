// The grid is a single tab stop; arrow keys move the focus, Enter or a click selects a head.
const buttons = () => Array.from(element.querySelectorAll(".bs-grid button"));
const findButton = (layer, head) =>
  element.querySelector(`.bs-grid button[data-layer="${layer}"][data-head="${head}"]`);
const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
element.addEventListener("click", (event) => {
  const button = event.target.closest(".bs-grid button");
  if (button) {
    buttons().forEach((other) => (other.tabIndex = other === button ? 0 : -1));
    trigger("select", { layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
  }
});
element.addEventListener("keydown", (event) => {
  const current = event.target.closest(".bs-grid button");
  const step = steps[event.key];
  if (!current || !step) return;
  event.preventDefault();
  const next = findButton(Number(current.dataset.layer) + step[0], Number(current.dataset.head) + step[1]);
  if (next) {
    current.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
});
