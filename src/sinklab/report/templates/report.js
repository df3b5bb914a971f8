// Draws the charts of the page: those near the window at once, the others when the reader comes near or unfolds them,
// all for print. A link to what is folded away unfolds it.
// Says on <body> when those that are near have been drawn, for tests and for printing scripts.
const { config, specs } = JSON.parse(document.getElementById("charts").textContent);
const NEAR = "1200px";
const FEW = 40; // charts that are drawn at once wherever they stand, unless they are folded away and have no width

const options = {
  renderer: "svg",
  ast: true, // expressions are interpreted: the content policy forbids eval
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

// A table that is wider than its place says so: on a telephone no scroll bar shows it.
const places = [...document.querySelectorAll(".scroll")];
const mark = () => places.forEach((place) => place.classList.toggle("wider", place.scrollWidth > place.clientWidth + 1));
mark();
window.addEventListener("resize", mark);
document.addEventListener("toggle", mark, true); // what was folded away had no width

const waiting = new Map(Object.entries(specs).map(([key, spec]) => [document.getElementById("chart-" + key), { key, spec }]));

async function draw(place) {
  const { key, spec } = waiting.get(place);
  waiting.delete(place);
  try {
    await window.vegaEmbed(place, spec, { ...options, downloadFileName: key });
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

// Printing waits for nothing but promises that need no event: drawing is made of such alone.
const folded = () => [...document.querySelectorAll("main details:not([open])")].filter((one) => !one.closest(".chart"));
window.addEventListener("beforeprint", () => {
  folded().forEach((one) => ((one.open = true), (one.dataset.forPrint = "")));
  [...waiting.keys()].forEach(draw);
});
window.addEventListener("afterprint", () =>
  document.querySelectorAll("[data-for-print]").forEach((one) => ((one.open = false), delete one.dataset.forPrint)));

const all = [...waiting.keys()];
const atOnce = all.length <= FEW ? all.filter((place) => !place.closest("details:not([open])")) : [];
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
