"use strict";
// Draws the runs of #data one below the other. A view is a width in microseconds, common to all panels, and a start per
// panel, so that the same layer of two runs can stand at the same place.

const data = JSON.parse(document.getElementById("data").textContent);
const text = (i) => data.texts[i];
const short = (label) => label.replace(/^(npu\.npu_|aten\.)/, "");
const [NAME, LABEL, KERNEL, STREAM, START, END, BOUND, ALONE, HBM, L2, CUBE, VECTOR, LIMIT, LAYER, REGION, CRITICAL, MORE] =
  Array.from({ length: 17 }, (_, i) => i);
const LEFT = 92, LANE = 30, GAP = 6, AREA = 24, FETCH = 16, AXIS = 20;
const view = { width: 1, starts: data.runs.map(() => 0) };
const panels = [];
let kept = null;
let wanted = "";

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${name}`).trim() });
};

function layers() {
  const found = new Map();
  data.runs.forEach((run, r) => run.kernels.forEach((k) => {
    if (k[LAYER] < 0) return;
    if (!found.has(k[LAYER])) found.set(k[LAYER], data.runs.map(() => [Infinity, 0]));
    const range = found.get(k[LAYER])[r];
    range[0] = Math.min(range[0], k[START]);
    range[1] = Math.max(range[1], k[END]);
  }));
  return found;
}

function showWhole() {
  view.width = Math.max(...data.runs.map((run) => run.us)) * 1.01 || 1;
  view.starts = data.runs.map(() => 0);
  document.getElementById("layer").value = "";
  draw();
}

function showLayer(number) {
  const ranges = layers().get(number);
  if (!ranges) return showWhole();
  const widths = ranges.map(([a, b]) => (b > a ? b - a : 0));
  view.width = Math.max(...widths) * 1.04 || 1;
  view.starts = ranges.map(([a]) => (Number.isFinite(a) ? a - view.width * 0.015 : 0));
  document.getElementById("layer").value = String(number);
  draw();
}

function zoom(factor, at) {
  const longest = Math.max(...data.runs.map((run) => run.us)) * 1.01;
  const width = Math.min(longest, Math.max(0.5, view.width * factor));
  view.starts = view.starts.map((start) => start + (view.width - width) * at);
  view.width = width;
  draw();
}

function layout(run) {
  const lanes = run.streams.map((name, i) => ({ name, y: AXIS + i * (LANE + GAP) }));
  let y = AXIS + run.streams.length * (LANE + GAP);
  const fetch = run.fetches.length ? y : -1;
  y += run.fetches.length ? FETCH + GAP : 0;
  return { lanes, fetch, areas: [0, 1, 2].map((i) => y + i * (AREA + GAP)), height: y + 3 * (AREA + GAP) };
}

function draw() {
  const colour = colours();
  panels.forEach((panel) => drawPanel(panel, colour));
}

function drawPanel(panel, colour) {
  const { run, canvas, place } = panel;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(place.height * ratio);
  canvas.style.height = `${place.height}px`;
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.font = "12px system-ui, sans-serif";
  c.textBaseline = "middle";
  const start = view.starts[panel.index];
  const x = (t) => LEFT + ((t - start) / view.width) * (width - LEFT);
  const seen = (a, b) => b >= start && a <= start + view.width;
  drawAxis(c, colour, x, start, width, place.height);
  c.save();
  c.beginPath();
  c.rect(LEFT, 0, width - LEFT, place.height);
  c.clip();
  drawAreas(c, colour, run, place, x, start, width);
  for (const [s, a, b, bound] of run.waits) {
    if (!seen(a, b)) continue;
    c.fillStyle = colour[data.bounds[bound]];
    c.fillRect(x(a), place.lanes[s].y + LANE / 2 - 1, Math.max(0.5, x(b) - x(a)), 2);
  }
  run.kernels.forEach((k) => seen(k[START], k[END]) && drawKernel(c, colour, k, place, x));
  for (const [s, , a, b] of run.frames) {
    if (!seen(a, b) || x(b) - x(a) < 8) continue;  // from afar, frames would hide what is in them
    c.strokeStyle = colour.frame;
    c.lineWidth = 1.5;
    c.strokeRect(x(a) - 1, place.lanes[s].y - 2, x(b) - x(a) + 2, LANE + 4);
  }
  for (const [, a, b, size, used] of run.fetches) {
    if (!seen(a, b)) continue;
    c.fillStyle = colour.prefetch;
    c.fillRect(x(a), place.fetch, Math.max(1, x(b) - x(a)), FETCH);
    c.fillStyle = colour.hbm;
    c.fillRect(x(a), place.fetch + FETCH - 4, Math.max(1, x(b) - x(a)) * (size ? used / size : 0), 4);
  }
  c.restore();
  drawNames(c, colour, run, place);
}

// As much of `words` as `room` pixels hold; what is cut off ends in an ellipsis.
function fitting(c, words, room) {
  if (c.measureText(words).width <= room) return words;
  let end = words.length - 1;
  while (end > 1 && c.measureText(words.slice(0, end) + "…").width > room) end -= 1;
  return words.slice(0, end) + "…";
}

function drawKernel(c, colour, k, place, x) {
  const left = x(k[START]), width = Math.max(0.7, x(k[END]) - left), y = place.lanes[k[STREAM]].y;
  const found = wanted && (text(k[LABEL]) + " " + text(k[NAME]) + " " + text(k[KERNEL])).toLowerCase().includes(wanted);
  c.globalAlpha = wanted && !found ? 0.25 : 1;
  c.fillStyle = colour[data.bounds[k[BOUND]]];
  c.fillRect(left, y, width, LANE);
  if (k[CRITICAL]) {
    c.fillStyle = colour.frame;
    c.fillRect(left, y + LANE - 3, width, 3);
  }
  if (kept && kept.kernel === k) {
    c.strokeStyle = colour.event;
    c.lineWidth = 2;
    c.strokeRect(left + 1, y + 1, Math.max(1, width - 2), LANE - 2);
  }
  const from = Math.max(left, LEFT), room = Math.min(left + width, c.canvas.clientWidth) - from - 6;
  if (room > 24) {
    c.fillStyle = colour.text;
    c.fillText(fitting(c, short(text(k[LABEL])), room), from + 4, y + LANE / 2 - 5);
    c.font = "10px system-ui, sans-serif";
    const us = (k[END] - k[START]).toFixed(1);
    const whole = [`${us} ${text(k[LIMIT])}`, us].find((words) => c.measureText(words).width <= room);
    if (whole) c.fillText(whole, from + 4, y + LANE / 2 + 6);
    c.font = "12px system-ui, sans-serif";
  }
  c.globalAlpha = 1;
}

function drawAreas(c, colour, run, place, x, start, width) {
  const steps = run.load;
  const area = (index, top, full, fill) => {
    c.beginPath();
    c.moveTo(LEFT, top + AREA);
    let level = 0;
    for (const step of steps) {
      const at = Math.min(Math.max(x(step[0]), LEFT), width);
      c.lineTo(at, top + AREA - AREA * level);
      level = full ? Math.min(1, step[index] / full) : 0;
      c.lineTo(at, top + AREA - AREA * level);
      if (step[0] > start + view.width) break;
    }
    c.lineTo(width, top + AREA - AREA * level);
    c.lineTo(width, top + AREA);
    c.closePath();
    c.fillStyle = fill;
    c.fill();
  };
  c.globalAlpha = 0.6;
  area(1, place.areas[0], data.machine.cube, colour.cube);
  area(2, place.areas[1], data.machine.vector, colour.vector);
  area(3, place.areas[2], data.machine.hbm, colour.hbm);
  c.globalAlpha = 1;
  area(4, place.areas[2], data.machine.hbm, colour.prefetch);
}

function drawAxis(c, colour, x, start, width, height) {
  const rough = view.width / Math.max(4, (width - LEFT) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  c.strokeStyle = colour.line;
  c.fillStyle = colour.dim;
  c.lineWidth = 1;
  for (let t = Math.max(0, Math.ceil(start / step) * step); t <= start + view.width; t += step) {
    c.beginPath();
    c.moveTo(x(t), AXIS - 4);
    c.lineTo(x(t), height);
    c.stroke();
    const label = `${+t.toFixed(3)} µs`;
    if (x(t) + 3 + c.measureText(label).width <= width) c.fillText(label, x(t) + 3, 8);
  }
}

function drawNames(c, colour, run, place) {
  c.fillStyle = colour.ink;
  place.lanes.forEach(({ name, y }) => c.fillText(fitting(c, name, LEFT - 6), 0, y + LANE / 2));
  if (place.fetch >= 0) c.fillText("prefetch", 0, place.fetch + FETCH / 2);
  c.fillStyle = colour.dim;
  const { cube, vector, hbm } = data.machine;
  const most = [`cube ${cube}`, `vector ${vector}`, `HBM ${(hbm / 1e6).toFixed(2)} TB/s`];
  place.areas.forEach((top, i) => c.fillText(most[i], 0, top + AREA / 2));
  c.strokeStyle = colour.line;
  place.areas.forEach((top) => c.strokeRect(LEFT, top, 1e4, AREA));
}

const bytes = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(2)} MB` : n >= 1e3 ? `${(n / 1e3).toFixed(1)} kB` : `${n} B`);

