// The page: puts charts in their places, and answers the pointer, the keys and the address's fragment.

const ZOOM = 1.6; // one step in or out
const SHIFT = 0.4; // one step sideways, in widths of the visible stretch
const NARROWEST_US = 10;
const DRAG = 4; // pixels from which on a press is a drag

let model;
try {
  model = makeModel(await decode(document.getElementById("data").textContent));
} catch (error) {
  document.getElementById("about").textContent = `This browser cannot read the page's data: ${error.message}`;
  throw error;
}
const state = { view: { from: 0, to: model.total }, selected: null, order: "arrival" };

// Canvases take no var(): a hidden element tells what a colour is in this theme.
const probe = document.body.appendChild(element("span", { hidden: "" }));
let known = new Map();
function colour(name) {
  if (!known.has(name)) {
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

const charts = makeCharts(model, state, colour);
const cursor = document.getElementById("cursor"), tip = document.getElementById("tip");

for (const chart of charts) {
  chart.canvas = element("canvas", { role: "img", "aria-label": chart.title });
  chart.noteNode = element("span", {});
  const legend = element("span", { class: "legend" }, ...chart.legend.map(([name, word, shape]) => {
    const mark = element("i", { class: shape || "" });
    mark.style.background = mark.style.borderColor = `var(--${name})`;
    return element("span", {}, mark, word);
  }));
  document.getElementById("charts").append(element("figure", { id: chart.id },
    element("figcaption", {}, element("b", {}, chart.title), chart.noteNode, legend), chart.canvas));
}

const viewOf = (chart) => (chart.whole ? { from: 0, to: model.total } : state.view);

function axis(ctx, plot, view) {
  const wanted = ((view.to - view.from) / plot.width) * 110, power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  const [unit, size] = view.to >= 1e6 && step >= 1e3 ? ["s", 1e6] : ["ms", 1e3];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  ctx.font = '11px system-ui, "DejaVu Sans", sans-serif';
  ctx.textBaseline = "top";
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = plot.left + ((k * step - view.from) / (view.to - view.from)) * plot.width;
    ctx.fillStyle = colour("line");
    ctx.fillRect(Math.round(x), plot.height, 1, 4);
    ctx.fillStyle = colour("soft");
    const text = `${fixed((k * step) / size, digits)} ${unit}`;
    ctx.textAlign = x + ctx.measureText(text).width / 2 > plot.left + plot.width ? "right" : "center";
    ctx.fillText(text, x, plot.height + 6);
  }
}

function draw() {
  const sharp = window.devicePixelRatio || 1;
  for (const chart of charts) {
    const canvas = chart.canvas, height = chart.height(), width = canvas.parentElement.clientWidth - 20;
    chart.plot = { left: GUTTER, width: Math.max(50, Math.floor(width - GUTTER - RIGHT)), height };
    canvas.style.height = `${height + AXIS}px`;
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round((height + AXIS) * sharp);
    const ctx = canvas.getContext("2d");
    ctx.scale(sharp, sharp);
    chart.draw(ctx, chart.plot);
    axis(ctx, chart.plot, viewOf(chart));
    chart.noteNode.textContent = typeof chart.note === "function" ? chart.note() : chart.note;
  }
  const { from, to } = state.view;
  document.getElementById("window").textContent = `${atTime(from)} to ${atTime(to)}`;
}

let asked = 0;
function redraw() {
  asked ||= requestAnimationFrame(() => {
    asked = 0;
    draw();
  });
}

// The visible stretch -------------------------------------------------------------------------------------------------

function look(from, to) {
  const width = Math.min(Math.max(to - from, Math.min(NARROWEST_US, model.total)), model.total);
  const start = Math.min(Math.max(0, from), model.total - width);
  state.view = { from: start, to: start + width };
  remember();
  redraw();
}

function zoom(factor, around = (state.view.from + state.view.to) / 2) {
  look(around - (around - state.view.from) / factor, around + (state.view.to - around) / factor);
}

const width = () => state.view.to - state.view.from;
const actions = {
  in: () => zoom(ZOOM), out: () => zoom(1 / ZOOM), all: () => look(0, model.total),
  left: () => look(state.view.from - SHIFT * width(), state.view.to - SHIFT * width()),
  right: () => look(state.view.from + SHIFT * width(), state.view.to + SHIFT * width()),
};

function select(request, show = false) {
  state.selected = request;
  document.getElementById("find").value = request === null ? "" : request;
  showSelection(model, request);
  if (show && request !== null) {
    const R = model.requests, start = R.phase_start_us[request], end = R.until[request], margin = (end - start) / 4 + NARROWEST_US;
    if (end < state.view.from || start > state.view.to) return look(start - margin, end + margin);
  }
  remember();
  redraw();
}

// The address's fragment says what is looked at, so that a link can say it: #request=12&from_ms=10&to_ms=20
function remember() {
  const parts = [];
  if (state.selected !== null) parts.push(`request=${state.selected}`);
  if (width() < model.total) parts.push(`from_ms=${state.view.from / 1000}`, `to_ms=${state.view.to / 1000}`);
  if (state.order !== "arrival") parts.push(`lanes=${state.order}`);
  history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : "#");
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  const request = Number(given.get("request") ?? NaN), from = Number(given.get("from_ms") ?? NaN), to = Number(given.get("to_ms") ?? NaN);
  const order = document.getElementById("order");
  if ([...order.options].some((option) => option.value === given.get("lanes"))) order.value = state.order = given.get("lanes");
  if (from < to) look(from * 1000, to * 1000);
  select(Number.isInteger(request) && request >= 0 && request < model.count ? request : null, !(from < to));
}

