"use strict";
// Lines over time, drawn as SVG that stretches to its box. What a line shows is said in words, too: the
// title of a figure's SVG is what a screen reader reads.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 100;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toFixed(1)} s`;
  return age(value);
}

function age(value) {
  if (value < 90) return `${Math.max(0, Math.round(value))} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function percent(value) {
  return value === undefined ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

// A figure with a caption, the top of its scale, an SVG, and what its ends mean.
class Chart {
  constructor(caption, kind = "") {
    this.top = element("span");
    this.left = element("span");
    this.right = element("span");
    this.title = document.createElementNS(SVG, "title");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.append(this.title);
    this.paths = new Map();
    this.figure = element("figure", { class: kind },
      element("figcaption", {}, element("span", {}, caption), this.top), this.svg,
      element("div", { class: "axis", "aria-hidden": "true" }, this.left, this.right));
  }

  // `lines`: [{ kind, values, area }], each value null where nothing is known; `xs` from 0 to 1.
  draw(xs, lines, top, words) {
    put(this.title, words);
    const drawn = new Set();
    lines.forEach((line, number) => {
      drawn.add(number);
      let path = this.paths.get(number);
      if (!path) {
        path = document.createElementNS(SVG, "path");
        this.svg.append(path);
        this.paths.set(number, path);
      }
      path.setAttribute("class", line.kind);
      path.setAttribute("d", line.marks ? marks(xs, line.values) : outline(xs, line, top));
    });
    for (const [number, path] of this.paths) if (!drawn.has(number)) { path.remove(); this.paths.delete(number); }
  }
}

const x = (share) => (share * WIDTH).toFixed(1);
const y = (value, top) => (HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1);

function outline(xs, line, top) {
  let path = "", pen = false;
  xs.forEach((share, number) => {
    const value = line.values[number];
    if (value === null || value === undefined) { pen = pen && line.join; return; }
    path += `${pen ? "L" : "M"}${x(share)} ${y(value, top)}`;
    pen = true;
  });
  // A point without neighbours, such as a run's first step, is a short dash.
  if (!line.below) return path.replace(/M[\d.]+ [\d.]+(?=M|$)/g, "$&m-4 0h8");
  for (let number = xs.length - 1; number >= 0; number--) path += `L${x(xs[number])} ${y(line.below[number], top)}`;
  return path && `${path}Z`;
}

function marks(xs, values) {
  return xs.map((share, number) => values[number] > 0 ? `M${x(share)} ${HEIGHT - 12}V${HEIGHT}` : "").join("");
}

function nice(value) {
  if (value <= 4) return 4;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((each) => each * power).find((each) => each >= value);
}
