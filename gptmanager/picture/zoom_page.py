"""`page`: the picture of a schedule as one HTML file, with zoom and tooltips.

The page contains the SVG and the script below, and loads no other file.
"""

from __future__ import annotations

from typing import Any

import orjson

from gptmanager.picture.drawing import draw, layout_of, shorten
from gptmanager.picture.layout import Look
from gptmanager.picture.svg import escape
from gptmanager.picture.trace import Phase, Trace

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 12px 16px; max-width: 1400px; background: #f4f5f7; color: #1f2328;
  font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { body { background: #0d0f12; color: #e8eaed; } }
main { overflow-x: auto; }
svg.picture { width: 100%; min-width: 760px; height: auto; display: block; }
svg.picture.zoom .plot { cursor: grab; }
.bar { margin: 0 0 8px; display: flex; gap: 8px; align-items: center; flex-wrap: wrap; }
button { font: inherit; padding: 2px 12px; }
#tip { position: fixed; display: none; max-width: 460px; padding: 6px 10px; border-radius: 6px;
  background: #1f2328; color: #ffffff; pointer-events: none; white-space: pre-line;
  font-size: 13px; box-shadow: 0 2px 8px rgba(0, 0, 0, .4); border: 1px solid #6b7280; }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("svg.picture"), tip = document.getElementById("tip");
const plots = [...svg.querySelectorAll("svg.plot")], ticks = svg.querySelector("g.ticks");
const n = data.columns.length, {left, width, top, rowsTop, bottom, first, row, zoom} = data;
const draw = (name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
};
const cells = svg.appendChild(draw("g", {"pointer-events": "none"}));
const cursor = svg.appendChild(draw("path", {class: "frame", "pointer-events": "none"}));
let from = 0, to = n;
for (const title of svg.querySelectorAll("title")) {  // else the browser shows a second tip
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
const xOf = column => left + (column - from) / (to - from) * width;
function drawTicks() {
  const least = Math.max(1, (to - from) / 12), power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= least);
  const shift = width / (to - from) >= 26 ? 0.5 : 0;
  ticks.replaceChildren();
  for (let i = Math.ceil((first + from) / step) * step; i <= first + to - shift; i += step) {
    const x = xOf(i - first + shift);
    ticks.append(draw("path", {class: "grid", d: `M${x} ${top}V${bottom}`}));
    for (const y of [top - 6, bottom + 16])
      ticks.append(draw("text", {x, y, class: "mid small faint"}, i));
  }
}
function drawCells() {  // names of the cells, once they are wide enough
  cells.replaceChildren();
  if (width / (to - from) < 34 || row < 12) return;
  data.rows.forEach(([prompt, spans], index) => {
    for (const [kind, begin, end, position, tokens] of spans) {
      for (let c = Math.max(begin, Math.floor(from)); c < Math.min(end, to); c++) {
        const x = xOf(c + 0.5);
        if (x < left + 8 || x > left + width - 8) continue;
        const at = position + c - begin - prompt;
        const name = kind === "context" ? "C" + tokens : "G" + (at + 1);
        cells.append(draw("text", {x, y: rowsTop + (index + 0.5) * row + 4,
          class: "mid small on-" + kind}, name));
      }
    }
  });
}
function show(a, b) {
  const span = Math.min(n, Math.max(4, b - a));
  from = Math.min(n - span, Math.max(0, a)); to = from + span;
  for (const plot of plots) {
    const box = plot.viewBox.baseVal;
    plot.setAttribute("viewBox", `${from} 0 ${span} ${box.height}`);
  }
  drawTicks(); drawCells();
}
const around = (factor, at = (from + to) / 2) =>
  show(at - (at - from) * factor, at + (to - at) * factor);
const columnAt = event => {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(
    svg.getScreenCTM().inverse());
  return {column: from + (at.x - left) / width * (to - from), y: at.y};
};
let grip = null;
svg.addEventListener("pointermove", event => {
  const {column, y} = columnAt(event), index = Math.floor(column);
  if (grip !== null && zoom) show(from + grip - column, to + grip - column);
  const inside = index >= 0 && index < n && column >= from && column < to && y > top - 20;
  tip.style.display = inside ? "block" : "none";
  cursor.setAttribute("d", inside ? `M${xOf(column)} ${top}V${bottom}` : "");
  if (!inside) return;
  const [context, generation, tokens, blocks, waiting, paused] = data.columns[index];
  const mark = event.target.closest("[data-tip]");
  tip.textContent = (mark ? mark.dataset.tip + "\\n\\n" : "") +
    `iteration ${first + index}: ${context + generation} of ${data.batch} requests ` +
    `(${context} context, ${generation} generation), ${tokens} of ${data.tokens} tokens, ` +
    `${blocks} of ${data.blocks} blocks, ${waiting} wait` + (paused ? `, ${paused} paused` : "");
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
if (zoom) {
  svg.classList.add("zoom");
  svg.addEventListener("pointerdown", event => { grip = columnAt(event).column; });
  addEventListener("pointerup", () => { grip = null; });
  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    around(event.deltaY > 0 ? 1.25 : 0.8, columnAt(event).column);
  }, {passive: false});
  svg.addEventListener("dblclick", event => around(0.4, columnAt(event).column));
  const press = {in: () => around(0.5), out: () => around(2), all: () => show(0, n)};
  for (const name in press) document.getElementById(name).onclick = press[name];
  addEventListener("keydown", event => {
    const move = (to - from) / 4;
    const keys = {"+": press.in, "-": press.out, "0": press.all,
      ArrowLeft: () => show(from - move, to - move),
      ArrowRight: () => show(from + move, to + move)};
    if (keys[event.key] && !event.ctrlKey) keys[event.key]();
  });
}
const asked = location.hash.match(/^#(\\d+)-(\\d+)$/);
if (zoom && asked) show(asked[1] - first, asked[2] - first);
"""

_BUTTONS = """<p class="bar"><button id="in">zoom in (+)</button>
<button id="out">zoom out (-)</button> <button id="all">all (0)</button>
<span>Also: Ctrl + wheel, double click, drag, arrow keys; the address may end in #100-160.</span>
</p>"""

_HELP = """<p>Each row is a request, each column an iteration: one forward pass over the batch.
A full bar is a context (the prompt, whole or in chunks), a lower bar is generation, one token per
column. Two parallel lines are a pause. A thin line is waiting; its dashes show the reason
("scheduler's choice": another reason, or none is known). Point at a mark for its numbers.</p>"""


def page(trace: Trace, title: str = "Schedule") -> str:
    """Return the text of an HTML file that refers to no other file."""
    zoom = layout_of(trace).look is Look.BARS
    picture = draw(trace, title)
    data = orjson.dumps(_data(trace, zoom)).decode().replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head><body>
{_BUTTONS if zoom else ""}
<main>{picture}</main>
{_HELP}
<div id="tip"></div>
<script type="application/json" id="data">{data}</script>
<script type="module">{_SCRIPT}</script>
</body></html>
"""


def _data(trace: Trace, zoom: bool) -> dict[str, Any]:
    """Return the data for the page's script: positions, and the counts of every iteration."""
    layout, bounds = layout_of(trace), trace.bounds
    return {
        "zoom": zoom,
        "first": trace.first_iteration,
        "left": layout.left,
        "width": layout.width,
        "top": layout.top,
        "rowsTop": layout.rows_top,
        "bottom": layout.axis_y,
        "row": layout.row,
        "batch": bounds.max_batch_size,
        "tokens": bounds.max_num_tokens,
        "blocks": bounds.num_blocks,
        "columns": [
            (
                column.num_context,
                column.num_generation,
                column.num_tokens,
                column.used_blocks,
                column.num_waiting,
                column.num_paused,
            )
            for column in trace.columns
        ],
        "rows": [
            (
                row.prompt_len,
                [
                    (span.phase.value, span.begin, span.end, span.position, span.num_tokens)
                    for span in row.spans
                    if span.phase in (Phase.CONTEXT, Phase.GENERATION)
                ],
            )
            for row in shorten(trace).rows
            if zoom
        ],
    }
