// Line charts over steps or layers, and dots with intervals.

function lineChart(figure, view, state, width, theme) {
  const lines = view.lines.filter((line) => !state.hidden.has(lineKey(line)));
  const height = Math.round(Math.max(220, Math.min(380, width * 0.5)));
  const smooth = (line) => (figure.smooth && state.smoothing > 0 ? smoothed(line.y, state.smoothing) : line.y);
  const inside = (x) => !state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]);

  const xDomain = state.zoom || extent(lines.flatMap((line) => line.x));
  const values = lines.flatMap((line) => {
    const y = smooth(line);
    const all = y.filter((_, k) => inside(line.x[k]));
    const spread = !(figure.smooth && state.smoothing > 0) && line.low && !line.thin;
    return spread ? all.concat(line.low.filter((_, k) => inside(line.x[k])), line.high.filter((_, k) => inside(line.x[k]))) : all;
  });
  const log = state.log && extent(values)[0] > 0;
  let yDomain = extent(values);
  if (log) yDomain = [yDomain[0] / 1.08, yDomain[1] * 1.08];
  else if (figure.zero && yDomain[0] >= 0) yDomain = [0, yDomain[1] * 1.06 || 1];
  else yDomain = padded(yDomain, 0.06);

  const sample = (log ? logarithmic : linear)(yDomain, [0, 1]).ticks(6).map((tick) => shown(tick));
  const left = 30 + Math.max(16, ...sample.map((text) => textWidth(text, 11, 400)));
  const frame = { left, right: width - 14, top: 10, bottom: height - 40 };
  const x = linear(figure.whole ? padded(xDomain, 0.02) : xDomain, [frame.left, frame.right]);
  const y = (log ? logarithmic : linear)(yDomain, [frame.bottom, frame.top]);

  const root = canvas(width, height, theme, `${figure.title}, ${view.name}`);
  for (const tick of y.ticks(6)) {
    root.append(svg("line", { x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick), stroke: theme.grid }));
    axisLabel(root, shown(tick), frame.left - 8, y(tick) + 4, theme, { "text-anchor": "end" });
  }
  const ticks = x.ticks(Math.max(3, Math.floor(width / 110))).filter((tick) => !figure.whole || Number.isInteger(tick));
  for (const tick of ticks) {
    if (tick < xDomain[0] || tick > xDomain[1]) continue;
    root.append(svg("line", { x1: x(tick), x2: x(tick), y1: frame.bottom, y2: frame.bottom + 4, stroke: theme.axis }));
    axisLabel(root, shown(tick), x(tick), frame.bottom + 17, theme, { "text-anchor": "middle" });
  }
  root.append(svg("line", { x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom, stroke: theme.axis }));
  axisLabel(root, figure.x, (frame.left + frame.right) / 2, height - 6, theme, { "text-anchor": "middle" });
  axisLabel(root, view.y, 11, (frame.top + frame.bottom) / 2, theme, {
    "text-anchor": "middle", transform: `rotate(-90 11 ${(frame.top + frame.bottom) / 2})` });

  const clip = `clip-${figure.key}-${Math.random().toString(36).slice(2)}`;
  const defs = svg("defs");
  const shape = svg("clipPath", { id: clip });
  shape.append(svg("rect", { x: frame.left - 4, y: frame.top - 4, width: frame.right - frame.left + 8, height: frame.bottom - frame.top + 8 }));
  defs.append(shape);
  const plot = svg("g", { "clip-path": `url(#${clip})`, fill: "none" });
  root.append(defs, plot);

  const point = (line, series, k) => (series[k] === null || (log && series[k] <= 0) ? null : [x(line.x[k]), y(series[k])]);
  const path = (line, series) => {
    let text = "", pen = false;
    series.forEach((_, k) => {
      const place = point(line, series, k);
      if (place) text += `${pen ? "L" : "M"}${place[0].toFixed(1)} ${place[1].toFixed(1)}`;
      pen = Boolean(place);
    });
    return text;
  };
  const draw = (line, series, more) => plot.append(svg("path", {
    d: path(line, series), stroke: colourOf(line, theme), "stroke-linejoin": "round", "stroke-dasharray": dashOf(line) || undefined, ...more }));
  const isSmooth = figure.smooth && state.smoothing > 0;
  for (const line of lines) {
    if (line.low && !line.thin && !isSmooth) plot.append(band(line, point, colourOf(line, theme)));
    if (line.thin) draw(line, smooth(line), { "stroke-width": 1, opacity: 0.35, "stroke-dasharray": undefined });
    else if (isSmooth) draw(line, line.y, { "stroke-width": 1, opacity: 0.2, "stroke-dasharray": undefined });
  }
  for (const line of lines) {
    if (line.thin) continue;
    const series = smooth(line);
    draw(line, series, { "stroke-width": 2 });
    if (line.x.length <= 40)
      series.forEach((_, k) => {
        const place = point(line, series, k);
        if (place) plot.append(svg("circle", { cx: place[0], cy: place[1], r: 3, fill: colourOf(line, theme) }));
      });
  }
  if (!lines.length) axisLabel(root, "all lines are hidden", (frame.left + frame.right) / 2, height / 2, theme, { "text-anchor": "middle" });

  const cursor = svg("g", { "pointer-events": "none" });
  root.append(cursor);
  const main = lines.filter((line) => !line.thin);
  const places = [...new Set(main.flatMap((line) => line.x))].filter(inside).sort((a, b) => a - b);
  return {
    root, frame, x,
    places: places.length,
    nearest(px) {
      const target = x.invert(px);
      let best = 0;
      places.forEach((place, k) => { if (Math.abs(place - target) < Math.abs(places[best] - target)) best = k; });
      return best;
    },
    // Marks a position and returns the values there.
    point(index) {
      const place = places[index];
      cursor.replaceChildren(svg("line", { x1: x(place), x2: x(place), y1: frame.top, y2: frame.bottom, stroke: theme.axis, "stroke-dasharray": "3 3" }));
      const rows = [];
      for (const line of main) {
        const k = closest(line.x, place);
        if (Math.abs(line.x[k] - place) > (xDomain[1] - xDomain[0]) / 40) continue;
        const series = smooth(line), where = point(line, series, k);
        if (where) cursor.append(svg("circle", { cx: where[0], cy: where[1], r: 4, fill: colourOf(line, theme), stroke: theme.ground, "stroke-width": 1.5 }));
        rows.push({ name: line.name, value: shown(series[k]), colour: colourOf(line, theme), size: series[k] });
      }
      rows.sort((a, b) => (b.size ?? -Infinity) - (a.size ?? -Infinity));
      const left = figure.whole ? `layer ${place}` : figure.x === "step" ? `step ${shown(place)}` : `${figure.x.split(" ")[0]} = ${shown(place)}`;
      return { title: left, rows, at: [x(place), (frame.top + frame.bottom) / 2] };
    },
    clear: () => cursor.replaceChildren(),
    csv: () => [["line", figure.x, view.y, "lowest", "highest"],
      ...view.lines.flatMap((line) => line.x.map((value, k) => [line.name, value, line.y[k], line.low?.[k], line.high?.[k]]))],
  };
}