function describe(k, run) {
  const lines = [
    `${text(k[KERNEL])} in stream ${run.streams[k[STREAM]]}` + (k[LAYER] < 0 ? "" : `, layer ${k[LAYER]}`),
    `${k[START].toFixed(2)} to ${k[END].toFixed(2)} µs: ${(k[END] - k[START]).toFixed(2)} µs (${k[ALONE].toFixed(2)} alone)`,
    `bound by ${data.bounds[k[BOUND]]}; ${k[CUBE]} cube and ${k[VECTOR]} vector cores` +
      (text(k[LIMIT]) ? `, limit ${text(k[LIMIT])}` : ""),
    `HBM ${bytes(k[HBM])}` + (k[L2] ? `, found in L2 ${bytes(k[L2])}` : ""),
  ];
  if (text(k[REGION])) lines.push(`SuperKernel ${text(k[REGION])}`);
  if (k[CRITICAL]) lines.push("on the critical path");
  return [text(k[NAME]), [...lines, text(k[MORE])].filter(Boolean).join("\n")];
}

function under(panel, px, py) {
  const width = panel.canvas.clientWidth;
  const t = view.starts[panel.index] + ((px - LEFT) / (width - LEFT)) * view.width;
  const near = (2 / (width - LEFT)) * view.width;
  const { run, place } = panel;
  if (px < LEFT) return null;
  if (place.fetch >= 0 && py >= place.fetch && py <= place.fetch + FETCH) {
    const f = run.fetches.find((one) => t >= one[1] - near && t <= one[2] + near);
    return f && [`prefetch of ${text(f[0])}`, `${bytes(f[3])} from ${f[1].toFixed(2)} to ${f[2].toFixed(2)} µs after ` +
      `${text(f[5])}; ${bytes(f[4])} used`];
  }
  const lane = place.lanes.findIndex(({ y }) => py >= y && py <= y + LANE);
  if (lane < 0) return null;
  const k = run.kernels.find((one) => one[STREAM] === lane && t >= one[START] - near && t <= one[END] + near);
  if (k) return [...describe(k, run), k];
  const w = run.waits.find((one) => one[0] === lane && t >= one[1] && t <= one[2]);
  return w && [`waiting: ${data.bounds[w[3]]}`, `${text(w[4])} waits ${(w[2] - w[1]).toFixed(2)} µs`];
}

