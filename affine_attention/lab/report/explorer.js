// The attention-map explorer: two maps of one layer and head side by side, and the text coloured by attention weight.

// Weights of one packed map as a lookup (head, row, column) -> number; head -1 is the mean of all heads.
function unpack(entry) {
  const bytes = Uint8Array.from(atob(entry.data), (letter) => letter.charCodeAt(0));
  const wide = entry.bits / 8, view = new DataView(bytes.buffer), top = 2 ** (entry.bits - 1) - 1;
  const n = entry.length, cells = entry.causal ? (n * (n + 1)) / 2 : n * n;
  const starts = [];
  let start = 0;
  for (const scales of entry.scales) { starts.push(start); start += scales.length * cells; }
  const one = (slot, head, row, column) => {
    if (entry.causal && column > row) return 0;
    const cell = entry.causal ? (row * (row + 1)) / 2 + column : row * n + column;
    const at = (starts[slot] + head * cells + cell) * wide;
    const q = wide === 1 ? view.getInt8(at) : view.getInt16(at, true);
    return Math.sign(q) * entry.scales[slot][head] * (q / top) ** 2;
  };
  return (slot, head, row, column) => {
    if (head >= 0) return one(slot, head, row, column);
    const heads = entry.scales[slot].length;
    let sum = 0;
    for (let k = 0; k < heads; k++) sum += one(slot, k, row, column);
    return sum / heads;
  };
}

