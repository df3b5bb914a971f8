// Draws the charts of the page lazily: when they are near the viewport, when their <details> is opened, or before
// printing. A link to an element inside a closed <details> opens this <details>.
// Sets data-charts on <body> after the first charts have been drawn, for tests and for printing scripts.
const { config, specs } = JSON.parse(document.getElementById("charts").textContent);
const NEAR = "1200px";
const FEW = 40; // up to this number, all charts outside a closed <details> are drawn at once

const options = {
  renderer: "svg",
  ast: true, // interpret expressions, because the content security policy forbids eval
  config,
  actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
};

function complain(place, error) {
  const message = document.createElement("p");
  message.className = "chart-error";
  message.textContent = "This chart could not be drawn: " + error;
  place.append(message);
}

window.addEventListener("error", (event) => complain(document.querySelector("main"), event.message));
document.addEventListener("securitypolicyviolation", (event) =>
  complain(document.querySelector("main"), "refused by the content policy: " + event.violatedDirective));

// Marks tables wider than their container, because phones show no scroll bar.
const places = [...document.querySelectorAll(".scroll")];
const mark = () => places.forEach((place) => place.classList.toggle("wider", place.scrollWidth > place.clientWidth + 1));
mark();
window.addEventListener("resize", mark);
document.addEventListener("toggle", mark, true); // a table in a closed <details> has no width

const waiting = new Map(Object.entries(specs).map(([key, spec]) => [document.getElementById("chart-" + key), { key, spec }]));

// Scales the number of legend columns to the width of the chart; the specification is for 640 pixels.
function fitted(spec, width) {
  if (Array.isArray(spec)) return spec.map((one) => fitted(one, width));
  if (spec === null || typeof spec !== "object") return spec;
  const made = Object.fromEntries(Object.entries(spec).map(([name, one]) => [name, name === "values" || name === "datasets" ? one : fitted(one, width)]));
  if (made.legend && made.legend.columns) made.legend.columns = Math.max(1, Math.floor((made.legend.columns * width) / 640));
  return made;
}

// Accessibility: the aria-label of a mark is the text of its tooltip. The Tab key focuses the first mark of a chart, an
// arrow key the nearest mark in its direction, and Enter follows the link of a point.
const said = (mark) => Object.entries(mark.__data__.tooltip).map(([name, value]) => name + ": " + value).join("; ");
const readable = (place) =>
  [...place.querySelectorAll(".role-mark [aria-label]")].filter((mark) => mark.__data__ && typeof mark.__data__.tooltip === "object" && mark.__data__.tooltip !== null);

function point(mark, kinds) {
  const { left, top, width, height } = mark.getBoundingClientRect();
  const where = { bubbles: true, clientX: left + width / 2, clientY: top + height / 2 };
  kinds.forEach((kind) => mark.dispatchEvent(new PointerEvent(kind, where)));
}

const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
function nearest(from, marks, [across, down]) {
  const middle = (mark) => {
    const { left, top, width, height } = mark.getBoundingClientRect();
    return [left + width / 2, top + height / 2];
  };
  const [x, y] = middle(from);
  let best = null, least = Infinity;
  for (const mark of marks) {
    const [dx, dy] = [middle(mark)[0] - x, middle(mark)[1] - y];
    const ahead = across * dx + down * dy, aside = Math.abs(across ? dy : dx);
    if (ahead > 0.5 && ahead + 3 * aside < least) [best, least] = [mark, ahead + 3 * aside];
  }
  return best;
}

function reachable(place) {
  const label = () => readable(place).forEach((mark) => mark.setAttribute("aria-label", said(mark)));
  const first = readable(place)[0];
  label();
  place.querySelectorAll("[role=graphics-symbol]:not([aria-label])").forEach((one) => one.setAttribute("aria-hidden", "true"));
  if (!first) return;
  first.tabIndex = 0;
  place.addEventListener("keydown", (event) => {
    const mark = event.target.closest(".role-mark [aria-label]");
    if (!mark) return;
    if (event.key === "Enter" && mark.__data__.href) point(mark, ["click"]);
    const next = ARROWS[event.key] && nearest(mark, readable(place), ARROWS[event.key]);
    if (!ARROWS[event.key]) return;
    event.preventDefault();
    if (!next) return;
    point(mark, ["pointerout", "mouseout"]);
    mark.tabIndex = -1;
    label(); // redrawing resets the label to that of Vega
    next.tabIndex = 0;
    next.focus();
  });
  place.addEventListener("focusin", (event) => event.target.__data__ && point(event.target, ["pointerover", "pointermove", "mouseover", "mousemove"]));
  place.addEventListener("focusout", (event) => event.target.__data__ && point(event.target, ["pointerout", "mouseout"]));
}

async function draw(place) {
  const { key, spec } = waiting.get(place);
  waiting.delete(place);
  try {
    await window.vegaEmbed(place, fitted(spec, place.clientWidth), { ...options, downloadFileName: key });
    place.querySelector("summary").setAttribute("aria-label", "Save the chart: " + place.getAttribute("aria-label"));
    reachable(place);
  } catch (error) {
    complain(place, error);
  }
}

function unfold() {
  const wanted = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let one = wanted && wanted.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
  if (wanted) wanted.scrollIntoView();
}
window.addEventListener("hashchange", unfold);
unfold();

// Before printing, unfolds a page of up to FEW charts, and draws the remaining visible charts. Printing waits for
// promises, but not for events, and drawing uses promises only.
const all = [...waiting.keys()];
const visible = (place) => !place.closest("details:not([open])");
const folded = new Set();
window.addEventListener("beforeprint", () => {
  const closed = all.length > FEW ? [] : document.querySelectorAll("details:not([open], .vega-embed details)");
  closed.forEach((one) => ((one.open = true), folded.add(one)));
  [...waiting.keys()].filter(visible).forEach(draw);
});
window.addEventListener("afterprint", () => folded.forEach((one) => folded.delete(one) && (one.open = false)));

const atOnce = all.length <= FEW ? all.filter(visible) : [];
await Promise.all(atOnce.map(draw));
const later = all.filter((place) => waiting.has(place));
if (later.length) {
  await new Promise((seen) => {
    const observer = new IntersectionObserver(async (entries) => {
      const near = entries.filter((one) => one.isIntersecting && waiting.has(one.target)).map((one) => one.target);
      near.forEach((place) => observer.unobserve(place));
      await Promise.all(near.map(draw));
      seen();
    }, { rootMargin: NEAR });
    later.forEach((place) => observer.observe(place));
  });
}
document.body.dataset.charts = "drawn";
