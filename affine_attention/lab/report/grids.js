// Small multiples: histograms, and layer x head grids with one colour scale.

function columnsFor(width, count, least) {
  return Math.max(1, Math.min(count, Math.floor(width / least)));
}

function histogramChart(figure, view, state, width, theme) {
  const panels = view.panels;
  const columns = columnsFor(width, panels.length, 300), gap = 28, tall = 190;
  const cell = (width - gap * (columns - 1)) / columns;
  const height = Math.max(1, Math.ceil(panels.length / columns)) * tall + 24;
  const root = canvas(width, height, theme, `${figure.title}, ${view.name}`);
  const domain = figure.domain || padded(extent(panels.flatMap((panel) => [panel.edges[0], panel.edges.at(-1)])), 0.04);
  const marks = [];
  panels.forEach((panel, index) => {
    const left = (index % columns) * (cell + gap) + 40, top = Math.floor(index / columns) * tall + 26;
    const right = left + cell - 48, bottom = top + tall - 66, colour = colourOf(panel, theme);
    const x = linear(domain, [left, right]), most = Math.max(...panel.shares), y = linear([0, most], [bottom, top + 6]);
    root.append(svg("text", { x: left, y: top - 10, "font-weight": 600 }, fitted(panel.name, cell - 50)));
    for (const tick of x.ticks(Math.max(2, Math.floor((right - left) / 70)))) {
      root.append(svg("line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4, stroke: theme.axis }));
      axisLabel(root, shown(tick), x(tick), bottom + 16, theme, { "text-anchor": "middle" });
    }
    for (const share of [0, most]) {
      root.append(svg("line", { x1: left, x2: right, y1: y(share), y2: y(share), stroke: share ? theme.grid : theme.axis }));
      axisLabel(root, `${shown(100 * share, 2)} %`, left - 6, y(share) + 4, theme, { "text-anchor": "end", "font-size": 10 });
    }
    panel.shares.forEach((share, k) => {
      const from = x(panel.edges[k]), to = x(panel.edges[k + 1]);
      const wide = Math.max(1.5, to - from - 0.5);
      if (share > 0) root.append(svg("rect", { x: from, y: y(share), width: wide, height: Math.max(0.8, bottom - y(share)), fill: colour, opacity: 0.85 }));
      marks.push({ x: from, y: top, w: Math.max(to - from, 3), h: bottom - top, title: panel.name, rows: [
        { name: `${shown(panel.edges[k])} to ${shown(panel.edges[k + 1])}`, value: `${shown(100 * share, 3)} %`, colour }] });
    });
    for (const [value, dash] of [[panel.mean, "5 3"], [panel.median, "1.5 3"]])
      root.append(svg("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, stroke: theme.ink, "stroke-dasharray": dash, "stroke-width": 1.4 }));
    axisLabel(root, `mean ${shown(panel.mean, 3)} (dashed), median ${shown(panel.median, 3)} (dotted)`, left, bottom + 32, theme);
  });
  axisLabel(root, figure.x, width / 2, height - 6, theme, { "text-anchor": "middle" });
  return { root, marks, csv: () => [["mechanism", "from", "to", "share"],
    ...view.panels.flatMap((panel) => panel.shares.map((share, k) => [panel.name, panel.edges[k], panel.edges[k + 1], share]))] };
}

function heatChart(figure, view, state, width, theme) {
  const panels = view.panels;
  const heads = Math.max(1, ...panels.map((panel) => Math.max(1, ...panel.values.map((row) => row.length))));
  const layers = Math.max(1, ...panels.map((panel) => panel.values.length));
  const columns = columnsFor(width, panels.length, Math.min(width, Math.max(170, 36 + heads * 9))), gap = 18;
  const room = Math.min((width - gap * (columns - 1)) / columns - 34, Math.max(220, heads * 36));
  const size = Math.max(3, Math.min(36, room / heads));
  const tall = Math.max(6, Math.min(size, 24));
  const block = layers * tall + 70;
  const height = Math.max(1, Math.ceil(panels.length / columns)) * block + 46;
  const root = canvas(width, height, theme, `${figure.title}, ${view.name}`);
  const found = extent(panels.flatMap((panel) => panel.values.flat()));
  const low = view.floor !== undefined ? Math.min(view.floor, found[0]) : found[0];
  const high = view.ceiling ?? found[1];
  const signed = low < 0 && high > 0, reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const paint = (value) => signed ? mix(theme.signed, 0.5 + value / (2 * reach)) : mix(theme.ramp, (value - low) / (high - low || 1));
  const marks = [];
  panels.forEach((panel, index) => {
    const left = (index % columns) * (room + 34 + gap) + 34, top = Math.floor(index / columns) * block + 26;
    root.append(svg("text", { x: left, y: top - 9, "font-weight": 600 }, fitted(panel.name, room)));
    panel.values.forEach((row, layer) => {
      if (layer % Math.ceil(16 / tall) === 0)
        axisLabel(root, String(layer), left - 6, top + layer * tall + tall / 2 + 3.5, theme, { "text-anchor": "end", "font-size": 10 });
      row.forEach((value, head) => {
        const px = left + head * size, py = top + layer * tall;
        root.append(svg("rect", { x: px, y: py, width: size - 0.8, height: tall - 0.8, rx: 1, fill: value === null ? theme.ground : paint(value), stroke: value === null ? theme.grid : undefined }));
        marks.push({ x: px, y: py, w: size, h: tall, title: panel.name, rows: [
          { name: `layer ${layer}, head ${head}`, value: shown(value), colour: value === null ? undefined : paint(value) }] });
      });
    });
    const wide = Math.max(1, ...panel.values.map((row) => row.length)) * size;
    for (let head = 0; head * size < wide - 1; head += Math.ceil(20 / size))
      axisLabel(root, String(head), left + (head + 0.5) * size, top + panel.values.length * tall + 12, theme, { "text-anchor": "middle", "font-size": 10 });
    axisLabel(root, "head", left + wide / 2, top + panel.values.length * tall + 26, theme, { "text-anchor": "middle" });
    axisLabel(root, "layer", left - 24, top + (panel.values.length * tall) / 2, theme, {
      "text-anchor": "middle", transform: `rotate(-90 ${left - 24} ${top + (panel.values.length * tall) / 2})` });
  });
  colourBar(root, signed ? [-reach, reach] : [low, high], (part) => mix(signed ? theme.signed : theme.ramp, part), 34, height - 34, Math.min(260, width - 80), theme);
  return { root, marks, csv: () => [["mechanism", "layer", "head", view.name],
    ...view.panels.flatMap((panel) => panel.values.flatMap((row, layer) => row.map((value, head) => [panel.name, layer, head, value])))] };
}

function colourBar(root, [low, high], paint, left, top, width, theme, label = (part) => shown(low + part * (high - low), 3)) {
  for (let k = 0; k < 60; k++)
    root.append(svg("rect", { x: left + (k * width) / 60, y: top, width: width / 60 + 0.5, height: 9, fill: paint((k + 0.5) / 60) }));
  for (const part of [0, 0.5, 1])
    axisLabel(root, label(part), left + part * width, top + 24, theme, { "text-anchor": ["start", "middle", "end"][2 * part] });
}