function mountExplorer(figure) {
  const maps = DATA.maps.map((entry) => ({ ...entry, weight: unpack(entry),
    name: DATA.groups[entry.group].label + (DATA.groups[entry.group].seeds > 1 ? `, seed ${entry.seed}` : "") }));
  const plot = figure.querySelector(".plot");
  const layers = [...new Set(maps.flatMap((map) => map.layers))].sort((a, b) => a - b);
  const heads = Math.max(...maps.flatMap((map) => map.scales.map((row) => row.length)));
  const last = maps.findIndex((map) => DATA.groups[map.group].label.includes("affine"));
  const state = { first: 0, second: last > 0 ? last : maps.length - 1, layer: layers[Math.floor(layers.length / 2)], head: -1, block: 30, row: null, column: null };

  const choose = (label, options, value, act) => {
    const box = element("select", { "aria-label": label });
    for (const [name, text] of options) box.append(element("option", { value: name, text }));
    box.value = String(value);
    box.addEventListener("change", () => { act(Number(box.value)); state.row = null; draw(); });
    return element("label", { class: "choice" }, element("span", { text: label }), box);
  };
  const names = maps.map((map, k) => [k, map.name]);
  const controls = element("div", { class: "controls" },
    choose("Left", names, state.first, (value) => { state.first = value; }),
    choose("Right", names, state.second, (value) => { state.second = value; }),
    choose("Layer", layers.map((layer) => [layer, `layer ${layer}`]), state.layer, (value) => { state.layer = value; }),
    choose("Head", [[-1, "mean of heads"], ...Array.from({ length: heads }, (_, k) => [k, `head ${k}`])], state.head, (value) => { state.head = value; }),
    choose("Tokens", [[30, "first 30, as the paper"], [1000, "all stored tokens"]], state.block, (value) => { state.block = value; }));
  const stage = element("div", { class: "stage", tabindex: 0, role: "application", "aria-label": "Attention maps; arrow keys move between cells" });
  const said = element("p", { class: "said", role: "status", "aria-live": "polite" });
  const reading = element("div", { class: "reading" });
  const tools = element("div", { class: "tools" },
    button("SVG", "Save this figure as SVG", () => saveSvg("figure-9", render(THEMES.light, 900).root)),
    button("PNG", "Save this figure as PNG", () => savePng("figure-9", render(THEMES.light, 900).root)),
    button("CSV", "Save the weights of both maps as CSV", () => save("figure-9.csv", csv(rows()), "text/csv")));
  plot.append(controls, tools, stage, said, reading);

  const pair = () => (state.first === state.second ? [maps[state.first]] : [maps[state.first], maps[state.second]]);
  const slotOf = (map) => map.layers.indexOf(state.layer);
  const has = (map) => slotOf(map) >= 0 && state.head < map.scales[slotOf(map)].length;
  const sizeOf = (map) => Math.min(state.block, map.length);
  const weight = (map, row, column) => map.weight(slotOf(map), state.head, row, column);
  const where = () => `layer ${state.layer}, ${state.head < 0 ? "mean of heads" : `head ${state.head}`}`;
  const reachOf = () => {
    let reach = 0;
    for (const map of pair().filter(has))
      for (let r = 0; r < sizeOf(map); r++)
        for (let c = 0; c < (map.causal ? r + 1 : sizeOf(map)); c++) reach = Math.max(reach, Math.abs(weight(map, r, c)));
    return reach || 1;
  };
  // Square root in the colour scale, so that weights of 1 % are visible.
  const paint = (value, reach, theme) => mix(theme.signed, 0.5 + (Math.sign(value) * Math.sqrt(Math.abs(value) / reach)) / 2);

  function render(theme, width) {
    const shownMaps = pair(), columns = width < 560 ? 1 : shownMaps.length, gap = 30, reach = reachOf();
    const room = (width - gap * (columns - 1)) / columns;
    const labels = Math.min(86, room * 0.22);
    const side = Math.min(room - labels, 520);
    const blockHeight = side + 40, height = blockHeight * Math.ceil(shownMaps.length / columns) + 44;
    const root = canvas(width, height, theme, `Attention maps, ${where()}`);
    const places = [];
    shownMaps.forEach((map, index) => {
      const left = (index % columns) * (room + gap) + labels, top = Math.floor(index / columns) * blockHeight + 28;
      root.append(svg("circle", { cx: left + 5, cy: top - 14, r: 5, fill: colourOf(map, theme) }));
      root.append(svg("text", { x: left + 16, y: top - 10, "font-weight": 600 }, fitted(map.name, side - 20)));
      if (!has(map)) {
        axisLabel(root, fitted(`This run kept no map of ${where()}.`, side), left, top + 20, theme);
        return;
      }
      const n = sizeOf(map), cell = side / n;
      root.append(svg("rect", { x: left, y: top, width: side, height: side, fill: mix(theme.signed, 0.5), stroke: theme.grid }));
      for (let r = 0; r < n; r++) {
        for (let c = 0; c < (map.causal ? r + 1 : n); c++) {
          const value = weight(map, r, c);
          if (value !== 0) root.append(svg("rect", { x: (left + c * cell).toFixed(2), y: (top + r * cell).toFixed(2), width: (cell + 0.2).toFixed(2), height: (cell + 0.2).toFixed(2), fill: paint(value, reach, theme) }));
        }
        if (cell >= 9 || r % Math.ceil(11 / cell) === 0)
          root.append(svg("text", { x: left - 6, y: top + (r + 0.5) * cell + 3.2, "text-anchor": "end", "font-size": Math.min(10, Math.max(8, cell)), fill: theme.muted }, fitted(map.tokens[r] || "–", labels - 10, 10)));
      }
      places.push({ map, left, top, cell, n, side });
    });
    colourBar(root, [-reach, reach], (part) => mix(theme.signed, part), labels, height - 32, Math.min(300, side), theme,
      (part) => shown(part === 0.5 ? 0 : part === 0 ? -reach : reach, 3));
    const cursor = svg("g", { "pointer-events": "none", fill: "none" });
    root.append(cursor);
    return { root, places, cursor, reach };
  }

  let drawn = null;
  function draw() {
    const theme = THEMES[themeName()];
    drawn = render(theme, Math.max(280, Math.floor(stage.clientWidth)));
    stage.replaceChildren(drawn.root);
    if (!drawn.places.length) { say(); return; }
    const n = Math.max(...drawn.places.map((place) => place.n));
    if (state.row === null || state.row >= n) { state.row = n - 1; state.column = 0; }
    say();
  }

  // Marks the selected cell in both maps, and shows the weights of its row in text and colour.
  function say() {
    const theme = THEMES[themeName()];
    drawn.cursor.replaceChildren();
    const parts = [];
    reading.replaceChildren();
    for (const { map, left, top, cell, n, side } of drawn.places) {
      if (state.row >= n || state.column >= n) continue;
      drawn.cursor.append(svg("rect", { x: left, y: top + state.row * cell, width: side, height: cell, stroke: theme.mark, "stroke-width": 1, opacity: 0.45 }));
      drawn.cursor.append(svg("rect", { x: left + state.column * cell, y: top + state.row * cell, width: cell, height: cell, stroke: theme.mark, "stroke-width": 2 }));
      let sum = 0;
      for (let c = 0; c < (map.causal ? state.row + 1 : map.length); c++) sum += weight(map, state.row, c);
      parts.push(`${map.name}: “${map.tokens[state.row]}” reads “${map.tokens[state.column]}” with ${shown(weight(map, state.row, state.column), 3)} (row sum ${shown(sum, 3)})`);
      reading.append(textOf(map, n, theme));
    }
    said.textContent = parts.length ? parts.join(". ") + "." : `No map of ${where()} was kept.`;
  }

  function textOf(map, n, theme) {
    const line = element("p", { class: "tokens" }, element("b", { text: map.name + ": " }));
    for (let c = 0; c < n; c++) {
      const token = element("span", { class: "token", text: map.tokens[c] || "–", title: `token ${c}` });
      const value = c <= state.row || !map.causal ? weight(map, state.row, c) : 0;
      const part = (Math.sign(value) * Math.sqrt(Math.abs(value) / drawn.reach)) / 2;
      token.style.background = mix(theme.signed, 0.5 + part);
      if (Math.abs(part) > 0.3) token.style.color = theme.ground;
      if (c === state.row) token.classList.add("reader");
      if (c === state.column) token.classList.add("read");
      token.addEventListener("click", () => { state.row = c; if (map.causal) state.column = Math.min(state.column, c); say(); });
      line.append(token);
    }
    return line;
  }

  function follow(event) {
    const frame = stage.querySelector("svg").getBoundingClientRect();
    const px = event.clientX - frame.left, py = event.clientY - frame.top;
    for (const { map, left, top, cell, n, side } of drawn.places) {
      if (px < left || py < top || px >= left + side || py >= top + side) continue;
      const row = Math.min(n - 1, Math.floor((py - top) / cell)), column = Math.min(n - 1, Math.floor((px - left) / cell));
      state.row = row;
      state.column = column;
      say();
      showReadout(stage, event.clientX, event.clientY, where(), drawn.places.filter((place) => row < place.n && column < place.n).map((place) => ({
        name: place.map.name, value: shown(weight(place.map, row, column), 3), colour: colourOf(place.map, THEMES[themeName()]) })).concat([
        { name: "reads", value: map.tokens[column] }, { name: "token", value: map.tokens[row] }]));
      return;
    }
    hideReadout(stage);
  }
  stage.addEventListener("pointermove", follow);
  stage.addEventListener("pointerdown", follow);
  stage.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideReadout(stage); });
  stage.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !drawn.places.length) return;
    event.preventDefault();
    const n = Math.max(...drawn.places.map((place) => place.n));
    state.row = Math.min(n - 1, Math.max(0, state.row + move[0]));
    state.column = Math.min(n - 1, Math.max(0, state.column + move[1]));
    say();
  });

  const rows = () => [["run", "layer", "head", "query", "query token", "key", "key token", "weight"],
    ...pair().filter(has).flatMap((map) => Array.from({ length: sizeOf(map) }, (_, r) =>
      Array.from({ length: map.causal ? r + 1 : sizeOf(map) }, (_, c) =>
        [map.name, state.layer, state.head < 0 ? "mean" : state.head, r, map.tokens[r], c, map.tokens[c], Number(weight(map, r, c).toPrecision(5))])).flat())];
  return draw;
}
