"use strict";
/* Timelines on canvases: `load` takes what `page.encode` made, `build` makes the elements, `refresh` draws. */
const hint = document.getElementById("hint");
const AXIS = 24;  // height of the axis, in pixels
const TALLEST = 60;  // no row is higher, in pixels, so that tables are on the screen, too
const SMALLEST = 7, SIZES = [1, 0.8, 0.64, 0.5];  // no text is smaller, in pixels; few sizes, for a calm picture
const STRIPE = 0.28;  // share of a cell that the stripe of a worker's last stage takes
const FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";
const view = {from: 0, to: 1};  // shares of the longest picture, or of each where their units differ
let colours = {};
let hover = null;  // {picture, share, span}: where the pointer is
let waiting = false;  // for the next frame

const make = (tag, text, parent, name) => {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (name) element.className = name;
  parent.append(element);
  return element;
};
const time = (value, unit) =>
  `${+(Math.abs(value) < 1e5 ? value.toPrecision(5) : value.toFixed(0))}${unit ? " " + unit : ""}`;
const nameOf = span => `${span.stage}${span.kind}${span.microbatch}`;

function decode(raw) {
  const rows = Array.from({length: raw.workers}, () => []);
  const spans = raw.spans.map(([worker, stage, kind, microbatch, start, end, wait = 0, cause = -1]) =>
    ({worker, stage, kind, microbatch, start, end, wait, cause, level: raw.stages[worker].indexOf(stage)}));
  for (const span of spans) {
    span.cause = span.cause < 0 ? null : spans[span.cause];
    const row = rows[span.worker], before = row[row.length - 1];
    // Searched by halves, which needs ends that never fall, also where an exchange overlaps a computation.
    span.until = before ? Math.max(before.until, span.end) : span.end;
    row.push(span);
  }
  for (const i of raw.critical) spans[i].critical = true;
  const length = spans.length ? spans.reduce((most, span) => Math.max(most, span.end), 0) : 0;
  const digits = key => spans.reduce((most, span) => Math.max(most, String(span[key]).length), 1);
  return {...raw, spans, rows, length: length || 1, levels: Math.max(1, ...raw.stages.map(s => s.length)) - 1,
    longest: digits("microbatch"), widest: digits("stage") + 1};  // characters of the number, and before it
}

function firstAfter(row, moment) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].until < moment) low = middle + 1; else high = middle;
  }
  return low;
}

let palette = {}, pictures = [], drawn = [];

/* Take in pictures; true if `build` must make other elements than those that are there. */
function load(raw) {
  const next = raw.pictures.map(decode), same = next.length === pictures.length &&
    next.every((picture, i) => picture.name === pictures[i].name && !picture.spans.length === !pictures[i].spans.length);
  palette = raw.palette;
  if (same) next.forEach((picture, i) => Object.assign(pictures[i], picture)); else pictures = next;
  drawn = pictures.filter(picture => picture.spans.length);
  const alike = new Set(drawn.map(picture => picture.unit)).size <= 1;
  const longest = drawn.reduce((most, picture) => Math.max(most, picture.length), 0);
  for (const picture of drawn) {
    picture.scale = alike ? longest : picture.length;
    if (same) { picture.words.textContent = picture.about; detail(picture); }
  }
  if (hover) hover.span = null;
  return !same;
}

function build() {
  const main = document.getElementById("pictures"), legend = document.getElementById("legend");
  main.replaceChildren();
  legend.replaceChildren();
  if (!pictures.length) make("p", "There is no timeline to show.", main, "empty");
  const kinds = new Set(drawn.flatMap(picture => picture.spans.map(span => span.kind)));
  const entry = (words, colour, name) => {
    const item = make("li", "", legend);
    make("i", "", item, name).style.background = colour;
    item.append(words);
  };
  for (const [kind, [colour, , word]] of Object.entries(palette)) if (kinds.has(kind)) entry(`${kind} ${word}`, colour);
  if (drawn.length) entry(drawn[0].gaps, "var(--bubble)");
  if (drawn.some(picture => picture.critical.length)) entry("critical path", "", "critical");
  const levels = Math.max(0, ...drawn.map(picture => picture.levels));
  if (levels) entry(levels > 1 ? "later stages of the worker: the later, the higher" : "second stage of the worker", "", "stripe");
  document.getElementById("tools").hidden = !drawn.length;
  document.title = pictures.map(picture => picture.name).filter(Boolean).join(", ") || document.title;
  for (const picture of pictures) {
    const section = make("section", "", main);
    make("h2", picture.name, section);
    if (!picture.spans.length) { make("p", "Nothing ran.", section, "empty"); continue; }
    picture.words = make("span", picture.about, section, "about");
    picture.plot = make("div", "", section, "plot");
    picture.canvas = make("canvas", "", picture.plot);
    picture.over = make("canvas", "", picture.plot);
    picture.canvas.setAttribute("role", "img");
    picture.canvas.setAttribute("aria-label", `${picture.name}: ${picture.about}`);
    picture.more = make("div", "", section, "more");
    detail(picture);
    listen(picture);
  }
}