const card = document.getElementById("card");

function showCard(found, x, y) {
  card.hidden = !found;
  if (!found) return;
  card.replaceChildren(Object.assign(document.createElement("b"), { textContent: found[0] }), found[1]);
  const room = document.documentElement.clientWidth - card.offsetWidth - 8;
  card.style.left = `${Math.max(4, Math.min(x + 14, room))}px`;
  card.style.top = `${y + 16}px`;
}

function keep(panel, kernel) {
  kept = { panel, kernel };
  const box = panel.canvas.getBoundingClientRect();
  const width = panel.canvas.clientWidth;
  const x = LEFT + ((kernel[START] - view.starts[panel.index]) / view.width) * (width - LEFT);
  showCard(describe(kernel, panel.run), box.left + window.scrollX + Math.min(Math.max(x, 0), width),
    box.top + window.scrollY + panel.place.lanes[kernel[STREAM]].y + LANE);
  history.replaceState(null, "", `#${new URLSearchParams({ run: panel.run.name, kernel: text(kernel[NAME]) })}`);
  draw();
}

function addPanel(run, index) {
  const head = document.createElement("h3");
  const note = document.createElement("span");
  note.textContent = ` ${run.us.toFixed(1)} µs on the device, ${run.kernels.length} kernels, ${run.streams.length} ` +
    `stream${run.streams.length > 1 ? "s" : ""}`;
  head.append(run.name, note);
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `timeline of ${run.name}`);
  document.getElementById("panels").append(head, canvas);
  const panel = { run, index, canvas, place: layout(run) };
  panels.push(panel);
  let drag = null;
  canvas.addEventListener("pointerdown", (e) => {
    drag = { x: e.clientX, starts: [...view.starts], moved: false };
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", (e) => {
    if (drag) {
      const by = ((e.clientX - drag.x) / (canvas.clientWidth - LEFT)) * view.width;
      drag.moved ||= Math.abs(e.clientX - drag.x) > 3;
      view.starts = drag.starts.map((s) => s - by);
      return draw();
    }
    if (!kept) showCard(under(panel, e.offsetX, e.offsetY), e.pageX, e.pageY);
  });
  canvas.addEventListener("pointerup", (e) => {
    const clicked = drag && !drag.moved;
    drag = null;
    if (!clicked) return;
    const found = under(panel, e.offsetX, e.offsetY);
    if (found && found[2] && !(kept && kept.kernel === found[2])) return keep(panel, found[2]);
    kept = null;
    history.replaceState(null, "", location.pathname + location.search);
    showCard(found, e.pageX, e.pageY);
    draw();
  });
  canvas.addEventListener("pointerleave", () => kept || showCard(null));
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const at = Math.max(0, (e.offsetX - LEFT) / (canvas.clientWidth - LEFT));
    zoom(e.deltaY > 0 ? 1.25 : 0.8, at);
  }, { passive: false });
}

