// Attention explorer of a measurement: a grid of layers and heads, the attention map of the selected head, its importance
// by position, its attention to the first and to the other keys, and the tokens coloured by the attention of a query.
const LOW_TO_HIGH = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"]
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (LOW_TO_HIGH.length - 1);
  const low = Math.min(Math.floor(at), LOW_TO_HIGH.length - 2);
  return LOW_TO_HIGH[low].map((value, channel) => Math.round(value + (at - low) * (LOW_TO_HIGH[low + 1][channel] - value)));
}

const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / (values.length || 1);
const NAMES = { "\n": "⏎", "\t": "⇥" };
const legible = (text) => text.replace(/[\n\t]/g, (one) => NAMES[one]).replace(/^ | $/g, "·") || "·";

function element(name, about = {}, ...inside) {
  const made = document.createElement(name);
  Object.entries(about).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...inside);
  return made;
}

function drawing(svg, width, height, label, parts) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(...parts.map(([name, about]) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(about).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  }));
}

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function explorer(section, data, place) {
  const key = section.querySelector("h2").id;
  const [grid, canvas, row, tokens] = [".heads", "canvas", ".map i", ".tokens"].map((one) => section.querySelector(one));
  const size = data.tokens.length, texts = data.tokens.map(legible), maps = await unpacked(data.maps);
  const index = new Map(data.kept.map((one, at) => [`${one.layer}.${one.head}`, at]));
  let chosen = 0, query = size - 1;

  const shares = (at, from) => Array.from(maps.subarray((at * size + from) * size, (at * size + from + 1) * size), (n) => (n / 255) ** 2);
  const scale = Math.max(data.eps, ...data.first.flat());

  // Makes the grid of heads, with the last layer at the top as in the other heatmaps.
  grid.style.setProperty("--rows", data.layers);
  for (let layer = data.layers; layer >= 1; layer--) {
    const line = element("div", { role: "row" }, element("span", { role: "rowheader", "aria-label": `layer ${layer}` }, String(layer)));
    for (let head = 1; head <= data.heads; head++) {
      const value = data.first[layer - 1][head - 1];
      const at = index.get(`${layer}.${head}`);
      const label = `layer ${layer}, head ${head}: importance of the first token ${value.toFixed(2)}`;
      const cell = element("button", { type: "button", role: "gridcell", tabindex: "-1", "aria-label": at === undefined ? label + ", map not stored" : label, title: label });
      cell.style.background = `rgb(${viridis(value / scale)})`;
      if (at === undefined) cell.disabled = true;
      else cell.dataset.at = at;
      line.append(cell);
    }
    grid.append(line);
  }
  const cells = new Map([...grid.querySelectorAll("[data-at]")].map((cell) => [Number(cell.dataset.at), cell]));

  texts.forEach((text, at) => {
    const button = element("button", { type: "button", tabindex: "-1", "data-at": at, "aria-pressed": "false" }, text);
    tokens.append(element("li", {}, button));
  });
  const buttons = [...tokens.querySelectorAll("button")];
  const named = (at) => `${at + 1} “${texts[at]}”`;

  function showQuery() {
    const row_S = shares(chosen, query);
    buttons.forEach((button, at) => {
      button.style.background = row_S[at] ? `rgb(31 131 196 / ${0.6 * Math.sqrt(row_S[at])})` : "";
      button.tabIndex = at === query ? 0 : -1;
      button.setAttribute("aria-pressed", String(at === query));
      button.setAttribute("aria-label", `${named(at)}, attention ${percent(row_S[at])}`);
    });
    row.style.top = (100 * query) / size + "%";
    row.style.height = 100 / size + "%";
    const most = row_S.map((share, at) => [share, at]).sort((a, b) => b[0] - a[0]).slice(0, 4).filter(([share]) => share > 0);
    section.querySelector(".reading").textContent =
      `Query ${named(query)} attends to: ${most.map(([share, at]) => `key ${named(at)} ${percent(share)}`).join(", ") || "no token"}.`;
  }

  function showHead() {
    const one = data.kept[chosen];
    cells.forEach((cell, at) => {
      cell.setAttribute("aria-selected", String(at === chosen));
      cell.tabIndex = at === chosen ? 0 : -1;
    });
    const sink = one.importance[0] > data.eps ? "a sink on the first token" : "no sink on the first token on average";
    section.querySelector(".place").textContent = `Layer ${one.layer}, head ${one.head}: ${one.role || sink}`;

    canvas.width = canvas.height = size;
    const pixels = new ImageData(size, size);
    for (let at = 0; at < size * size; at++) {
      const seen = at % size <= Math.floor(at / size) || maps[chosen * size * size + at];
      const colour = viridis(maps[chosen * size * size + at] / 255); // square root of the attention, to resolve small values
      pixels.data.set([...colour, seen ? 255 : 0], 4 * at);
    }
    canvas.getContext("2d").putImageData(pixels, 0, 0);

    const first = [], others = [];
    for (let at = 1; at < size; at++) {
      const row_S = shares(chosen, at);
      first.push(row_S[0]);
      others.push(mean(row_S.slice(1, at + 1)));
    }
    const later = one.importance.slice(1, Math.max(2, Math.ceil(size / 2)));
    const highest = later.indexOf(Math.max(...later));
    section.querySelector(".facts").textContent =
      `Sink on the first token in ${one.rate} % of the sequences. Importance of the first token ${one.importance[0].toFixed(3)}, ` +
      `of the others ${mean(one.importance.slice(1)).toFixed(3)} on average, highest ${later[highest].toFixed(3)} at position ${highest + 2}. ` +
      `In this sequence, a query attends to the first key with ${percent(mean(first))} and to another key with ${percent(mean(others))} on average.`;
    canvas.setAttribute("aria-label", `Attention map of layer ${one.layer}, head ${one.head}; the buttons of the tokens below state the attention of each query`);
    const top = Math.max(data.eps, ...one.importance);
    drawing(section.querySelector(".bars"), size, 1, `Importance by position, from ${one.importance[0].toFixed(2)} at the first; ε is ${data.eps}`, [
      ...one.importance.map((value, at) => ["rect", { x: at + 0.1, y: 1 - value / top, width: 0.8, height: value / top }]),
      ["line", { x1: 0, x2: size, y1: 1 - data.eps / top, y2: 1 - data.eps / top }],
    ]);
    const line = (values) => "M" + values.map((value, at) => `${at},${1 - value}`).join("L");
    drawing(section.querySelector(".shares"), size - 2, 1, `Attention to the first key ${percent(mean(first))} on average, to another key ${percent(mean(others))}`, [
      ["path", { d: line(others) }],
      ["path", { d: line(first), class: "first" }],
    ]);
    showQuery();
  }

  // Stores the selection in the URL without adding an entry to the browser history.
  function choose(at, from, focus) {
    [chosen, query] = [at, from];
    showHead();
    const one = data.kept[chosen];
    history.replaceState(null, "", `#${key}-${one.layer}.${one.head}-${query + 1}`);
    if (focus) cells.get(chosen).focus();
  }

  function follow() {
    const found = decodeURIComponent(location.hash).match(new RegExp(`^#${key}-(\\d+\\.\\d+)(?:-(\\d+))?$`));
    if (!found || !index.has(found[1])) return;
    [chosen, query] = [index.get(found[1]), Math.min(Math.max(Number(found[2] || size), 1), size) - 1];
    showHead();
    section.scrollIntoView();
  }

  const STEPS = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  grid.addEventListener("click", (event) => event.target.dataset.at && choose(Number(event.target.dataset.at), query, true));
  grid.addEventListener("keydown", (event) => {
    if (!STEPS[event.key]) return;
    event.preventDefault();
    let { layer, head } = data.kept[chosen];
    do [layer, head] = [layer + STEPS[event.key][0], head + STEPS[event.key][1]];
    while (layer >= 1 && layer <= data.layers && head >= 1 && head <= data.heads && !index.has(`${layer}.${head}`));
    if (index.has(`${layer}.${head}`)) choose(index.get(`${layer}.${head}`), query, true);
  });
  tokens.addEventListener("click", (event) => event.target.dataset.at && choose(chosen, Number(event.target.dataset.at)));
  tokens.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -size, End: size }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen, Math.min(Math.max(query + step, 0), size - 1));
    buttons[query].focus();
  });
  const under = (event) => [event.offsetY, event.offsetX].map((at) => Math.min(size - 1, Math.max(0, Math.floor((at * size) / canvas.clientWidth))));
  canvas.addEventListener("click", (event) => choose(chosen, under(event)[0]));
  canvas.addEventListener("pointermove", (event) => {
    const [from, to] = under(event);
    canvas.title = `query ${named(from)}, key ${named(to)}: ${percent(shares(chosen, from)[to])}`;
  });
  window.addEventListener("hashchange", follow);

  // A click on a head in the heatmap of all heads selects it in the first explorer.
  document.addEventListener("click", (event) => {
    const mark = event.target.closest("[id^=chart-importance-heads-0] .role-mark [aria-label]");
    const found = mark && mark.getAttribute("aria-label").match(/^layer: (\d+); head: (\d+)/);
    if (place > 0 || !found || !index.has(`${found[1]}.${found[2]}`)) return;
    choose(index.get(`${found[1]}.${found[2]}`), query, true);
  });

  section.hidden = false;
  const strongest = data.kept.map((one) => one.importance[0]);
  chosen = strongest.indexOf(Math.max(...strongest));
  showHead();
  follow();
}

const explored = JSON.parse(document.getElementById("explored").textContent);
await Promise.all([...document.querySelectorAll(".explore")].map((section, at) => explorer(section, explored[at], at)));
document.body.dataset.explorers = "ready";
