// The values under the pointer. Without this script the page shows the same curves.
"use strict";
for (const figure of document.querySelectorAll("figure.panel")) {
  const svg = figure.querySelector("svg");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [low, high, start, end] = data.x;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", data.top);
  cross.setAttribute("y2", data.bottom);
  cross.style.display = "none";
  svg.append(cross);

  const short = (v) => Number(v.toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 });

  function nearest(xs, x) {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  }

  function line(series, i) {
    const row = document.createElement("div");
    const key = document.createElement("span");
    key.className = "key c" + series.color;
    const band = series.low ? ` (${short(series.low[i])} to ${short(series.high[i])})` : "";
    row.append(key, `${short(series.y[i])}${band}  ${series.label}`);
    return row;
  }

  function show(event) {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const x = low + (at - start) / (end - start) * (high - low);
    const found = data.series.map((s) => [s, nearest(s.x, x)]);
    const middle = found[0][0].x[found[0][1]];
    const place = start + (middle - low) / (high - low) * (end - start);
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.style.display = "";
    const head = document.createElement("div");
    head.className = "faint";
    head.textContent = Math.round(middle).toLocaleString("en-US");
    tip.replaceChildren(head, ...found.map(([s, i]) => line(s, i)));
    tip.hidden = false;
    const side = event.clientX - box.left > box.width / 2;
    tip.style.left = side ? "" : event.clientX - figure.getBoundingClientRect().left + 14 + "px";
    tip.style.right = side ? figure.getBoundingClientRect().right - event.clientX + 14 + "px" : "";
    tip.style.top = event.clientY - figure.getBoundingClientRect().top + 10 + "px";
  }

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.style.display = "none"; });
}
