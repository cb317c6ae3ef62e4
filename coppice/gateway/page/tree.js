// A round's tree: from left to right where there is room, else line by line.

import { svgElement } from "/page/charts.js";

const LINE = 28;
const BOX = 22;
const CHARACTER = 7.3;
const GAP = 22;
const INDENT = 14;
const MOST_CHARACTERS = 12;
const MARKS = { accepted: "✓", rejected: "✗", pruned: "–", target: "+" };
const RANKS = { accepted: 0, target: 0, rejected: 1, pruned: 2 };

export const shown = (text) => {
  const visible = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/ {4,}/g, (run) => `␣×${run.length}`).replaceAll(" ", "␣");
  return visible.length > MOST_CHARACTERS ? `${visible.slice(0, MOST_CHARACTERS - 1)}…` : visible;
};

/** The round's nodes with children, and the target's own token where the accepted path ends. */
export function nodesOf(round) {
  const nodes = round.nodes.map((node, index) => ({ ...node, index, children: [] }));
  const accepted = nodes.filter((node) => node.state === "accepted");
  const own = round.tokens.slice(accepted.length);
  let parent = accepted.length ? accepted.at(-1).index : -1;
  for (const token of own) {
    nodes.push({ ...token, index: nodes.length, parent, state: "target", sources: [], probability: null, children: [] });
    parent = nodes.length - 1;
  }
  const roots = [];
  for (const node of nodes) (node.parent < 0 ? roots : nodes[node.parent].children).push(node);
  const order = (one, other) => RANKS[one.state] - RANKS[other.state] || (other.probability ?? 0) - (one.probability ?? 0);
  const visit = (list, depth) => {
    list.sort(order);
    for (const node of list) {
      node.depth = depth;
      visit(node.children, depth + 1);
    }
  };
  visit(roots, 1);
  return { nodes, roots };
}

export function summary(round) {
  const count = (state) => round.nodes.filter((node) => node.state === state).length;
  return `${round.nodes.length} nodes drafted: ${count("accepted")} accepted, ${count("rejected")} rejected, ${count("pruned")} pruned`;
}

export function drawTree(place, round, colours) {
  const { nodes, roots } = nodesOf(round);
  for (const node of nodes) {
    node.label = `${MARKS[node.state]} ${shown(node.text)}`;
    node.width = 16 + CHARACTER * [...node.label].length + 5 * Math.max(0, node.sources.length - 1);
  }
  const [width, height] = across(nodes, roots, place.clientWidth - 22) || downwards(nodes, roots);
  const svg = svgElement("svg", { width, height, role: "img", "aria-label": summary(round) });
  // Edges share their first part: what was kept lies above what was not.
  for (const node of [...nodes].sort((one, other) => RANKS[other.state] - RANKS[one.state]))
    svg.append(svgElement("path", { class: `edge ${node.state}`, d: node.edge }));
  svg.append(svgElement("circle", { class: "root", cx: 6, cy: 14, r: 5 }));
  for (const node of nodes) svg.append(box(node, colours));
  place.replaceChildren(svg);
}

/** Columns by depth; null where these are wider than the room. */
function across(nodes, roots, room) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] || 0, node.width);
  const columns = [0, 16 + GAP];
  for (let depth = 1; depth < widths.length; depth += 1) columns[depth + 1] = columns[depth] + widths[depth] + GAP;
  const width = Math.max(40, columns.at(-1) - GAP + 2);
  if (width > room) return null;
  let line = 0;
  const visit = (list, from) => {
    for (const [place, node] of list.entries()) {
      if (place) line += 1;
      node.x = columns[node.depth];
      node.y = 14 + LINE * line;
      const middle = node.x - GAP / 2;
      node.edge = `M${from.x} ${from.y}H${middle}V${node.y}H${node.x}`;
      visit(node.children, { x: node.x + node.width, y: node.y });
    }
  };
  visit(roots, { x: 10, y: 14 });
  return [width, LINE * (line + 1)];
}

/** A line for each node, indented by depth. */
function downwards(nodes, roots) {
  let line = 0;
  const visit = (list, from) => {
    for (const node of list) {
      line += 1;
      node.x = INDENT * node.depth + 4;
      node.y = 14 + LINE * line;
      node.edge = `M${from.x} ${from.y}V${node.y}H${node.x}`;
      visit(node.children, { x: node.x + INDENT / 2, y: node.y + BOX / 2 });
    }
  };
  visit(roots, { x: 6, y: 14 });
  return [Math.max(40, ...nodes.map((node) => node.x + node.width + 2)), LINE * (line + 1)];
}

function box(node, colours) {
  const group = svgElement("g", { class: `node ${node.state}` });
  const title = [node.text, node.state === "target" ? "the target's own token" : node.state, node.sources.join(", ")];
  if (node.probability !== null) title.push(`probability ${node.probability.toFixed(3)}`);
  group.append(svgElement("title", {}, title.filter(Boolean).join("\n")));
  const y = node.y - BOX / 2;
  group.append(svgElement("rect", { class: "box", x: node.x, y, width: node.width, height: BOX, rx: 6 }));
  for (const [place, source] of node.sources.entries())
    group.append(svgElement("rect", { class: colours(source), x: node.x + 4 + 5 * place, y: y + 4, width: 4, height: BOX - 8, rx: 1 }));
  const x = node.x + 11 + 5 * Math.max(0, node.sources.length - 1);
  group.append(svgElement("text", { x, y: node.y + 4 }, node.label));
  return group;
}