/* Below a timeline: notes, a row of figures for each worker, and the activations that it holds over the same time. */
function detail(picture) {
  picture.more.replaceChildren();
  for (const note of picture.notes) make("p", note, picture.more);
  const table = make("table", "", picture.more);
  picture.table.forEach((cells, i) => {
    const row = make("tr", "", table);
    for (const cell of cells) make(i ? "td" : "th", cell, row);
  });
  const most = Math.max(1, ...picture.held.flat().map(([, number]) => number));
  picture.held.forEach((curve, worker) => {
    const steps = curve.map(([at, number]) => `H${1000 * at / picture.length}V${40 - 38 * number / most}`).join("");
    const drawing = `<svg viewBox="0 0 1000 40" preserveAspectRatio="none"><path d="M0 40${steps}H1000"/></svg>`;
    make("td", "", table.rows[worker + 1]).innerHTML = drawing;
  });
  if (table.rows.length) make("th", "activations held over time", table.rows[0]);
}

function measure() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "dim", "line", "bubble", "curve"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  const ratio = window.devicePixelRatio || 1;
  const rows = drawn.reduce((sum, picture) => sum + picture.workers, 0);
  const free = window.innerHeight - 60 - drawn.length * (AXIS + 46);
  const pitch = Math.max(11, Math.min(TALLEST, Math.floor(free / rows)));
  for (const picture of drawn) {
    picture.pitch = pitch;
    picture.cell = pitch - (pitch > 14 ? 2 : 1);
    picture.font = Math.min(14, picture.cell - 2);
    picture.width = picture.plot.clientWidth;
    picture.height = picture.workers * pitch + AXIS;
    for (const canvas of [picture.canvas, picture.over]) {
      canvas.width = Math.round(picture.width * ratio);
      canvas.height = Math.round(picture.height * ratio);
      canvas.style.height = `${picture.height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const context = picture.canvas.getContext("2d");
    context.font = `${picture.font}px ${FONT}`;
    picture.digit = context.measureText("0").width;
    picture.left = Math.ceil(Math.max(0, ...picture.names.map(name => context.measureText(name).width))) + 8;
  }
  // One left edge, so that equal times stand above each other.
  const left = Math.max(0, ...drawn.map(picture => picture.left));
  for (const picture of drawn) picture.left = left;
}

const place = (picture, moment) =>
  picture.left + (moment / picture.scale - view.from) / (view.to - view.from) * (picture.width - picture.left);
const shareAt = (picture, x) =>
  view.from + (x - picture.left) / (picture.width - picture.left) * (view.to - view.from);

function drawAxis(picture, context) {
  const shown = (view.to - view.from) * picture.scale;
  const least = shown / Math.max(2, (picture.width - picture.left) / 80), power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find(m => m * power >= least * (1 - 1e-9)) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), y = picture.workers * picture.pitch;
  context.fillStyle = colours.dim;
  context.font = `11px ${FONT}`;
  context.textBaseline = "top";
  for (let i = Math.ceil(view.from * picture.scale / step - 1e-9); i * step <= view.to * picture.scale * (1 + 1e-9); i++) {
    const x = place(picture, i * step), name = (i * step).toFixed(digits) + (picture.unit ? ` ${picture.unit}` : "");
    const half = context.measureText(name).width / 2;
    context.textAlign = "center";
    context.fillRect(Math.round(x), y, 1, 5);
    context.fillText(name, Math.min(x, picture.width - half), y + 8);
  }
}

/* Notes what is to be drawn of a row: boxes by colour, as a change of colour costs more than a box. */
function layRow(picture, worker, boxes, stripes, labels, critical) {
  const row = picture.rows[worker], y = worker * picture.pitch;
  const from = view.from * picture.scale, to = view.to * picture.scale;
  let reached = -1;
  for (let i = firstAfter(row, from); i < row.length && row[i].start <= to; i++) {
    const span = row[i], x = place(picture, span.start), end = place(picture, span.end);
    if (span.end <= span.start) { boxes[`${span.kind} tick`].push(x - 1, y, 2); continue; }
    if (end < reached + 0.25 && end - x < 0.25) continue;  // nobody could see it
    reached = Math.max(reached, end);
    const wide = end - x, seam = wide > 4 ? 1 : wide > 2 ? 0.5 : 0;
    boxes[span.kind].push(x, y, Math.max(wide - seam, 0.4));
    picture.shown++;
    if (span.critical) critical.push(x, y, Math.max(wide - seam, 0.4));
    if (span.level > 0) stripes.push(x, y, Math.max(wide - seam, 0.4), span.level);
    if (wide > picture.digit) labels.push(span, Math.max(x, picture.left), Math.min(end, picture.width), y);
  }
}

function drawRows(picture, context) {
  const kinds = Object.keys(palette), boxes = {}, stripes = [], labels = [], critical = [];
  // What takes no time is drawn last, because a neighbour would cover it.
  for (const name of [...kinds, ...kinds.map(kind => `${kind} tick`)]) boxes[name] = [];
  for (let worker = 0; worker < picture.workers; worker++) layRow(picture, worker, boxes, stripes, labels, critical);
  for (const [name, found] of Object.entries(boxes)) {
    context.fillStyle = palette[name[0]][0];
    for (let i = 0; i < found.length; i += 3) context.fillRect(found[i], found[i + 1], found[i + 2], picture.cell);
  }
  context.fillStyle = "#0000008c";
  for (let i = 0; i < stripes.length; i += 4) {
    const high = STRIPE * picture.cell * stripes[i + 3] / picture.levels;
    context.fillRect(stripes[i], stripes[i + 1] + picture.cell - high, stripes[i + 2], high);
  }
  context.fillStyle = colours.ink;
  for (let i = 0; i < critical.length; i += 3) context.fillRect(critical[i], critical[i + 1], critical[i + 2], 3);
  for (let i = 0; i < labels.length; i += 4) label(picture, context, ...labels.slice(i, i + 4));
}

/* The whole name, its kind and microbatch (of an update its kind), the microbatch alone, or nothing. All names count as long as the longest, so that of equal
   cells either all have a label or none has. */
function label(picture, context, span, x, end, y) {
  const room = end - x - 3, {font, digit} = picture;
  const fits = count => SIZES.map(part => part * font).find(size => size * count * digit / font <= room && size >= SMALLEST);
  const full = (picture.longest + picture.widest) * digit + 6 <= room;
  const kinded = fits(picture.longest + 1), size = kinded || fits(picture.longest);
  if (!size || !kinded && String(span.microbatch).includes(".")) return;  // a slice's name, such as 0.3, reads as a time
  const kind = kinded ? span.kind : "";
  const text = "GU".includes(span.kind) ? span.kind : full ? nameOf(span) : `${kind}${span.microbatch}`;
  if (picture.size !== size) context.font = `${picture.size = size}px ${FONT}`;
  context.fillStyle = palette[span.kind][1];
  context.fillText(text, (x + end - 1) / 2, y + picture.cell * (picture.levels ? 1 - STRIPE : 1) / 2 + 0.5);
}

function drawPicture(picture) {
  const context = picture.canvas.getContext("2d");
  picture.shown = 0;
  context.clearRect(0, 0, picture.width, picture.height);
  context.save();
  context.beginPath();
  context.rect(picture.left, 0, picture.width - picture.left, picture.height);
  context.clip();
  context.fillStyle = colours.bubble;
  const last = Math.min(place(picture, picture.length), picture.width);
  for (let worker = 0; worker < picture.workers; worker++)
    context.fillRect(place(picture, 0), worker * picture.pitch, last - place(picture, 0), picture.cell);
  context.textAlign = "center";
  context.textBaseline = "middle";
  picture.size = 0;
  drawRows(picture, context);
  context.restore();
  drawAxis(picture, context);
  context.fillStyle = colours.ink;
  context.font = `${picture.font}px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let worker = 0; worker < picture.workers; worker++)
    context.fillText(picture.names[worker], picture.left - 6, worker * picture.pitch + picture.cell / 2 + 0.5);
  picture.canvas.dataset.shown = picture.shown;
}