function lineKey(line) {
  return line.group === undefined ? `c${line.colour}` : `g${line.group}`;
}

function band(line, point, colour) {
  const up = [], down = [];
  line.x.forEach((_, k) => {
    const high = point(line, line.high, k), low = point(line, line.low, k);
    if (high && low) { up.push(high); down.unshift(low); }
  });
  const text = up.concat(down).map(([px, py], k) => `${k ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  return svg("path", { d: text && text + "Z", fill: colour, opacity: 0.15 });
}

// Exponential smoothing with bias correction.
function smoothed(values, amount) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

function closest(sorted, target) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(sorted[low - 1] - target) <= Math.abs(sorted[low] - target) ? low - 1 : low;
}

function signed(value, digits) {
  return (value > 0 ? "+" : "") + value.toFixed(digits).replace("-", "−");
}

// Dots with 95 % intervals and a line at zero. Names and values have their own columns on a wide screen and their own
// lines on a narrow one, so that neither the zero line nor an interval crosses them.
function forestChart(figure, view, state, width, theme) {
  const narrow = width < 560, step = narrow ? 64 : 34, height = 30 + step * view.rows.length + 44;
  const root = canvas(width, height, theme, `${figure.title}, ${view.name}`);
  const texts = view.rows.map((row) => {
    const half = row.low === null ? null : (row.high - row.low) / 2;
    const value = signed(row.mean, view.digits) + (half === null ? "" : ` ± ${half.toFixed(view.digits)}`);
    return `${value}  (${row.seeds === 1 ? "1 seed, no interval" : `${row.seeds} seeds`})`;
  });
  const names = narrow ? width - 24 : Math.min(width * 0.3, Math.max(60, ...view.rows.map((row) => textWidth(row.name))));
  const values = Math.max(...texts.map((text) => textWidth(text, 12, 400)));
  const left = narrow ? 16 : 16 + names + 24, right = narrow ? width - 16 : width - 16 - values - 24;
  const ends = extent(view.rows.flatMap((row) => [row.mean, row.low, row.high, 0]));
  const x = linear(padded(ends, 0.08), [left, right]);
  const bottom = height - 40;
  const vertical = (value, look) => {
    if (!narrow) root.append(svg("line", { x1: x(value), x2: x(value), y1: 20, y2: bottom, ...look }));
    else view.rows.forEach((_, k) => root.append(svg("line", { x1: x(value), x2: x(value), y1: 62 + step * k, y2: 92 + step * k, ...look })));
  };
  for (const tick of x.ticks(Math.max(3, Math.floor((right - left) / 120)))) {
    vertical(tick, { stroke: theme.grid });
    axisLabel(root, shown(tick), x(tick), bottom + 16, theme, { "text-anchor": "middle" });
  }
  vertical(0, { stroke: theme.ink, "stroke-width": 1.2, class: "zero" });
  axisLabel(root, "softmax", x(0), 14, theme, { "text-anchor": "middle" });
  axisLabel(root, `${view.x} (${view.better} is better)`, (left + right) / 2, height - 6, theme, { "text-anchor": "middle" });
  const marks = view.rows.map((row, k) => {
    const top = 28 + step * k, middle = top + (narrow ? 48 : step / 2), colour = colourOf(row, theme);
    const interval = row.low !== null;
    root.append(svg("text", { x: 16, y: narrow ? top + 12 : middle + 4, "font-weight": 600, class: "row-name" }, fitted(row.name, names)));
    root.append(svg("text", { x: narrow ? 16 : width - 16, y: narrow ? top + 28 : middle + 4, "text-anchor": narrow ? "start" : "end", fill: theme.muted, class: "row-value" }, texts[k]));
    if (interval) root.append(svg("line", { x1: x(row.low), x2: x(row.high), y1: middle, y2: middle, stroke: colour, "stroke-width": 3, "stroke-linecap": "round", opacity: 0.6 }));
    root.append(svg("circle", { cx: x(row.mean), cy: middle, r: 5.5, fill: interval ? colour : theme.ground, stroke: colour, "stroke-width": 2 }));
    const rows = [{ name: "mean difference", value: shown(row.mean), colour }];
    if (interval) rows.push({ name: "95 % interval", value: `${shown(row.low)} to ${shown(row.high)}` });
    rows.push({ name: "seeds", value: String(row.seeds) });
    return { x: 0, y: top, w: width, h: step, title: row.name, rows };
  });
  return { root, marks, csv: () => [["mechanism", view.x, "low", "high", "seeds"], ...view.rows.map((row) => [row.name, row.mean, row.low, row.high, row.seeds])] };
}