function addControls() {
  const select = document.getElementById("layer");
  select.append(new Option("all", ""));
  [...layers().keys()].sort((a, b) => a - b).forEach((n) => select.append(new Option(String(n), String(n))));
  select.addEventListener("change", () => (select.value === "" ? showWhole() : showLayer(Number(select.value))));
  document.getElementById("whole-step").addEventListener("click", showWhole);
  document.getElementById("in").addEventListener("click", () => zoom(0.6, 0.5));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 0.6, 0.5));
  document.getElementById("find").addEventListener("input", (e) => {
    wanted = e.target.value.trim().toLowerCase();
    draw();
  });
  document.getElementById("legend").replaceChildren(...data.bounds.map((name) => {
    const item = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = `var(--${name})`;
    item.append(box, { event: "wait for a stream", cores: "wait for cores", launch: "start", link: "links", hbm: "HBM",
      l2: "L2" }[name] || name);
    return item;
  }));
}

function open() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const numbers = [...layers().keys()].sort((a, b) => a - b);
  if (asked.has("whole") || !numbers.length) showWhole();
  else showLayer(asked.has("layer") ? Number(asked.get("layer")) : numbers[Math.floor(numbers.length / 2)]);
  if (!asked.has("kernel")) return;
  const panel = panels.find((p) => p.run.name === asked.get("run")) || panels[panels.length - 1];
  const kernel = panel.run.kernels.find((k) => text(k[NAME]) === asked.get("kernel"));
  if (!kernel) return;
  if (kernel[LAYER] >= 0) showLayer(kernel[LAYER]);
  keep(panel, kernel);
}

data.runs.forEach(addPanel);
addControls();
open();
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