// The pointer ---------------------------------------------------------------------------------------------------------

function placeOf(chart, event) {
  const box = chart.canvas.getBoundingClientRect(), view = viewOf(chart);
  const x = Math.min(Math.max(event.clientX - box.left - chart.plot.left, 0), chart.plot.width);
  return { x, y: event.clientY - box.top, us: view.from + (x / chart.plot.width) * (view.to - view.from), box };
}

function hover(chart, event) {
  // The overview has a time axis of its own, so the line runs through it alone, or through all others.
  const at = placeOf(chart, event), others = charts.filter((other) => Boolean(other.whole) === Boolean(chart.whole));
  const top = Math.max(0, others[0].canvas.getBoundingClientRect().top);
  const foot = Math.min(innerHeight, others[others.length - 1].canvas.getBoundingClientRect().bottom - AXIS);
  Object.assign(cursor.style, { left: `${at.box.left + chart.plot.left + at.x}px`, top: `${top}px`, height: `${foot - top}px` });
  cursor.hidden = false;
  const told = at.y <= chart.plot.height ? chart.hover(at, chart.plot) : null;
  tip.replaceChildren(element("b", {}, told ? told[0] : atTime(at.us)), rowsTable(told ? [["at", atTime(at.us)], ...told[1]] : []));
  tip.hidden = false;
  const room = tip.getBoundingClientRect();
  tip.style.left = `${event.clientX + 16 + room.width > innerWidth ? event.clientX - 16 - room.width : event.clientX + 16}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - room.height - 4))}px`;
}

function endHover() {
  cursor.hidden = tip.hidden = true;
}

let press = null; // where a drag began
const band = document.body.appendChild(element("div", { id: "band", hidden: "" }));

for (const chart of charts) {
  const canvas = chart.canvas;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    press = { chart, at: placeOf(chart, event), x: event.clientX };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    hover(chart, event);
    if (!press || Math.abs(event.clientX - press.x) < DRAG) return;
    const at = placeOf(chart, event), left = at.box.left + chart.plot.left;
    Object.assign(band.style, { left: `${left + Math.min(at.x, press.at.x)}px`, width: `${Math.abs(at.x - press.at.x)}px`,
      top: `${at.box.top}px`, height: `${chart.plot.height}px` });
    band.hidden = false;
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!press) return;
    const { at: from, x } = press, to = placeOf(chart, event);
    press = null;
    band.hidden = true;
    if (Math.abs(event.clientX - x) >= DRAG) return look(Math.min(from.us, to.us), Math.max(from.us, to.us));
    const request = chart.click?.(to, chart.plot);
    if (request !== undefined) select(request);
  });
  canvas.addEventListener("pointercancel", () => {
    press = null;
    band.hidden = true;
  });
  canvas.addEventListener("pointerleave", endHover);
  canvas.addEventListener("dblclick", actions.all);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, placeOf(chart, event).us);
  }, { passive: false });
}

for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
document.getElementById("order").addEventListener("change", (event) => {
  state.order = event.target.value;
  remember();
  redraw();
});
document.getElementById("find").addEventListener("change", (event) => {
  const request = event.target.valueAsNumber;
  select(Number.isInteger(request) && request >= 0 && request < model.count ? request : null, true);
});
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "all" }[event.key];
  if (action) {
    event.preventDefault();
    actions[action]();
  } else if (event.key === "Escape") select(null);
});

function recolour() {
  known = new Map();
  redraw();
}
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("resize", redraw);
addEventListener("scroll", endHover, { passive: true });
addEventListener("hashchange", recall);

document.getElementById("find").max = model.count - 1;
showHead(model);
showTiles(model);
showTables(model);
recall();
draw();
document.body.dataset.ready = "yes";
