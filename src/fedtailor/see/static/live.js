"use strict";
// The live page: asks once a second what changed, redraws only that. Everything that comes from files becomes text.
(() => {
  const { $, h, write, fill, kind, heads, showFigures } = elements;
  const ACTIVE = ["starting", "running", "stopping"];
  const SHARES = ["accuracy", "macro_f1", "auc"]; // shown in %
  const runs = new Map(); // name -> its row
  const ticked = new Set();
  let version = "", sorted = { key: "at", down: true }, view = {};

  // ---- numbers for people

  const score = (value, name) => value === null || value === undefined ? "–"
    : SHARES.includes(name) ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(4)).toString();
  function duration(seconds) {
    if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const ago = (at) => at ? `${duration(Date.now() / 1000 - at)} ago` : "";
  function left(row) {
    if (row.state === "stopping") return "finishing its round";
    if (row.state === "starting") return "loading data";
    if (row.until === null) return row.state === "running" ? "first round" : "";
    const rest = row.until - Date.now() / 1000;
    return row.round >= row.rounds ? "saving models" : rest > 0 ? `${duration(rest)} left` : `last round ${ago(row.at)}`;
  }
  function troubles(row) {
    const some = [[row.diverged, "diverged"], [row.failed, "failed"], [row.missed, "missed rounds"]];
    const said = some.filter(([count]) => count).map(([count, what]) => `${count} ${what}`);
    return said.length ? `Clients: ${said.join(", ")}` : "";
  }
  const weight = (row) => row.diverged || row.failed ? "trouble" : "quiet"; // who is simulated to be away is no trouble
  const address = (given) => `#${new URLSearchParams(given)}`;
  function announce(words) { $("announce").textContent = words; }

  // ---- the server

  async function ask(path, given = {}) {
    const query = new URLSearchParams(given).toString();
    return answer(await fetch(`/api/${path}${query ? `?${query}` : ""}`));
  }
  async function tell(path, given) {
    const headers = { "Content-Type": "application/json" };
    return answer(await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(given) }));
  }
  async function answer(response) {
    const found = await response.json();
    if (!response.ok || found.refused) throw Object.assign(new Error(found.refused || "The server refused."), { refused: true });
    return found;
  }

  async function poll() {
    let wait = document.hidden ? 5000 : 1000;
    try {
      const found = await ask("runs", { since: version });
      write($("connection"), "");
      write($("folder"), found.folder);
      if (found.all) runs.clear();
      found.gone.forEach((name) => { runs.delete(name); ticked.delete(name); });
      found.runs.forEach(notice);
      const changed = found.all || found.runs.length || found.gone.length;
      const first = version === "" && found.first && !location.hash;
      version = found.version;
      if (first) location.hash = address({ run: found.first });
      if (changed) { showList(); await refresh(found.runs); }
      if (found.runs.some((row) => row.reading)) wait = 300;
    } catch (error) {
      write($("connection"), error.refused ? error.message : "The server does not answer; experiments go on without it.");
      wait = 3000;
    }
    setTimeout(poll, wait);
  }
  function notice(row) {
    const before = runs.get(row.name);
    runs.set(row.name, row);
    if (before && before.state !== row.state) announce(`${row.name}: ${row.state}. ${row.words}`);
    else if (before && view.run === row.name && Math.floor(10 * before.round / row.rounds) < Math.floor(10 * row.round / row.rounds))
      announce(`Round ${row.round} of ${row.rounds}, ${left(row)}`);
  }
  async function refresh(changed) {
    const names = changed.map((row) => row.name);
    if (view.kind === "run" && names.includes(view.run)) await openRun(view.run);
    if (view.kind === "client" && names.includes(view.run)) await openClient(view.run, view.client);
    if (view.kind === "comparison" && view.runs.some((name) => names.includes(name))) compareLater();
  }

  // ---- the list

  // Runs that go on all have their last round just now: they would change places every second, under the reader's hand.
  const COLUMNS = [
    { key: "name", title: "run", of: (r) => r.name },
    { key: "state", title: "state", of: (r) => r.state },
    { key: "round", title: "round", of: (r) => r.round / r.rounds, number: true, wide: true },
    { key: "method", title: "method", of: (r) => r.method, wide: true },
    { key: "data", title: "data", of: (r) => r.data, wide: true },
    { key: "clients", title: "clients", of: (r) => r.clients, number: true, wide: true, desk: true },
    { key: "seed", title: "seed", of: (r) => r.seed, number: true, wide: true, desk: true },
    { key: "trained", title: "trained", of: (r) => r.trained, number: true },
    { key: "received", title: "received", of: (r) => r.received, number: true, wide: true },
    { key: "at", title: "last round", of: (r) => ACTIVE.includes(r.state) ? Number.MAX_VALUE : r.at, number: true, wide: true },
  ];
  function sortBy(key) {
    sorted = { key, down: sorted.key === key ? !sorted.down : ["trained", "received", "at", "round"].includes(key) };
    showList();
  }
  function ordered(rows) {
    const of = COLUMNS.find((column) => column.key === sorted.key).of;
    const known = (value) => value !== null && value !== undefined;
    return rows.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (known(x) !== known(y)) return known(x) ? -1 : 1; // what is not known comes last
      const side = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return (sorted.down ? -side : side) || a.name.localeCompare(b.name, undefined, { numeric: true });
    });
  }

  function showList() {
    const all = [...runs.values()];
    const active = all.filter((row) => ACTIVE.includes(row.state)).sort((a, b) => a.name.localeCompare(b.name));
    fill($("running"), active.map((row) => ({ key: row.name, value: row })), card);
    $("idle").hidden = active.length > 0;
    const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.name} ${row.state} ${row.method} ${row.data} seed ${row.seed}`.toLowerCase();
    const shown = ordered(all.filter((row) => words.every((word) => text(row).includes(word))));
    heads($("runs"), COLUMNS, sorted, sortBy, [h("th", { scope: "col", class: "tick" }, h("span", { class: "hidden" }, "tick"))]);
    fill($("runs").tBodies[0], shown.map((row) => ({ key: row.name, value: { ...row, ticked: ticked.has(row.name), version: 0 } })), line);
    $("none").hidden = all.length > 0 || version === "";
    const button = $("compare");
    button.setAttribute("aria-disabled", String(ticked.size < 2));
    write(button, ticked.size ? `Compare ${ticked.size} ticked ${ticked.size === 1 ? "run" : "runs"}` : "Compare ticked runs");
    tickClock();
  }
  function line(row) {
    const box = h("input", { type: "checkbox", "aria-label": `tick ${row.name}`, onchange: () => {
      if (box.checked) ticked.add(row.name); else ticked.delete(row.name);
      showList();
    } });
    box.checked = row.ticked;
    const cells = {
      state: h("span", { class: `state ${row.state}` }, row.reading && !ACTIVE.includes(row.state) ? "reading …" : row.state),
      round: `${row.round}/${row.rounds}`, method: row.method, data: row.data, clients: row.clients ?? "–", seed: row.seed,
      trained: score(row.trained, row.score), received: score(row.received, row.score), at: h("span", { "data-at": row.at }, ago(row.at)),
    };
    return h("tr", { "data-run": row.name, "data-state": row.state }, h("td", { class: "tick" }, h("label", {}, box)),
      COLUMNS.map((column) => column.key === "name"
        ? h("th", { scope: "row" }, h("a", { href: address({ run: row.name }) }, row.name), troubles(row) ? h("div", { class: weight(row) }, h("small", {}, troubles(row))) : null)
        : h("td", { class: kind(column) }, cells[column.key])));
  }
  function card(row) {
    return h("li", { "data-run": row.name }, h("div", { class: "head" },
      h("h3", {}, h("a", { href: address({ run: row.name }) }, row.name)), h("strong", {}, score(row.trained ?? row.received, row.score))),
    spark(row), meter(row), troubles(row) ? h("p", { class: weight(row) }, troubles(row)) : null);
  }
  function spark(row) {
    const values = (row.spark || []).filter((value) => value !== null);
    if (values.length < 2) return null;
    const low = Math.min(...values), high = Math.max(...values), all = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(all, "svg"), path = document.createElementNS(all, "polyline");
    const width = 100 * Math.max(row.round / row.rounds, 0.02);
    path.setAttribute("points", values.map((value, i) => `${(width * i / (values.length - 1)).toFixed(2)},${(28 - 26 * (high > low ? (value - low) / (high - low) : 0.5)).toFixed(2)}`).join(" "));
    picture.setAttribute("viewBox", "0 0 100 30");
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("class", "spark");
    picture.setAttribute("aria-hidden", "true");
    picture.append(path);
    return picture;
  }
  function meter(row) {
    const bar = h("div");
    bar.style.transform = `scaleX(${row.rounds ? Math.min(row.round / row.rounds, 1) : 0})`;
    return h("div", {}, h("div", { class: "meter", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": row.rounds, "aria-valuenow": row.round,
      "aria-label": `rounds of ${row.name}` }, bar), h("p", {}, h("span", {}, `round ${row.round} of ${row.rounds}`), h("span", { "data-left": row.name }, left(row))));
  }
  function tickClock() {
    document.querySelectorAll("[data-left]").forEach((element) => { const row = runs.get(element.dataset.left); if (row) write(element, left(row)); });
    document.querySelectorAll("[data-at]").forEach((element) => write(element, ago(Number(element.dataset.at))));
  }

  // ---- one run

  const list = { sort: "number", down: false, page: 0 };
  const LOST = [{ key: "name", title: "client" }, { key: "kind", title: "what" }, { key: "times", title: "rounds", number: true }, { key: "round", title: "last in round", number: true }, { key: "why", title: "why" }];
  const CLIENTS = [{ key: "name", title: "client" }, { key: "train", title: "training", number: true }, { key: "test", title: "test", number: true, wide: true },
    { key: "received", title: "received", number: true, wide: true }, { key: "trained", title: "trained", number: true }, { key: "failed", title: "failed", number: true }, { key: "missed", title: "missed", number: true }];

  async function openRun(name) {
    let found;
    try { found = await ask("run", { run: name }); } catch (error) { write($("run-refusal"), error.message); return; }
    if (view.kind !== "run" || view.run !== name) return;
    const row = found.row;
    document.title = `${row.round}/${row.rounds} ${name}`;
    write($("run-title"), name);
    write($("run-says"), row.state === "unreadable" ? "" : found.says);
    write($("run-refusal"), row.state === "unreadable" ? row.words : "");
    fill($("run-progress"), ACTIVE.includes(row.state) ? [{ key: name, value: row }] : [], meter);
    $("run-words").hidden = !row.words || row.state === "unreadable";
    $("run-words").className = row.state;
    write($("run-words"), row.words);
    buttons(row);
    showFigures($("run-figures"), found.figures);
    $("lost-part").hidden = found.lost.length === 0;
    write($("lost-title"), found.lost.every((one) => one.kind === "missed") ? "Clients that missed rounds" : "Clients in trouble");
    heads($("lost"), LOST);
    fill($("lost").tBodies[0], found.lost.map((one) => ({ key: `${one.kind} ${one.number}`, value: one })), (one) => h("tr", {}, LOST.map((column) =>
      column.key === "name" ? h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name)) : h("td", { class: kind(column) }, String(one[column.key])))));
    heads($("settings"), [{ key: "name", title: "setting" }, { key: "value", title: "value" }]);
    fill($("settings").tBodies[0], Object.entries(found.settings).map((pair) => ({ key: pair[0], value: pair })), ([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, String(value))));
    $("clients-part").hidden = row.clients === null;
    if (row.clients !== null) await showClients();
  }
  function buttons(row) {
    const some = [];
    if (ACTIVE.includes(row.state) && row.can_stop) some.push([row.state === "stopping" ? "Stop at once" : "Stop", "stop"]);
    if (["stopped", "failed"].includes(row.state)) some.push([row.round || row.clients ? "Go on" : "Try again", "resume"]);
    if (["stopped", "failed"].includes(row.state) && row.clients === null) some.push(["Remove from the list", "forget"]);
    fill($("run-buttons"), [{ key: "state", value: [row.state] }, ...some.map((value) => ({ key: value[1], value }))], ([title, what]) => what
      ? h("button", { type: "button", id: `do-${what}`, onclick: () => act(what, row.name) }, title) : h("span", { class: `state ${title}` }, title));
  }
  async function act(what, name) {
    try {
      await tell(what, { run: name });
      write($("run-refusal"), "");
      if (what === "forget") location.hash = "";
    } catch (error) { write($("run-refusal"), error.message); }
  }
  async function showClients() {
    const name = view.run;
    const found = await ask("clients", { run: name, sort: list.sort, down: list.down ? 1 : 0, page: list.page, find: $("find-client").value });
    if (view.run !== name) return;
    list.page = found.page;
    heads($("clients"), CLIENTS, { key: list.sort, down: list.down }, (key) => { Object.assign(list, { down: list.sort === key ? !list.down : false, sort: key, page: 0 }); showClients(); });
    fill($("clients").tBodies[0], found.rows.map((one) => ({ key: one.number, value: { ...one, run: name } })), (one) => h("tr", { "data-client": one.number }, CLIENTS.map((column) =>
      column.key === "name" ? h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name))
        : h("td", { class: kind(column) }, ["received", "trained"].includes(column.key) ? score(one[column.key], found.score) : String(one[column.key])))));
    write($("page-number"), `${found.page + 1} of ${found.pages} (${found.total} clients)`);
    $("before").disabled = found.page === 0;
    $("after").disabled = found.page + 1 >= found.pages;
  }

  // ---- a client, a comparison

  async function openClient(name, number) {
    const found = await ask("client", { run: name, client: number }).catch((error) => ({ refused: error.message }));
    if (view.kind !== "client" || view.run !== name || view.client !== number) return;
    $("client-back").href = address({ run: name });
    write($("client-back"), `← ${name}`);
    if (found.refused) { write($("client-title"), `Client ${number}`); write($("client-about"), found.refused); return; }
    write($("client-title"), found.name);
    const held = found.validation ? `, ${found.validation.toLocaleString("en")} held out to choose a round by` : "";
    write($("client-about"), `${found.train.toLocaleString("en")} training samples, ${found.test.toLocaleString("en")} to be tested on${held}.`);
    fill($("client-lost"), found.lost.map((words) => ({ key: words, value: words })), (words) => h("li", { class: "trouble" }, `It ${words}`));
    showFigures($("client-figures"), found.figures);
    write($("neighbours-says"), found.neighbours.says);
    const share = (value) => value === null ? "–" : `${(100 * value).toFixed(1)} %`;
    heads($("neighbours"), [{ key: "name", title: "client" }, { key: "share", title: "share in what it gets", number: true }, { key: "alike", title: "classes alike", number: true }]);
    fill($("neighbours").tBodies[0], found.neighbours.rows.map((one) => ({ key: one.number, value: { ...one, run: name } })), (one) => h("tr", {},
      h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name)), h("td", { class: "number" }, share(one.share)), h("td", { class: "number" }, share(one.alike))));
  }
  // A comparison takes the server longest, so a run that goes on asks for it only now and then.
  let compared = 0, waiting = 0;
  function compareLater() {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (view.kind === "comparison") openComparison(view.runs); }, Math.max(compared + 5000 - Date.now(), 0));
  }
  async function openComparison(names) {
    compared = Date.now();
    let found = { says: [], figures: [] };
    try {
      found = await ask("compared", names.map((name) => ["run", name]));
      write($("comparison-refusal"), "");
    } catch (error) { write($("comparison-refusal"), error.message); }
    if (view.kind !== "comparison" || view.runs !== names) return;
    fill($("comparison-names"), names.map((name) => ({ key: name, value: name })), (name) => h("li", {}, h("a", { href: address({ run: name }) }, name)));
    fill($("comparison-says"), found.says.map((words, place) => ({ key: place, value: words })), (words) => h("p", { class: "answer" }, words));
    showFigures($("comparison-figures"), found.figures);
  }

  // ---- views

  const form = newForm({ $, h, write, ask, tell, announce, started: (name) => { location.hash = address({ run: name }); } });

  const SECTIONS = ["list", "run", "client", "comparison", "new"];
  function route(focus = true) {
    const given = new URLSearchParams(location.hash.slice(1));
    const before = view;
    if (given.has("client")) view = { kind: "client", run: given.get("run") || "", client: given.get("client") };
    else if (given.has("run")) view = { kind: "run", run: given.get("run") };
    else if (given.has("compare")) view = { kind: "comparison", runs: given.getAll("compare") };
    else view = { kind: given.has("new") ? "new" : "list" };
    SECTIONS.forEach((name) => { $(name).hidden = name !== view.kind; });
    document.title = "FedTailor live";
    if (view.kind === "run") {
      if (before.run !== view.run) { Object.assign(list, { page: 0, sort: "number", down: false }); $("find-client").value = ""; $("run-buttons").replaceChildren(); }
      write($("run-title"), view.run); write($("run-says"), ""); write($("run-refusal"), "");
      openRun(view.run).catch(() => {});
    }
    if (view.kind === "client") openClient(view.run, view.client);
    if (view.kind === "comparison") openComparison(view.runs);
    if (view.kind === "new") form.open();
    if (focus) { scrollTo(0, 0); $(`${view.kind === "list" ? "list" : view.kind}-title`).focus({ preventScroll: true }); }
  }

  $("find").addEventListener("input", showList);
  $("find-client").addEventListener("input", () => { list.page = 0; showClients(); });
  $("before").addEventListener("click", () => { list.page -= 1; showClients(); });
  $("after").addEventListener("click", () => { list.page += 1; showClients(); });
  $("compare").addEventListener("click", () => { if (ticked.size > 1) location.hash = `#${new URLSearchParams([...ticked].map((name) => ["compare", name]))}`; });
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  window.addEventListener("hashchange", () => route());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) tickClock(); });
  if (location.search) history.replaceState(null, "", `/${location.hash}`); // the token stays in the cookie alone
  setInterval(tickClock, 1000);
  route(false);
  poll();
})();
