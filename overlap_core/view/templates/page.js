"use strict";
// Drawing and moving about. Text from reports only ever becomes text nodes and canvas text.

(() => {
  const LABELS = 150;
  const MARKS = { launch: 3, wait: 2 }; // pixels, where they take no time
  const ON_TOP = ["exposed", "launch"];
  const data = JSON.parse(document.getElementById("data").textContent);
  const { rows, height: contentHeight } = Lanes.layOut(data);
  const total = Math.max(1, ...data.ranks.flatMap((rank) => rank.orders.map((o) => o.total)));
  const element = (id) => document.getElementById(id);
  const canvas = element("timeline");
  const pen = canvas.getContext("2d");
  const tip = element("tip");
  const state = { start: 0, end: total, top: 0, hits: [], hit: -1, hover: null, chosen: null };
  let colours = {};
  let width = 0;
  let height = 0;
  let pending = false;

  // ---- time, and where it lies

  const plot = () => Math.max(1, width - LABELS);
  const scale = () => plot() / (state.end - state.start);
  const toX = (time) => LABELS + (time - state.start) * scale();
  const toTime = (x) => state.start + (x - LABELS) / scale();

  function format(ns) {
    const [value, unit] = ns >= 1e6 ? [ns / 1e6, "ms"] : ns >= 1e3 ? [ns / 1e3, "µs"] : [ns, "ns"];
    return `${value.toLocaleString("en", { maximumFractionDigits: 2 })} ${unit}`;
  }

  function formatBytes(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), units.length - 1);
    const value = (bytes / 1024 ** power).toLocaleString("en", { maximumFractionDigits: 1 });
    return `${value} ${units[power]}`;
  }

  function show(start, end) {
    const span = Math.min(total * 1.02, Math.max(end - start, 10));
    const low = -total * 0.01;
    state.start = Math.max(low, Math.min(start, total * 1.01 - span));
    state.end = state.start + span;
    element("range").textContent = `${format(Math.max(0, state.start))} – ${format(state.end)}`;
    redraw();
  }

  function zoom(factor, time = (state.start + state.end) / 2) {
    const span = Math.min(total * 1.02, Math.max((state.end - state.start) * factor, 10));
    const share = (time - state.start) / (state.end - state.start);
    show(time - share * span, time - share * span + span);
  }

  function pan(fraction) {
    const by = (state.end - state.start) * fraction;
    show(state.start + by, state.end + by);
  }

  function scroll(by) {
    state.top = Math.max(0, Math.min(state.top + by, contentHeight + Lanes.RULER - height));
    redraw();
  }

  const fit = () => show(-total * 0.01, total * 1.01);

  // ---- drawing

  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      draw();
    });
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["page", "text", "faint", "line", "band", "mark", "memory", ...data.kinds.map((k) => k.name)];
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    redraw();
  }

  function resize() {
    const ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    scroll(0);
  }

  function draw() {
    pen.fillStyle = colours.page;
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ticks = drawGrid();
    let drawn = 0;
    for (const row of rows) {
      const y = row.y + Lanes.RULER - state.top;
      if (y > height || y + row.height < Lanes.RULER) continue;
      if (row.head) drawHead(row, y);
      else if (row.steps) drawSteps(row, y);
      else drawn += drawLane(row, y);
    }
    drawRuler(ticks);
    canvas.dataset.blocks = drawn;
  }

  function step() {
    const rough = (state.end - state.start) / Math.max(2, plot() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  }

  function drawGrid() {
    const ticks = [];
    const by = step();
    pen.fillStyle = colours.line;
    for (let time = Math.max(0, Math.ceil(state.start / by) * by); time <= state.end; time += by) {
      ticks.push(time);
      pen.fillRect(Math.round(toX(time)), Lanes.RULER, 1, height);
    }
    return ticks;
  }

  function drawRuler(ticks) {
    pen.fillStyle = colours.page;
    pen.fillRect(0, 0, width, Lanes.RULER);
    pen.fillStyle = colours.line;
    pen.fillRect(0, Lanes.RULER - 1, width, 1);
    pen.fillStyle = colours.faint;
    for (const time of ticks) {
      if (toX(time) >= LABELS - 1) pen.fillText(format(time), toX(time) + 3, Lanes.RULER / 2);
    }
  }

  function drawHead(row, y) {
    const { rank, order } = row;
    pen.fillStyle = colours.band;
    pen.fillRect(0, y, width, row.height - 3);
    pen.fillStyle = colours.text;
    const sum = `${format(order.total)}, of which ${format(order.exposed)} exposed`;
    pen.fillText(`${rank.label} ${order.label}: ${sum}`, 8, y + row.height / 2 - 1);
  }

  // A row's drawing, cut off at the edges of the plot, and its label.
  function drawRow(row, y, label, draw) {
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, y, plot(), row.height);
    pen.clip();
    draw();
    pen.restore();
    pen.fillStyle = colours.faint;
    pen.fillText(shorten(label, LABELS - 20), 14, y + row.height / 2);
  }

  function drawLane(row, y) {
    let drawn = 0;
    drawRow(row, y, row.lane.label, () => {
      // Exposed time and launches come last, so that nothing is painted over them.
      drawn += drawBlocks(row, y, (kind) => !ON_TOP.includes(kind));
      drawn += drawBlocks(row, y, (kind) => ON_TOP.includes(kind));
    });
    return drawn;
  }

  // Rows share one scale, so that heights can be compared.
  function drawSteps(row, y) {
    const { steps } = row;
    const most = formatBytes(Math.max(0, ...steps.bytes));
    drawRow(row, y, `in flight, most ${most}`, () => {
      pen.fillStyle = colours.line;
      pen.fillRect(LABELS, y + row.height - 1, plot(), 1);
      pen.fillStyle = colours.memory;
      for (let i = Lanes.firstFrom(steps, state.start); i < steps.count; i++) {
        if (steps.starts[i] > state.end) break;
        const tall = (row.height * steps.bytes[i]) / Math.max(1, data.memory.most);
        const x = toX(steps.starts[i]);
        pen.fillRect(x, y + row.height - tall, toX(steps.ends[i]) - x, tall);
      }
    });
  }

  function drawBlocks(row, y, wanted) {
    const { lane } = row;
    const chosen = state.chosen && state.chosen.row.rank === row.rank ? state.chosen.node : -1;
    let drawn = 0;
    let done = -Infinity;
    const column = { pixel: -1, kind: "", x: 0, wide: 0 };
    for (let i = Lanes.firstFrom(lane, state.start); i < lane.count; i++) {
      if (lane.starts[i] > state.end) break;
      const kind = data.kinds[lane.kinds[i]].name;
      if (!wanted(kind)) continue;
      const isMark = kind in MARKS && lane.ends[i] === lane.starts[i];
      const isChosen = lane.nodes[i] === chosen;
      const x = toX(lane.starts[i]);
      const real = toX(lane.ends[i]) - x;
      // Alone a block is never too small to be seen; close together they keep their true share.
      const isAlone = x - done > 4;
      const wide = isMark ? (isAlone ? MARKS[kind] : 1) : isAlone ? Math.max(1, real) : real;
      if (!isChosen && (isMark ? x < done - 0.5 : real === 0)) continue;
      // Many blocks of one colour in one pixel are painted as one, of their width together.
      const pixel = Math.floor(x);
      if (!isMark && !isChosen && real < 1 && pixel === column.pixel && kind === column.kind) {
        column.wide += real;
        continue;
      }
      paintColumn(row, y, column);
      if (!isMark && !isChosen && wide < 1) {
        Object.assign(column, { pixel, kind, x, wide });
        done = x + wide;
        drawn++;
        continue;
      }
      done = x + wide;
      drawn++;
      pen.fillStyle = colours[kind];
      const low = isMark && kind === "wait" ? row.height / 2 : 0;
      pen.fillRect(x, y + low, wide > 3 ? wide - 0.5 : wide, row.height - low);
      if (wide > 34 && !isMark) drawName(row, i, Math.max(x, LABELS), x + wide, y);
      if (isChosen) drawFrame(x, y, wide, row.height);
    }
    paintColumn(row, y, column);
    return drawn;
  }

  function paintColumn(row, y, column) {
    if (!column.wide) return;
    pen.fillStyle = colours[column.kind];
    pen.fillRect(column.x, y, Math.min(column.wide, 1), row.height);
    column.wide = 0;
    column.pixel = -1;
  }

  function drawName(row, i, left, right, y) {
    const name = row.rank.nodes[row.lane.nodes[i]].node;
    const kind = data.kinds[row.lane.kinds[i]].name;
    pen.fillStyle = ["exposed", "gather"].includes(kind) ? "#ffffff" : "#101010";
    const text = shorten(name, Math.min(right, width) - left - 8);
    if (text) pen.fillText(text, left + 4, y + row.height / 2 + 0.5);
  }

  function drawFrame(x, y, wide, tall) {
    pen.strokeStyle = colours.mark;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y + 1, Math.max(4, wide + 1), tall - 2);
  }

  function shorten(text, room) {
    if (room < 14) return "";
    if (pen.measureText(text).width <= room) return text;
    let keep = Math.floor((text.length * room) / pen.measureText(text).width);
    while (keep > 0 && pen.measureText(`${text.slice(0, keep)}…`).width > room) keep--;
    return keep > 1 ? `${text.slice(0, keep)}…` : "";
  }

  // ---- what is known of a block

  function describe(row, i) {
    const { lane, rank, order } = row;
    const node = rank.nodes[lane.nodes[i]];
    const facts = document.createElement("div");
    facts.className = "facts";
    const add = (name, value) => {
      const fact = document.createElement("div");
      const shown = document.createElement("span");
      shown.textContent = value === null ? "unknown" : String(value);
      fact.append(`${name} `, shown);
      facts.append(fact);
    };
    add("at", format(lane.starts[i]));
    if (lane.ends[i] > lane.starts[i]) add("for", format(lane.ends[i] - lane.starts[i]));
    for (const [name, value] of Object.entries(node)) {
      if (!["node", "why"].includes(name)) add(name, value);
    }
    if ("why" in node) add("why", node.why);
    const title = document.createElement("div");
    title.className = "title";
    const words = data.kinds[lane.kinds[i]].words;
    title.textContent = `${node.node}: ${words}, ${rank.label} ${order.label}`;
    return [title, facts];
  }

  function describeBytes({ row, x }) {
    const time = Math.max(0, toTime(x));
    const bytes = formatBytes(Lanes.bytesAt(row.steps, time));
    const title = document.createElement("div");
    title.className = "title";
    title.textContent = `${bytes} of ${data.memory.words}, ${row.rank.label} ${row.order.label}`;
    const when = document.createElement("div");
    when.textContent = `at ${format(time)}`;
    return [title, when];
  }

  function blockUnder(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top + state.top - Lanes.RULER;
    if (x < LABELS || event.clientY - box.top < Lanes.RULER) return null;
    const row = rows.find((r) => !r.head && y >= r.y && y <= r.y + r.height);
    if (!row) return null;
    if (row.steps) return { row, i: -1, x, y: event.clientY - box.top };
    const i = Lanes.blockAt(row.lane, toTime(x), 4 / scale());
    return i < 0 ? null : { row, i, x, y: event.clientY - box.top };
  }

  function hover(event) {
    const under = blockUnder(event);
    tip.hidden = !under;
    if (!under) return;
    tip.replaceChildren(...(under.row.steps ? describeBytes(under) : describe(under.row, under.i)));
    const left = Math.min(under.x + 14, width - tip.offsetWidth - 4);
    const below = under.y + 16;
    const fits = below + tip.offsetHeight < height;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${fits ? below : Math.max(4, under.y - tip.offsetHeight - 10)}px`;
  }

  function choose(row, i) {
    state.chosen = { row, node: row.lane.nodes[i] };
    element("details").replaceChildren(...describe(row, i));
    redraw();
  }

  // ---- finding

  function find() {
    const text = element("search").value.trim();
    state.hits = text ? Lanes.search(rows, text) : [];
    state.hit = -1;
    if (state.hits.length) jump(1);
    else {
      state.chosen = null;
      element("found").textContent = text ? "not found" : "";
      redraw();
    }
  }

  function jump(by) {
    if (!state.hits.length) return;
    const count = state.hits.length;
    state.hit = state.hit < 0 ? 0 : (state.hit + by + count) % count;
    const { row, i } = state.hits[state.hit];
    element("found").textContent = `${state.hit + 1} of ${count}`;
    const [start, end] = [row.lane.starts[i], row.lane.ends[i]];
    const span = Math.max((end - start) * 12, Math.min(total / 40, state.end - state.start));
    show((start + end - span) / 2, (start + end + span) / 2);
    const seen = height - Lanes.RULER - row.height;
    if (row.y < state.top || row.y > state.top + seen) {
      state.top = 0;
      scroll(row.y - seen / 2);
    }
    choose(row, i);
  }

  // ---- hands on mouse and keys

  const drag = { from: null, moved: false };

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / plot());
    } else {
      const box = canvas.getBoundingClientRect();
      zoom(Math.exp(event.deltaY * 0.0015), toTime(Math.max(LABELS, event.clientX - box.left)));
    }
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag.from = { x: event.clientX, y: event.clientY };
    drag.moved = false;
  });

  canvas.addEventListener("pointermove", (event) => {
    if (!drag.from) {
      hover(event);
      return;
    }
    const by = { x: event.clientX - drag.from.x, y: event.clientY - drag.from.y };
    if (!drag.moved && Math.hypot(by.x, by.y) < 4) return;
    drag.moved = true;
    tip.hidden = true;
    drag.from = { x: event.clientX, y: event.clientY };
    pan(-by.x / plot());
    scroll(-by.y);
  });

  canvas.addEventListener("pointerup", (event) => {
    const under = drag.moved ? null : blockUnder(event);
    drag.from = null;
    if (under && under.row.lane) choose(under.row, under.i);
  });

  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });

  const KEYS = {
    "+": () => zoom(1 / 1.5),
    "=": () => zoom(1 / 1.5),
    "-": () => zoom(1.5),
    0: fit,
    Home: fit,
    ArrowLeft: () => pan(-0.15),
    ArrowRight: () => pan(0.15),
    ArrowUp: () => scroll(-60),
    ArrowDown: () => scroll(60),
    PageUp: () => scroll(-height * 0.8),
    PageDown: () => scroll(height * 0.8),
    "/": () => element("search").focus(),
  };

  document.addEventListener("keydown", (event) => {
    if (event.target === element("search") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  element("search").addEventListener("input", find);
  element("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") jump(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") canvas.focus();
  });
  element("next").addEventListener("click", () => jump(1));
  element("previous").addEventListener("click", () => jump(-1));
  element("zoom-in").addEventListener("click", KEYS["+"]);
  element("zoom-out").addEventListener("click", KEYS["-"]);
  element("fit").addEventListener("click", fit);
  window.addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);

  resize();
  readColours();
  fit();
})();
