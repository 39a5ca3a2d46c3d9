"use strict";
(() => {
  const el = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  // --- reading values off the curves ---------------------------------------------------------------------------
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";
  const show = (value, unit) => {
    if (value === null) return "-";
    if (unit === "share") return (100 * value).toFixed(1) + " %";
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  };
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart);
    const cursor = svg.querySelector(".cursor");
    const [left, right, top, bottom] = chart.box;
    const [low, high] = chart.range;
    const hide = () => { tip.hidden = true; cursor.replaceChildren(); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const area = svg.getBoundingClientRect();
      const px = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
      const x = low + ((px - left) / (right - left)) * (high - low);
      let nearest = null;
      for (const series of chart.series)
        for (const at of series.x) if (nearest === null || Math.abs(at - x) < Math.abs(nearest - x)) nearest = at;
      if (nearest === null) return hide();
      const line = document.createElementNS(SVG, "line");
      const place = left + ((nearest - low) / (high - low)) * (right - left);
      for (const [name, value] of Object.entries({ x1: place, x2: place, y1: top, y2: bottom })) line.setAttribute(name, value);
      cursor.replaceChildren(line);
      tip.replaceChildren(el("div", "", chart.x + " " + show(nearest, "number")));
      for (const series of chart.series) {
        let value = series.y[0];
        if (series.x.length) {
          let best = 0;
          series.x.forEach((at, i) => { if (Math.abs(at - nearest) < Math.abs(series.x[best] - nearest)) best = i; });
          value = series.y[best];
        }
        const row = el("div");
        row.append(el("i", "key " + (series.run < 0 ? "ref" : "c" + (series.run % 6))), series.label + " ", el("b", "", show(value, chart.unit)));
        tip.append(row);
      }
      tip.hidden = false;
      const width = tip.offsetWidth;
      tip.style.left = (event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14) + "px";
      tip.style.top = event.clientY + 14 + "px";
    });
  }

  // --- episodes -------------------------------------------------------------------------------------------------
  const source = document.getElementById("episode-data");
  if (!source) return;
  const runs = JSON.parse(source.textContent);
  const list = document.querySelector(".browser .list");
  const detail = document.querySelector(".browser .detail");
  const gaps = runs.flatMap((run) => run.episodes.flatMap((e) => e.turns.map((t) => Math.abs(t.d ?? 0)))).sort((a, b) => a - b);
  const full = Math.max(gaps[Math.floor(gaps.length * 0.95)] || 0, 0.1);
  const colour = (d) => `rgba(var(--${d >= 0 ? "warm" : "cool"}), ${(0.06 + 0.9 * Math.min(1, Math.abs(d) / full)).toFixed(3)})`;
  const state = { run: 0, outcome: "all", text: "", id: null };

  const tools = el("div", "tools");
  const choice = (label, options, change) => {
    const select = el("select");
    select.setAttribute("aria-label", label);
    options.forEach(([value, text]) => { const option = el("option", "", text); option.value = value; select.append(option); });
    select.addEventListener("change", () => { change(select.value); draw(); });
    return select;
  };
  if (runs.length > 1) tools.append(choice("run", runs.map((run, i) => [i, run.run]), (value) => { state.run = +value; state.id = null; }));
  tools.append(choice("outcome", [["all", "all outcomes"], ["yes", "solved"], ["no", "not solved"]], (value) => { state.outcome = value; }));
  const search = el("input");
  search.type = "search";
  search.placeholder = "task";
  search.setAttribute("aria-label", "filter by task");
  search.addEventListener("input", () => { state.text = search.value.toLowerCase(); draw(); });
  tools.append(search);
  const items = el("div");
  list.append(tools, items);

  const versions = (episode) => {
    const [first, last] = episode.versions;
    return first === undefined ? "" : first === last ? "v" + first : "v" + first + "-" + last;
  };
  const outcome = (episode) => el("span", "outcome" + (episode.success ? " yes" : ""), episode.success ? "solved" : episode.reason.replaceAll("_", " ") || "not solved");

  const draw = () => {
    const shown = runs[state.run].episodes.filter(
      (e) => (state.outcome === "all" || (state.outcome === "yes") === e.success) && (e.task + " " + e.goal).toLowerCase().includes(state.text));
    if (!shown.some((e) => e.id === state.id)) state.id = shown.length ? shown[0].id : null;
    items.replaceChildren(...shown.map((episode) => {
      const item = el("button", "item");
      item.type = "button";
      item.dataset.id = episode.id;
      item.setAttribute("aria-current", String(episode.id === state.id));
      const name = el("div", "name");
      name.append(el("span", "", "#" + episode.id + " " + (episode.goal || episode.task)), el("span", "note", versions(episode)), outcome(episode));
      const strip = el("div", "strip");
      for (const turn of episode.turns) {
        const cell = el("i", "cell" + (turn.u !== null ? " trained" : "") + (turn.who !== "student" ? " teacher" : turn.d === null ? " dead" : ""));
        if (turn.who === "student" && turn.d !== null) cell.style.backgroundColor = colour(turn.d);
        strip.append(cell);
      }
      item.append(name, strip);
      item.addEventListener("click", () => { state.id = episode.id; draw(); detail.scrollTop = 0; });
      return item;
    }));
    if (!shown.length) items.append(el("p", "item note", "No episode fits."));
    drawDetail(shown.find((e) => e.id === state.id));
  };

  const drawDetail = (episode) => {
    if (!episode) return detail.replaceChildren(el("p", "note", "No episode."));
    const goal = el("div", "goal note");
    goal.append(`${episode.task}${episode.attempt ? `, attempt ${episode.attempt + 1}` : ""} · ${episode.turns.length} turns · score ${episode.score} · `, outcome(episode));
    const turns = episode.turns.map((turn, i) => {
      const box = el("div", "turn");
      if (turn.who === "student" && turn.d !== null) box.style.borderLeftColor = colour(turn.d);
      const meta = el("div", "meta");
      meta.append(el("span", "", "turn " + (i + 1)), el("span", "", turn.who), el("span", "", "version " + turn.v), el("span", "", turn.n + " tokens"));
      if (turn.d !== null) meta.append(el("span", "", "disagreement " + (turn.d > 0 ? "+" : "") + turn.d.toFixed(2)));
      if (turn.u !== null) meta.append(el("span", "trained", "trained at update " + turn.u));
      else meta.append(el("span", "", turn.why ? "no loss: " + turn.why.replaceAll("_", " ") : "not trained"));
      if (!turn.ok) meta.append(el("span", "outcome", "invalid action"));
      box.append(meta, el("pre", "obs", turn.o), el("pre", "act" + (turn.ok ? "" : " bad"), turn.a));
      return box;
    });
    detail.replaceChildren(el("h3", "", "#" + episode.id + " " + (episode.goal || episode.task)), goal, ...turns);
  };

  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const all = [...items.querySelectorAll("button")];
    const at = all.indexOf(document.activeElement);
    if (!step || at < 0 || !all[at + step]) return;
    event.preventDefault();
    state.id = +all[at + step].dataset.id;
    draw();
    items.querySelector('[aria-current="true"]').focus();
  });
  draw();
})();
