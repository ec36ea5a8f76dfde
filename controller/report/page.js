// The curves: drawn from the numbers in #data, as texts and attributes only, so that no name can become markup.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 8, DASHES = 3, HEIGHT = 340, EDGE = { top: 12, right: 16, bottom: 40, left: 62 };
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const chart = byId("chart"), chosen = byId("metric"), log = byId("log"), slider = byId("step");
  const boxes = [...document.querySelectorAll("#lines input")];
  const cells = boxes.map((box) => [...box.closest("tr").querySelectorAll("td")]);
  let now = null; // what is drawn: {steps, x, y, lines, cross}

  const shown = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const text = size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace("-", "−");
  };

  const make = (parent, tag, attributes, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  };

  // Round numbers between two values: 1, 2 or 5 times a power of ten apart, or `least`; of logarithms whole powers.
  const ticks = (low, high, most, least, ofLogs) => {
    if (ofLogs) {
      const first = Math.floor(low), last = Math.ceil(high), by = Math.max(1, Math.ceil((last - first) / most));
      const found = [];
      for (let power = first; power <= last; power += by) found.push(power);
      return found.filter((power) => power >= low - 1e-9 && power <= high + 1e-9);
    }
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const by = Math.max(least, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
    const found = [];
    for (let i = Math.ceil(low / by - 1e-9); i * by <= high + by * 1e-9; i++) found.push(i * by);
    return found;
  };

  const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

  // The curves of the chosen metric, with their steps; on a logarithmic axis what is not positive is left out.
  const linesOf = (metric) => metric.lines.map((line) => {
    if (!line) return null;
    const value = (v) => (v === null || (log.checked && v <= 0) ? null : log.checked ? Math.log10(v) : v);
    const mean = line.m.map(value);
    return { steps: data.grids[line.x], told: line, mean, low: line.l?.map(value), high: line.h?.map(value) };
  });

  const extent = (values) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) return null;
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - pad, high + pad];
  };

  const path = (steps, values, x, y) => {
    let text = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      text += `${pen}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    return text;
  };

  // One closed shape for each stretch without a gap.
  const band = (line, x, y) => {
    let text = "", from = 0;
    const close = (to) => {
      const part = [...Array(to - from).keys()].map((i) => from + i);
      const up = part.map((i) => `${x(line.steps[i]).toFixed(1)} ${y(line.high[i]).toFixed(1)}`);
      const down = part.reverse().map((i) => `${x(line.steps[i]).toFixed(1)} ${y(line.low[i]).toFixed(1)}`);
      if (part.length > 1) text += `M${[...up, ...down].join("L")}Z`;
    };
    line.low.forEach((value, i) => {
      if (value === null || line.high[i] === null) { close(i); from = i + 1; }
    });
    close(line.low.length);
    return text;
  };

  const axes = (svg, metric, width, x, y, xs, ys) => {
    const right = width - EDGE.right, bottom = HEIGHT - EDGE.bottom;
    for (const tick of ticks(...ys, 5, 0, log.checked)) {
      make(svg, "line", { class: "grid", x1: EDGE.left, x2: right, y1: y(tick), y2: y(tick) });
      const text = shown(log.checked ? 10 ** tick : tick);
      make(svg, "text", { class: "tick", x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, text);
    }
    for (const tick of ticks(...xs, Math.max(2, Math.floor(width / 110)), 1, false)) {
      make(svg, "text", { class: "tick", x: x(tick), y: bottom + 18, "text-anchor": "middle" }, shown(tick));
    }
    make(svg, "line", { class: "axis", x1: EDGE.left, x2: right, y1: bottom, y2: bottom });
    make(svg, "text", { class: "tick", x: right, y: bottom + 34, "text-anchor": "end" }, "step");
  };

  const draw = () => {
    const metric = data.metrics[chosen.value];
    const lines = linesOf(metric), seen = lines.filter((line, i) => line && boxes[i].checked);
    const ys = extent(seen.flatMap((line) => [...line.mean, ...(line.low ?? []), ...(line.high ?? [])]));
    chart.replaceChildren();
    byId("nothing").hidden = ys !== null;
    slider.disabled = ys === null;
    now = null;
    if (ys === null) { readout(); return; }
    const steps = [...new Set(seen.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const width = Math.max(280, chart.clientWidth);
    const xs = steps.length > 1 ? [steps[0], steps[steps.length - 1]] : [steps[0] - 1, steps[0] + 1];
    const x = scale(...xs, EDGE.left, width - EDGE.right), y = scale(...ys, HEIGHT - EDGE.bottom, EDGE.top);
    const label = `${metric.name} by step; the table below has the values at a chosen step`;
    const svg = make(chart, "svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
    axes(svg, metric, width, x, y, xs, ys);
    const drawn = lines.map((line, i) => [line, i]).filter(([line, i]) => line && boxes[i].checked);
    const colour = (i) => `l${i % COLOURS} dash${Math.floor(i / COLOURS) % DASHES}`;
    for (const [line, i] of drawn) {
      if (line.low) make(svg, "path", { class: `band ${colour(i)}`, d: band(line, x, y) });
    }
    for (const [line, i] of drawn) {
      make(svg, "path", { class: `line ${colour(i)}`, d: path(line.steps, line.mean, x, y) });
      if (line.steps.length < 16) {
        line.mean.forEach((value, j) => value === null ||
          make(svg, "circle", { class: `dot ${colour(i)}`, cx: x(line.steps[j]), cy: y(value), r: 2.5 }));
      }
    }
    const cross = make(svg, "line", { class: "cross", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    const atEnd = slider.value === slider.max;
    slider.max = steps.length - 1;
    if (atEnd) slider.value = slider.max;
    now = { svg, steps, x, lines, cross, width };
    svg.addEventListener("pointermove", point);
    readout();
  };

  // The step under the pointer.
  const point = (event) => {
    const box = now.svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * now.width;
    let best = 0;
    now.steps.forEach((step, i) => {
      if (Math.abs(now.x(step) - at) < Math.abs(now.x(now.steps[best]) - at)) best = i;
    });
    slider.value = best;
    readout();
  };

  // The values of all lines at the chosen step, or the last ones before it.
  const readout = () => {
    const step = now ? now.steps[Number(slider.value)] : null;
    byId("at").textContent = shown(step);
    slider.setAttribute("aria-valuetext", `step ${shown(step)}`);
    if (now) for (const end of ["x1", "x2"]) now.cross.setAttribute(end, now.x(step));
    cells.forEach(([mean, range], i) => {
      const line = now?.lines[i], before = line ? line.steps.filter((one) => one <= step).length - 1 : -1;
      mean.textContent = shown(before < 0 ? null : line.told.m[before]);
      const has = before >= 0 && line.told.l && line.told.l[before] !== null;
      range.textContent = has ? `${shown(line.told.l[before])} to ${shown(line.told.h[before])}` : "–";
    });
  };

  const choose = () => {
    for (const table of document.querySelectorAll("[data-metric]")) {
      table.hidden = table.dataset.metric !== chosen.value;
    }
    slider.value = slider.max;
    draw();
  };

  if (!data.metrics.length) return;
  chosen.addEventListener("change", choose);
  log.addEventListener("change", draw);
  slider.addEventListener("input", readout);
  for (const box of boxes) box.addEventListener("change", draw);
  new ResizeObserver(() => { if (!now || Math.abs(now.width - chart.clientWidth) > 1) draw(); }).observe(chart);
  choose();
})();
