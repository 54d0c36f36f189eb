// Assembles the page: figures with controls, tables with buttons, and the theme.

const CHARTS = { line: lineChart, forest: forestChart, histogram: histogramChart, heat: heatChart };

function mountFigure(node) {
  const figure = DATA.figures.find((entry) => entry.key === node.dataset.figure);
  const plot = node.querySelector(".plot");
  const aside = DATA.groups.flatMap((group, k) => (group.aside ? [`g${k}`] : []));
  const state = { view: 0, hidden: new Set(aside), smoothing: figure.smoothing || 0, log: Boolean(figure.logged), zoom: null, at: -1 };
  const stage = element("div", { class: "stage", tabindex: 0, role: "group", "aria-label": `${figure.title}; arrow keys read values` });
  const controls = element("div", { class: "controls" });
  const legend = element("div", { class: "legend", role: "group", "aria-label": "Show or hide" });
  let chart = null;

  const make = (theme, width) => CHARTS[figure.kind](figure, figure.views[state.view], state, width, theme);
  const draw = () => {
    chart = make(THEMES[themeName()], Math.max(280, Math.floor(stage.clientWidth)));
    stage.replaceChildren(chart.root);
    state.at = -1;
    hideReadout(stage);
  };

  if (figure.views.length > 1) {
    const box = element("select", { "aria-label": `${figure.title}: what is shown` });
    figure.views.forEach((view, k) => box.append(element("option", { value: k, text: view.name })));
    box.addEventListener("change", () => { state.view = Number(box.value); drawLegend(); draw(); });
    controls.append(element("label", { class: "choice" }, element("span", { text: "Show" }), box));
  }
  if (figure.smooth) {
    const range = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing });
    range.addEventListener("input", () => { state.smoothing = Number(range.value); draw(); });
    controls.append(element("label", { class: "choice" }, element("span", { text: "Smoothing" }), range));
  }
  if (figure.log) {
    const box = element("input", { type: "checkbox" });
    box.checked = state.log;
    box.addEventListener("change", () => { state.log = box.checked; draw(); });
    controls.append(element("label", { class: "choice" }, box, element("span", { text: "Logarithmic" })));
  }
  const whole = button("Whole range", "Undo the zoom", () => { state.zoom = null; whole.hidden = true; draw(); });
  whole.hidden = true;
  if (figure.kind === "line" && figure.x === "step")
    controls.append(whole, element("span", { class: "hint", text: "Drag across the chart to zoom." }));

  const name = () => (figure.views.length > 1 ? `${figure.key}-${figure.views[state.view].name.replace(/[^a-z0-9]+/gi, "-").replace(/^-|-$/g, "")}` : figure.key);
  const paper = () => {
    const saved = make(THEMES.light, 900);
    return withLegend(saved.root, figure);
  };
  const tools = element("div", { class: "tools" },
    button("SVG", "Save this figure as SVG", () => saveSvg(name(), paper())),
    button("PNG", "Save this figure as PNG", () => savePng(name(), paper())),
    button("CSV", "Save the numbers of this figure as CSV", () => save(`${name()}.csv`, csv(chart.csv()), "text/csv")));

  // The legend has one entry per group; the seeds of a group share it.
  const entries = () => {
    const view = figure.views[state.view], seen = new Map();
    for (const item of view.lines || view.panels || []) {
      const key = lineKey(item);
      if (!seen.has(key)) seen.set(key, { key, item, label: item.group === undefined ? item.name : DATA.groups[item.group].label });
    }
    return [...seen.values()];
  };
  function drawLegend() {
    const theme = THEMES[themeName()];
    legend.replaceChildren(...entries().map(({ key, item, label }) => {
      const stroke = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
      stroke.append(svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: colourOf(item, theme), "stroke-width": 3, "stroke-dasharray": dashOf(item) || undefined }));
      const entry = element("button", { type: "button", "aria-pressed": String(!state.hidden.has(key)) }, stroke, element("span", { text: label }));
      entry.addEventListener("click", () => {
        if (state.hidden.has(key)) state.hidden.delete(key);
        else state.hidden.add(key);
        entry.setAttribute("aria-pressed", String(!state.hidden.has(key)));
        draw();
      });
      return entry;
    }));
    if (aside.length) legend.append(element("span", { class: "hint", text: "Struck-out names are hidden; click one to show it." }));
    legend.hidden = figure.kind !== "line" || entries().length < 2;
  }
  function withLegend(root, figure) {
    if (figure.kind !== "line") return root;
    const width = Number(root.getAttribute("width")), height = Number(root.getAttribute("height"));
    let x = 50, y = height + 14;
    for (const { key, item, label } of entries()) {
      if (state.hidden.has(key)) continue;
      const text = fitted(label, 300), room = 50 + textWidth(text, 12, 400);
      if (x + room > width && x > 50) { x = 50; y += 20; }
      root.append(svg("line", { x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: colourOf(item, THEMES.light), "stroke-width": 3, "stroke-dasharray": dashOf(item) || undefined }));
      root.append(svg("text", { x: x + 30, y }, text));
      x += room;
    }
    root.setAttribute("height", y + 12);
    root.setAttribute("viewBox", `0 0 ${width} ${y + 12}`);
    root.querySelector("rect").setAttribute("height", y + 12);
    return root;
  }

  // Reading values: with the mouse, by touch or with the arrow keys.
  const tell = (told, clientX, clientY) => {
    if (!told) { hideReadout(stage); return; }
    showReadout(stage, clientX, clientY, told.title, told.rows);
  };
  const place = (event) => {
    const frame = chart.root.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  const readAt = (event) => {
    const [px, py] = place(event);
    if (chart.marks) {
      const mark = chart.marks.find((m) => px >= m.x && px < m.x + m.w && py >= m.y && py < m.y + m.h);
      tell(mark, event.clientX, event.clientY);
    } else if (chart.places && px >= chart.frame.left - 8 && px <= chart.frame.right + 8) {
      state.at = chart.nearest(px);
      tell(chart.point(state.at), event.clientX, event.clientY);
    }
  };
  const leave = () => { hideReadout(stage); chart.clear?.(); };
  // After a touch ends, the readout stays visible until the next touch.
  const drift = (event) => { if (event.pointerType !== "touch") leave(); };
  let drag = null;
  stage.addEventListener("pointermove", (event) => {
    if (drag) {
      const [px] = place(event);
      drag.shade.setAttribute("x", Math.min(px, drag.from));
      drag.shade.setAttribute("width", Math.abs(px - drag.from));
    }
    readAt(event);
  });
  stage.addEventListener("pointerdown", (event) => {
    readAt(event);
    if (figure.x !== "step" || event.pointerType !== "mouse" || event.button !== 0) return;
    const [px] = place(event);
    const shade = svg("rect", { x: px, y: chart.frame.top, width: 0, height: chart.frame.bottom - chart.frame.top, fill: THEMES[themeName()].ink, opacity: 0.1 });
    chart.root.append(shade);
    drag = { from: px, shade };
    event.preventDefault();
    stage.focus({ preventScroll: true });
  });
  addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [px] = place(event), ends = [drag.from, px].sort((a, b) => a - b).map(chart.x.invert);
    const wide = Math.abs(px - drag.from) > 8;
    drag.shade.remove();
    drag = null;
    if (wide) { state.zoom = ends; whole.hidden = false; draw(); }
  });
  stage.addEventListener("pointerleave", drift);
  stage.addEventListener("blur", leave);
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") leave();
    const count = chart.marks ? chart.marks.length : chart.places;
    if (!step || !count) return;
    event.preventDefault();
    state.at = Math.min(count - 1, Math.max(0, state.at + step * (event.shiftKey ? 10 : 1)));
    const frame = chart.root.getBoundingClientRect();
    const told = chart.marks ? chart.marks[state.at] : chart.point(state.at);
    const at = told.at || [told.x + told.w / 2, told.y + told.h / 2];
    tell(told, frame.left + at[0], frame.top + at[1]);
  });

  plot.append(controls, tools, legend, stage);
  drawLegend();
  return () => { drawLegend(); draw(); };
}

