// One stop of the Tab key for all heads: arrow keys walk among them, Enter or a click chooses.
const buttons = () => Array.from(element.querySelectorAll(".bs-grid button"));
const found = (layer, head) =>
  element.querySelector(`.bs-grid button[data-layer="${layer}"][data-head="${head}"]`);
const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
element.addEventListener("click", (event) => {
  const chosen = event.target.closest(".bs-grid button");
  if (chosen) {
    buttons().forEach((button) => (button.tabIndex = button === chosen ? 0 : -1));
    trigger("select", { layer: Number(chosen.dataset.layer), head: Number(chosen.dataset.head) });
  }
});
element.addEventListener("keydown", (event) => {
  const here = event.target.closest(".bs-grid button");
  const step = steps[event.key];
  if (!here || !step) return;
  event.preventDefault();
  const next = found(Number(here.dataset.layer) + step[0], Number(here.dataset.head) + step[1]);
  if (next) {
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
});
