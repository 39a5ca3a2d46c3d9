
// --- episodes: a list that holds only what is in sight, and texts that are unpacked when an episode is opened ----
(() => {
  const source = document.getElementById("episode-data");
  if (!source) return;
  const { runs, unit } = JSON.parse(source.textContent);
  const list = document.querySelector(".browser .list");
  const detail = document.querySelector(".browser .detail");
  const ROW = 54, FULL_TOKEN = 2;
  const state = { run: 0, outcome: "all", type: "", order: "time", text: "", episode: null, opened: 0 };
  const ACTORS = { s: "student", t: "teacher", r: "replayed" };
  let loaded = null, shown = [];

  const unpack = async (base64) => {
    const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  const open = async (number) => {
    const run = runs[number];
    if (!run.episodes) {
      Object.assign(run, await unpack(document.getElementById("index-" + number).textContent));
      const gaps = [];
      for (const episode of run.episodes) {
        const all = episode.d.filter((d) => d !== null);
        episode.mean = all.length ? all.reduce((sum, d) => sum + Math.abs(d), 0) / all.length : 0;
        episode.trained = episode.u.filter((u) => u > 0).length;
        episode.find = (episode.task + " " + episode.goal + " #" + episode.id).toLowerCase();
        gaps.push(...all.map(Math.abs));
      }
      gaps.sort((a, b) => a - b);
      run.full = Math.max((gaps[Math.floor(gaps.length * 0.95)] || 0) / 1000, 0.1);
    }
    return run;
  };
  const textOf = async (run, episode) => {
    if (episode.x === undefined) return null;
    run.texts ??= document.getElementById("texts-" + runs.indexOf(run)).textContent.split("\n");
    return (episode.text ??= await unpack(run.texts[episode.x]));
  };
  const colour = (gap, full) => `rgba(var(--${gap >= 0 ? "warm" : "cool"}), ${(0.06 + 0.9 * Math.min(1, Math.abs(gap) / full)).toFixed(3)})`;
  const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(2);

  // --- tools
  const tools = el("div", "tools");
  const choice = (label, options, change) => {
    const select = el("select");
    select.setAttribute("aria-label", label);
    const fill = (pairs) => select.replaceChildren(...pairs.map(([value, text]) => { const option = el("option", "", text); option.value = value; return option; }));
    fill(options);
    select.addEventListener("change", () => { change(select.value); refresh(); });
    return { select, fill };
  };
  if (runs.length > 1)
    tools.append(choice("run", runs.map((run, i) => [i, run.run]), (value) => { state.run = +value; state.type = ""; state.episode = null; loaded = null; }).select);
  const types = choice("task type", [["", "all types"]], (value) => { state.type = value; });
  const search = el("input");
  search.type = "search";
  search.placeholder = "task or #number";
  search.setAttribute("aria-label", "filter by task");
  search.addEventListener("input", () => { state.text = search.value.toLowerCase(); refresh(); });
  tools.append(
    choice("outcome", [["all", "all outcomes"], ["yes", "solved"], ["no", "not solved"], ["teacher", "teacher acted"], ["unused", "never trained"]], (value) => { state.outcome = value; }).select,
    types.select,
    choice("order", [["time", "by arrival"], ["gap", "by disagreement"], ["trained", "by trained turns"]], (value) => { state.order = value; }).select,
    search);
  const count = el("div", "count note");
  const rows = el("div", "rows");
  rows.tabIndex = 0;
  rows.setAttribute("role", "listbox");
  rows.setAttribute("aria-label", "episodes");
  const spacer = el("div", "spacer");
  rows.append(spacer);
  list.append(tools, count, rows);

  const fits = {
    all: () => true,
    yes: (e) => e.success,
    no: (e) => !e.success,
    teacher: (e) => e.who.includes("t"),
    unused: (e) => e.trained === 0,
  };
  const outcome = (e) => el("span", "outcome" + (e.success ? " yes" : ""), e.success ? "solved" : e.reason.replaceAll("_", " ") || "not solved");

  const refresh = async () => {
    const ticket = ++state.opened;
    const run = await open(state.run);
    if (ticket !== state.opened) return;
    if (loaded !== run) {
      loaded = run;
      const names = [...new Set(run.episodes.map((e) => e.type).filter(Boolean))].sort();
      types.fill([["", "all types"], ...names.map((name) => [name, name.replaceAll("_", " ")])]);
      types.select.hidden = names.length < 2;
    }
    shown = run.episodes.filter((e) => fits[state.outcome](e) && (!state.type || e.type === state.type) && e.find.includes(state.text));
    if (state.order !== "time") {
      const by = state.order === "gap" ? "mean" : "trained";
      shown = [...shown].sort((a, b) => b[by] - a[by] || a.id - b.id);
    }
    count.textContent = shown.length.toLocaleString("en") + (shown.length === 1 ? " episode" : " episodes");
    spacer.style.height = shown.length * ROW + "px";
    const other = !shown.includes(state.episode);
    if (other) { state.episode = shown[0] ?? null; rows.scrollTop = 0; }
    drawRows();
    if (other) await drawDetail();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  };

  const drawRows = () => {
    const first = Math.max(0, Math.floor(rows.scrollTop / ROW) - 4);
    const last = Math.min(shown.length, first + Math.ceil(rows.clientHeight / ROW) + 9);
    const items = [];
    for (let i = first; i < last; i++) items.push(item(shown[i], i));
    spacer.replaceChildren(...items);
    if (!shown.length) spacer.append(el("p", "item note", "No episode fits."));
  };
  const item = (episode, place) => {
    const node = el("div", "item");
    node.dataset.id = episode.id;
    node.style.top = place * ROW + "px";
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", String(episode === state.episode));
    const name = el("div", "name");
    name.append(el("span", "", "#" + episode.id + " " + (episode.goal || episode.task)), el("span", "note", "v" + versions(episode)), outcome(episode));
    const strip = el("div", "strip");
    episode.d.forEach((d, i) => {
      const cell = el("i", "cell" + (episode.u[i] ? " trained" : "") + (episode.who[i] !== "s" ? " teacher" : d === null ? " dead" : ""));
      if (episode.who[i] === "s" && d !== null) cell.style.backgroundColor = colour(d / 1000, loaded.full);
      strip.append(cell);
    });
    node.append(name, strip);
    return node;
  };
  const versions = (episode) => {
    const first = Math.min(...episode.v), last = Math.max(...episode.v);
    return !episode.v.length ? "?" : first === last ? first : first + "-" + last;
  };
  const choose = (episode) => { state.episode = episode; drawRows(); detail.scrollTop = 0; return drawDetail(); };
  rows.addEventListener("scroll", drawRows, { passive: true });
  rows.addEventListener("click", (event) => {
    const node = event.target.closest(".item[data-id]");
    if (node) choose(shown.find((e) => String(e.id) === node.dataset.id));
  });
  rows.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(shown.length - 1, shown.indexOf(state.episode) + move));
    if (place * ROW < rows.scrollTop) rows.scrollTop = place * ROW;
    if ((place + 1) * ROW > rows.scrollTop + rows.clientHeight) rows.scrollTop = (place + 1) * ROW - rows.clientHeight;
    choose(shown[place]);
  });

  // --- one episode
  const drawDetail = async () => {
    const episode = state.episode, run = loaded;
    if (!episode) return detail.replaceChildren(el("p", "note", "No episode."));
    const text = await textOf(run, episode);
    if (episode !== state.episode) return;
    const facts = el("div", "goal note");
    const attempt = episode.attempt ? `, attempt ${episode.attempt + 1}` : "";
    facts.append(`${episode.task}${attempt} · ${episode.d.length} turns, ${episode.trained} trained · score ${episode.score} · `, outcome(episode));
    const scale = el("div", "scale note");
    scale.append(el("span", "", "-" + run.full.toFixed(2)), el("i", "ramp"), el("span", "", "+" + run.full.toFixed(2) + " nats per token"));
    const nodes = [el("h3", "", "#" + episode.id + " " + (episode.goal || episode.task)), facts, scale];
    if (!text) nodes.push(el("p", "note", "The texts of this episode are not in this page, which carries an even sample of them."));
    episode.d.forEach((_, i) => nodes.push(turnBox(run, episode, text, i)));
    if (text?.end) nodes.push(el("pre", "obs end", text.end));
    detail.replaceChildren(...nodes);
  };

  const turnBox = (run, episode, text, i) => {
    const d = episode.d[i], student = episode.who[i] === "s", valid = episode.ok[i] === "1";
    const box = el("div", "turn");
    if (student && d !== null) box.style.borderLeftColor = colour(d / 1000, run.full);
    else if (!student) box.classList.add("other");
    const meta = el("div", "meta");
    meta.append(el("span", "", "turn " + (i + 1)), el("span", student ? "" : "who", ACTORS[episode.who[i]] ?? "other"), el("span", "", "version " + episode.v[i]), el("span", "", episode.n[i] + " tokens"));
    if (d !== null) meta.append(el("span", "", "disagreement " + signed(d / 1000)));
    const why = episode.why[i];
    if (episode.u[i]) meta.append(el("span", "trained", "trained at update " + episode.u[i]));
    else if (student) meta.append(el("span", "", why ? "no loss: " + why.replaceAll("_", " ") : "not trained"));
    if (!valid) meta.append(el("span", "outcome", "invalid action"));
    box.append(meta);
    if (!text) return box;
    const action = el("pre", "act" + (valid ? "" : " bad"), text.a[i]);
    box.append(el("pre", "obs", text.o[i]), action);
    if (!text.t[i].length) return box;
    const toggle = el("button", "more", "tokens");
    toggle.type = "button";
    toggle.setAttribute("aria-expanded", "false");
    meta.append(toggle);
    let tokens = null;
    const flip = () => {
      if (tokens) { tokens.remove(); tokens = null; } else { tokens = tokenBox(run, text.t[i], text.g[i], episode.n[i]); box.append(tokens); }
      toggle.setAttribute("aria-expanded", String(Boolean(tokens)));
    };
    toggle.addEventListener("click", (event) => { event.stopPropagation(); flip(); });
    meta.addEventListener("click", flip);
    action.addEventListener("click", flip);
    return box;
  };

  const tokenBox = (run, ids, gaps, all) => {
    const box = el("div", "tokens");
    ids.forEach((id, place) => {
      const gap = gaps[place] ?? null;
      const word = run.words[id];
      const node = el("span", "token" + (gap === null ? " none" : ""), word === undefined ? "[" + id + "]" : word.replaceAll("\n", "\u23ce\n") || "\u2205");
      if (gap !== null) node.style.backgroundColor = colour(gap * unit, FULL_TOKEN);
      node.dataset.tip = `token ${place + 1}, id ${id}: ` + (gap === null ? "no loss" : signed(gap * unit) + " nats");
      box.append(node);
    });
    if (all > ids.length) box.append(el("span", "note", ` ... ${all - ids.length} more tokens`));
    const numbers = gaps.filter((gap) => gap !== null);
    if (numbers.length) {
      const sum = numbers.reduce((a, b) => a + b, 0) * unit;
      box.append(el("div", "note", `student minus teacher log-prob: sum ${signed(sum)}, largest ${signed(Math.max(...numbers) * unit)}, least ${signed(Math.min(...numbers) * unit)} nats`));
    }
    return box;
  };
  detail.addEventListener("pointermove", (event) => {
    const text = event.target.dataset?.tip;
    if (text) showTip(event, el("div", "", text)); else tip.hidden = true;
  });
  detail.addEventListener("pointerleave", () => { tip.hidden = true; });
  refresh();
})();
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
