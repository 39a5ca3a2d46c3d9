"use strict";
const el = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const COLOURS = 10;
const tip = document.getElementById("tip");
const showTip = (event, ...nodes) => {
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = (event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14) + "px";
  tip.style.top = (event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14) + "px";
};

// --- reading values off the curves -----------------------------------------------------------------------------
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const off = new Set();
  const show = (value, unit) => {
    if (value === null) return "-";
    if (unit === "share") return (100 * value).toFixed(1) + " %";
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  };
  const nearestIn = (xs, x) => {
    let best = 0;
    xs.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(xs[best] - x)) best = i; });
    return best;
  };
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    let chart = null;
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.replaceChildren(); });
    svg.addEventListener("pointermove", (event) => {
      chart ??= JSON.parse(svg.dataset.chart);
      const [left, right, top, bottom] = chart.box;
      const [low, high] = chart.range;
      const area = svg.getBoundingClientRect();
      const px = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
      const x = low + ((px - left) / (right - left)) * (high - low);
      const shown = chart.series.filter((series) => !off.has(series.run) || !svg.closest("figure").dataset.methods);
      const places = shown.filter((series) => series.x.length).map((series) => series.x[nearestIn(series.x, x)]);
      if (!places.length) return;
      const nearest = places[nearestIn(places, x)];
      const line = document.createElementNS(SVG, "line");
      const place = left + ((nearest - low) / (high - low)) * (right - left);
      for (const [name, value] of Object.entries({ x1: place, x2: place, y1: top, y2: bottom })) line.setAttribute(name, value);
      cursor.replaceChildren(line);
      const head = chart.categories.length ? chart.categories[nearest] : show(nearest, "number");
      const rows = shown.map((series) => {
        const value = series.x.length ? series.y[nearestIn(series.x, nearest)] : series.y[0];
        const row = el("div");
        row.append(el("i", "key " + (series.run < 0 ? "ref" : "c" + (series.run % COLOURS))), series.label + " ", el("b", "", show(value, chart.unit)));
        return row;
      });
      showTip(event, el("div", "", chart.x + " " + head), ...rows);
    });
  }

  // Several methods: one legend for all charts.
  const chips = [...document.querySelectorAll(".chip")];
  if (chips.length) {
    for (const figure of document.querySelectorAll("figure.chart")) if (!figure.querySelector(".layer")) figure.dataset.methods = "1";
    const sheet = document.head.appendChild(el("style"));
    const apply = () => {
      sheet.textContent = [...off].map((number) => `figure[data-methods] .g${number} { display: none; }`).join("\n");
      chips.forEach((chip) => chip.setAttribute("aria-pressed", String(!off.has(+chip.dataset.group))));
    };
    for (const chip of chips)
      chip.addEventListener("click", () => {
        const number = +chip.dataset.group;
        if (!off.delete(number)) off.add(number);
        apply();
      });
  }
})();
