"use strict";
// Shared by all charts: SVG nodes, scales and ticks, colours of the two themes, the readout, saving.

const DATA = JSON.parse(document.getElementById("report-data").textContent);

const THEMES = {
  light: {
    ground: "#ffffff", ink: "#1b2330", muted: "#5b6675", grid: "#e8ebf0", axis: "#b4bcc8", mark: "#1b2330",
    ramp: ["#f1f5fa", "#c3d9ee", "#74abd6", "#2673b4", "#08336b"],
    signed: ["#7f2704", "#d9622b", "#f6c9ae", "#f7f7f7", "#a9cdec", "#3182bd", "#08336b"],
  },
  dark: {
    ground: "#171b22", ink: "#e8ecf2", muted: "#9ba6b5", grid: "#2a313b", axis: "#4c5664", mark: "#ffffff",
    ramp: ["#1d242e", "#1f4062", "#2f73ab", "#6fb4e6", "#e6f3ff"],
    signed: ["#ffd2b8", "#f08a55", "#7a3517", "#20262f", "#1f5788", "#4d9fdc", "#d6ecff"],
  },
};
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const OTHER = { light: ["#0067b0", "#d17f00", "#00875f"], dark: ["#5ab0f0", "#f0a830", "#2dc498"] };

function themeName() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function colourOf(item, theme) {
  const name = theme === THEMES.dark ? "dark" : "light";
  return item.group === undefined ? OTHER[name][item.colour % 3] : DATA.groups[item.group][name];
}

function dashOf(item) {
  return item.group === undefined ? ["", "6 3"][item.colour % 2] : DATA.groups[item.group].dash;
}

// HTML and SVG nodes. Text is always set as text, never as markup.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function canvas(width, height, theme, label) {
  const root = svg("svg", {
    xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": label, "font-family": FONT, "font-size": 12, fill: theme.ink,
  });
  root.append(svg("rect", { width, height, fill: theme.ground }));
  return root;
}

// Scales.
function linear(domain, range) {
  const [low, high] = domain;
  const span = high - low || 1;
  const scale = (value) => range[0] + ((value - low) / span) * (range[1] - range[0]);
  scale.invert = (pixel) => low + ((pixel - range[0]) / (range[1] - range[0] || 1)) * span;
  scale.ticks = (count) => linearTicks(low, high, count);
  return scale;
}

function logarithmic(domain, range) {
  const inner = linear([Math.log10(domain[0]), Math.log10(domain[1])], range);
  const scale = (value) => inner(Math.log10(value));
  scale.ticks = (count) => logTicks(domain[0], domain[1], count);
  return scale;
}

function linearTicks(low, high, count) {
  const raw = (high - low || 1) / Math.max(1, count);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((unit) => unit * power).find((unit) => unit >= raw - 1e-12 * raw);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) ticks.push(k * step || 0);
  return ticks;
}

function logTicks(low, high, count) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const unit of [1, 2, 5]) {
      const tick = unit * Math.pow(10, power);
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  if (ticks.length < 3) return linearTicks(low, high, count);
  return ticks.length > 2 * count ? ticks.filter((tick) => /^1/.test(tick.toExponential())) : ticks;
}

function padded([low, high], part) {
  const room = (high - low) * part || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

// Numbers for display: four digits, a typographic minus.
function shown(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) text = value.toExponential(2);
  else if (Number.isInteger(value)) text = value.toLocaleString("en-US");
  else text = Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 });
  return text.replace("-", "−");
}

function mix(stops, part) {
  const place = Math.min(1, Math.max(0, part)) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(place));
  const channel = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
  const blend = [0, 1, 2].map((k) =>
    Math.round(channel(stops[index], k) + (place - index) * (channel(stops[index + 1], k) - channel(stops[index], k))));
  return "#" + blend.map((part) => part.toString(16).padStart(2, "0")).join("");
}

// Cuts text to a width.
const RULER = document.createElement("canvas").getContext("2d");

function textWidth(text, size = 12, weight = 600) {
  RULER.font = `${weight} ${size}px ${FONT}`;
  return RULER.measureText(text).width;
}

function fitted(text, width, size = 12) {
  if (textWidth(text, size) <= width) return text;
  const letters = Array.from(text).slice(0, 200);
  while (letters.length > 1 && textWidth(letters.join("") + "…", size) > width) letters.pop();
  return letters.join("") + "…";
}