function drawHover(picture) {
  const context = picture.over.getContext("2d");
  context.clearRect(0, 0, picture.width, picture.height);
  if (!hover) return;
  context.save();
  context.beginPath();
  context.rect(picture.left, 0, picture.width - picture.left, picture.height);
  context.clip();
  const share = view.from + (view.to - view.from) * hover.share;
  context.fillStyle = colours.dim;
  context.fillRect(Math.round(place(picture, share * picture.scale)), 0, 1, picture.workers * picture.pitch);
  const {span} = hover;
  if (hover.picture === picture && span) {
    const frame = (start, end, worker) => context.strokeRect(
      place(picture, start), worker * picture.pitch, Math.max(1, place(picture, end) - place(picture, start)), picture.cell);
    const middle = worker => worker * picture.pitch + picture.cell / 2;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    frame(span.start, span.end, span.worker);
    if (span.cause) {
      frame(span.cause.start, span.cause.end, span.cause.worker);
      context.beginPath();
      context.moveTo(place(picture, span.cause.end), middle(span.cause.worker));
      context.lineTo(place(picture, span.start), middle(span.worker));
      context.stroke();
    }
    context.setLineDash([3, 3]);
    context.lineWidth = 1;
    if (span.wait) frame(span.start - span.wait, span.start, span.worker);
  }
  context.restore();
}

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const picture of drawn) { drawPicture(picture); drawHover(picture); }
  });
}