function mountTable(figure) {
  const table = figure.querySelector("table");
  const rows = () => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ")));
  const markdown = () => {
    const [head, ...body] = rows().map((row) => row.map(markdownCell));
    return [head, head.map((_, k) => (k ? "---:" : ":---")), ...body].map((row) => `| ${row.join(" | ")} |`).join("\n") + "\n";
  };
  const tools = element("div", { class: "tools" },
    button("Copy", "Copy this table for a spreadsheet", (node) => copy(rows().map((row) => row.map(plainCell).join("\t")).join("\n") + "\n", node)),
    button("Markdown", "Copy this table as Markdown", (node) => copy(markdown(), node)),
    button("CSV", "Save this table as CSV", () => save(`${figure.id}.csv`, csv(rows()), "text/csv")));
  figure.querySelector("figcaption").after(tools);
}

function mountTheme(redraw) {
  const stored = (() => { try { return localStorage.getItem("affine-report-theme"); } catch { return null; } })();
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  const toggle = element("button", { type: "button", class: "theme" });
  const label = () => {
    const next = themeName() === "dark" ? "Light" : "Dark";
    toggle.textContent = next;
    toggle.setAttribute("aria-label", `Switch to the ${next.toLowerCase()} theme`);
  };
  toggle.addEventListener("click", () => {
    const next = themeName() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("affine-report-theme", next); } catch { /* a page from a file may have no storage */ }
    label();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); redraw(); });
  label();
  document.querySelector("nav.contents").append(toggle);
}

function start() {
  document.documentElement.classList.add("scripted");
  document.body.append(READOUT);
  const drawings = new Map();
  for (const node of document.querySelectorAll("[data-figure]")) drawings.set(node, mountFigure(node));
  for (const node of document.querySelectorAll("[data-explorer]")) drawings.set(node, mountExplorer(node));
  for (const node of document.querySelectorAll("figure.table")) if (node.querySelector("table")) mountTable(node);
  const redraw = () => drawings.forEach((draw) => draw());
  mountTheme(redraw);
  redraw();
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });
  addEventListener("pointerdown", (event) => { if (!event.target.closest?.(".stage")) hideReadout(); });
  // Print with the light theme and all details expanded.
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    document.querySelectorAll("details").forEach((node) => { node.open = true; });
    redraw();
  });
  addEventListener("afterprint", () => {
    if (before === undefined) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = before;
    redraw();
  });
}

start();