function axisLabel(root, text, x, y, theme, more = {}) {
  root.append(svg("text", { x, y, fill: theme.muted, "font-size": 11, ...more }, text));
}

// The readout that follows the pointer, one for the whole page.
const READOUT = element("div", { class: "readout", role: "status", "aria-live": "polite", hidden: true });

let readoutOwner = null;

function showReadout(box, clientX, clientY, title, rows) {
  readoutOwner = box;
  READOUT.replaceChildren(element("div", { class: "readout-title", text: title }));
  for (const row of rows) {
    const swatch = element("span", { class: "swatch" });
    if (row.colour) swatch.style.background = row.colour;
    else swatch.hidden = true;
    READOUT.append(element("div", { class: "readout-row" }, swatch,
      element("span", { class: "readout-name", text: row.name }), element("span", { class: "number", text: row.value })));
  }
  READOUT.hidden = false;
  const frame = box.getBoundingClientRect();
  const width = READOUT.offsetWidth, height = READOUT.offsetHeight;
  if (innerWidth < 600) {
    // On a touch screen the finger would hide the readout, so it is shown above the chart.
    READOUT.style.left = `${Math.max(8, Math.min(frame.left, innerWidth - width - 8)) + scrollX}px`;
    READOUT.style.top = `${Math.max(56, frame.top - height - 6) + scrollY}px`;
    return;
  }
  const right = clientX + 16 + width < Math.min(innerWidth - 8, frame.right + 40);
  const left = right ? clientX + 16 : Math.max(8, clientX - 16 - width);
  READOUT.style.left = `${Math.min(left, innerWidth - width - 8) + scrollX}px`;
  READOUT.style.top = `${Math.max(8, Math.min(clientY - height / 2, innerHeight - height - 8)) + scrollY}px`;
}

// A chart that loses the pointer or the focus hides only its own readout.
function hideReadout(box) {
  if (box === undefined || box === readoutOwner) READOUT.hidden = true;
}

// Saving and copying.
function save(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function saveSvg(name, root) {
  save(`${name}.svg`, '<?xml version="1.0" encoding="UTF-8"?>\n' + new XMLSerializer().serializeToString(root), "image/svg+xml");
}

function savePng(name, root) {
  const text = new XMLSerializer().serializeToString(root);
  const picture = new Image();
  picture.onload = () => {
    const sheet = document.createElement("canvas");
    sheet.width = 2 * Number(root.getAttribute("width"));
    sheet.height = 2 * Number(root.getAttribute("height"));
    sheet.getContext("2d").drawImage(picture, 0, 0, sheet.width, sheet.height);
    sheet.toBlob((blob) => save(`${name}.png`, blob), "image/png");
  };
  picture.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}

// Text that starts like a formula would be executed by a spreadsheet, so it gets a leading apostrophe.
function plainCell(value) {
  if (value === null || value === undefined) return "";
  const text = String(value).replace(/−/g, "-");
  const number = /^[+-]?[\d.,]+(e[+-]?\d+)?%?( ?[±(].*)?$/i.test(text);
  return /^[\s\p{C}\p{Z}]*[=+\-@＝＋－＠﹢﹣﹦﹫|%]|^[\t\r\n]/u.test(text) && !number ? "'" + text : text;
}

// Escapes Markdown and HTML markup and bare URLs, like markdown.py.
function markdownCell(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
  return text
    .replace(/[&<>]/g, (sign) => entities[sign])
    .replace(/([\\`*[\]|~$]|(?<!\w)_|_(?!\w))/g, "\\$1")
    .replace(/\b(?:https?|ftp|mailto|xmpp)(?=:)|\bwww(?=\.)/gi, "$&\\");
}

function csv(rows) {
  const quoted = (value) => {
    const text = plainCell(value);
    return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  };
  return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
}

async function copy(text, button) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = element("textarea", { class: "off-screen" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = done ? "Copied" : "Could not copy";
  setTimeout(() => { button.textContent = label; }, 1500);
}

function button(text, label, act) {
  const node = element("button", { type: "button", text, title: label, "aria-label": label });
  node.addEventListener("click", () => act(node));
  return node;
}