function show(from, to) {
  const wide = Math.min(1, Math.max(1e-6, to - from));
  view.from = Math.min(Math.max(0, from), 1 - wide);
  view.to = view.from + wide;
  redraw();
}
const zoom = (factor, share = (view.from + view.to) / 2) =>
  show(share - (share - view.from) * factor, share + (view.to - share) * factor);
const pan = part => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
const reset = () => show(0, 1);

function explain(picture, span) {
  const {unit} = picture, word = palette[span.kind][2];
  const lines = [`worker ${span.worker}, stage ${span.stage}` + ("GU".includes(span.kind) ? "" : `, microbatch ${span.microbatch}`),
    `start ${time(span.start, unit)}, took ${time(span.end - span.start, unit)}`];
  if (!span.wait) lines.push("did not wait");
  else if (!span.cause || span.cause.worker === span.worker) lines.push(`waited ${time(span.wait, unit)}`);
  else {
    const ago = span.start - span.cause.end;
    lines.push(`waited ${time(span.wait, unit)} for ${nameOf(span.cause)} of worker ${span.cause.worker}` +
      (ago > 1e-9 * picture.length ? `, which ended ${time(ago, unit)} before` : ""));
  }
  return [`${nameOf(span)} ${word}`, ...lines];
}

/* The span under the pointer, else the one that the worker waits for there, else null. */
function spanAt(picture, x, y) {
  const row = picture.rows[Math.floor(y / picture.pitch)];
  if (!row || x < picture.left) return null;
  const moment = shareAt(picture, x) * picture.scale, at = firstAfter(row, moment);
  for (let i = at; i < row.length && row[i].start <= moment; i++) if (row[i].end > moment) return row[i];
  return row.slice(at).find(span => span.start > moment && span.start - span.wait <= moment) || null;
}

function point(picture, event) {
  const box = picture.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const span = spanAt(picture, x, y);
  hover = {picture, share: (x - picture.left) / (picture.width - picture.left), span};
  hint.hidden = !span;
  if (span) {
    hint.replaceChildren();
    explain(picture, span).forEach((line, i) => make(i ? "span" : "b", line, hint));
    hint.style.left = "0";  // else the words wrap at the window's edge
    const {width, height} = hint.getBoundingClientRect();
    const right = event.clientX + 14 + width > window.innerWidth, low = event.clientY + 16 + height > window.innerHeight;
    hint.style.left = `${Math.max(4, right ? event.clientX - width - 14 : event.clientX + 14)}px`;
    hint.style.top = `${Math.max(4, low ? event.clientY - height - 14 : event.clientY + 16)}px`;
  }
  drawn.forEach(drawHover);
}

function listen(picture) {
  const {canvas} = picture;
  let grip = null;
  const leave = () => { hover = null; hint.hidden = true; drawn.forEach(drawHover); };
  canvas.addEventListener("wheel", event => {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    if (x < picture.left) return;  // over the names the wheel scrolls the page
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1, across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(across * lines / picture.width);
    else zoom(Math.exp(event.deltaY * lines * 0.0018), shareAt(picture, x));
    point(picture, event);
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => {
    grip = event.button === 0 ? {x: event.clientX, y: event.clientY} : null;
    if (grip && event.pointerType === "mouse" && event.isTrusted) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!grip) return point(picture, event);
    leave();
    pan((grip.x - event.clientX) / (picture.width - picture.left));
    if (event.pointerType === "mouse") window.scrollBy(0, grip.y - event.clientY);
    grip = {x: event.clientX, y: event.clientY};
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { grip = null; });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", reset);
}

const KEYS = {"+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": reset,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), Home: () => pan(-1e9), End: () => pan(1e9)};
window.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.getElementById("in").addEventListener("click", KEYS["+"]);
document.getElementById("out").addEventListener("click", KEYS["-"]);
document.getElementById("all").addEventListener("click", reset);
const refresh = () => { measure(); redraw(); };
window.addEventListener("resize", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
