// A line over the last minute.

const NAMESPACE = "http://www.w3.org/2000/svg";
const SECONDS = 60;
const HEIGHT = 90;
const FOOT = 14;

export function svgElement(tag, attributes, text = "") {
  const one = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  if (text) one.textContent = text;
  return one;
}

/** Draws points of [seconds, value or null]; a null breaks the line. */
export function drawLine(svg, points, now, unit) {
  const width = svg.clientWidth || 300;
  const values = points.map(([, value]) => value).filter((value) => value !== null);
  const top = ceiling(Math.max(...values, 1));
  const x = (seconds) => (width * (seconds - now + SECONDS)) / SECONDS;
  const y = (value) => HEIGHT - FOOT - (value / top) * (HEIGHT - FOOT - 12);
  let path = "";
  let isBroken = true;
  for (const [seconds, value] of points) {
    if (value !== null) path += `${isBroken ? "M" : "L"}${x(seconds).toFixed(1)} ${y(value).toFixed(1)}`;
    isBroken = value === null;
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(
    svgElement("line", { class: "grid", x1: 0, x2: width, y1: y(0), y2: y(0) }),
    svgElement("line", { class: "grid", x1: 0, x2: width, y1: y(top), y2: y(top) }),
    svgElement("text", { x: 0, y: y(top) - 2 }, String(top)),
    svgElement("text", { x: 0, y: HEIGHT - 2 }, "60 s ago"),
    svgElement("text", { x: width, y: HEIGHT - 2, "text-anchor": "end" }, "now"),
    svgElement("path", { class: "line", d: path }),
  );
  const last = values.at(-1);
  svg.setAttribute("aria-label", `${unit}, now ${last === undefined ? "none" : last.toFixed(1)}, highest ${top} on the scale`);
}

/** The next of 1, 2, 5, 10, 20, ... */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
