"use strict";
// The dashboard: polls for changes once per second and updates only what changed. All content from files is set as text.
(() => {
  const { $, h, setText, render, columnClass, renderHead, showFigures } = elements;
  const ACTIVE = ["starting", "running", "stopping"];
  const PERCENT_METRICS = ["accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "auc", "auc_absent_zero"];
  const runs = new Map(); // name -> row
  const selected = new Set(); // names of runs to compare
  let version = "", order = { key: "last_update", descending: true }, view = {};

  // ---- formatting

  const formatScore = (value, metric) => value === null || value === undefined ? "–"
    : PERCENT_METRICS.includes(metric) ? `${(100 * value).toFixed(1)} %` : Number(value.toPrecision(4)).toString();
  function formatDuration(seconds) {
    if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const formatAge = (time) => time ? `${formatDuration(Date.now() / 1000 - time)} ago` : "";
  function remaining(row) {
    if (row.state === "stopping") return "finishing its round";
    if (row.state === "starting") return "loading data";
    if (row.estimated_end === null) return row.state === "running" ? "first round" : "";
    const seconds = row.estimated_end - Date.now() / 1000;
    return row.round >= row.rounds ? "saving models" : seconds > 0 ? `${formatDuration(seconds)} left` : `last round ${formatAge(row.last_update)}`;
  }
  function clientProblems(row) {
    const counts = [[row.diverged, "diverged"], [row.failed, "failed"], [row.missed, "missed rounds"]];
    const parts = counts.filter(([count]) => count).map(([count, what]) => `${count} ${what}`);
    return parts.length ? `Clients: ${parts.join(", ")}` : "";
  }
  const problemClass = (row) => row.diverged || row.failed ? "trouble" : "quiet"; // missed rounds may be simulated
  const address = (parameters) => `#${new URLSearchParams(parameters)}`;
  function announce(message) { $("announce").textContent = message; }

  // ---- the server

  async function get(path, parameters = {}) {
    const query = new URLSearchParams(parameters).toString();
    return result(await fetch(`/api/${path}${query ? `?${query}` : ""}`));
  }
  async function post(path, body) {
    const headers = { "Content-Type": "application/json" };
    return result(await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
  }
  async function result(response) {
    const found = await response.json();
    if (!response.ok || found.error) throw Object.assign(new Error(found.error || "The request failed."), { fromServer: true });
    return found;
  }

  async function poll() {
    let wait = document.hidden ? 5000 : 1000;
    try {
      const found = await get("runs", { since: version });
      setText($("connection"), "");
      setText($("folder"), found.folder);
      if (found.complete) runs.clear();
      found.removed.forEach((name) => { runs.delete(name); selected.delete(name); });
      found.runs.forEach(updateRow);
      const changed = found.complete || found.runs.length || found.removed.length;
      const showInitialRun = version === "" && found.initial_run && !location.hash;
      version = found.version;
      if (showInitialRun) { history.pushState(null, "", address({ run: found.initial_run })); route(false); } // location.hash would move the focus
      if (changed) { showList(); await refresh(found.runs); }
      if (found.runs.some((row) => row.reading)) wait = 300;
    } catch (error) {
      setText($("connection"), error.fromServer ? error.message : "The server does not respond. Experiments continue without it.");
      wait = 3000;
    }
    setTimeout(poll, wait);
  }
  function updateRow(row) {
    const before = runs.get(row.name);
    runs.set(row.name, row);
    if (before && before.state !== row.state) announce(`${row.name}: ${row.state}. ${row.message}`);
    else if (before && view.run === row.name && Math.floor(10 * before.round / row.rounds) < Math.floor(10 * row.round / row.rounds))
      announce(`Round ${row.round} of ${row.rounds}, ${remaining(row)}`);
  }
  async function refresh(changed) {
    const names = changed.map((row) => row.name);
    if (view.kind === "run" && names.includes(view.run)) await openRun(view.run);
    if (view.kind === "client" && names.includes(view.run)) await openClient(view.run, view.client);
    if (view.kind === "comparison" && view.runs.some((name) => names.includes(name))) compareLater();
  }

  // ---- list of runs

  // By last round, active runs count as equal: otherwise they would change places every second.
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
    { key: "last_update", title: "last round", of: (r) => ACTIVE.includes(r.state) ? Number.MAX_VALUE : r.last_update, number: true, wide: true },
  ];
  function sortBy(key) {
    order = { key, descending: order.key === key ? !order.descending : ["trained", "received", "last_update", "round"].includes(key) };
    showList();
  }
  function sortRows(rows) {
    const of = COLUMNS.find((column) => column.key === order.key).of;
    const known = (value) => value !== null && value !== undefined;
    return rows.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (known(x) !== known(y)) return known(x) ? -1 : 1; // unknown values last
      const sign = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return (order.descending ? -sign : sign) || a.name.localeCompare(b.name, undefined, { numeric: true });
    });
  }

  function showList() {
    const all = [...runs.values()];
    const active = all.filter((row) => ACTIVE.includes(row.state)).sort((a, b) => a.name.localeCompare(b.name));
    render($("running"), active.map((row) => ({ key: row.name, value: row })), runCard);
    $("idle").hidden = active.length > 0;
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.name} ${row.state} ${row.method} ${row.data} seed ${row.seed}`.toLowerCase();
    const shown = sortRows(all.filter((row) => words.every((word) => text(row).includes(word))));
    renderHead($("runs"), COLUMNS, order, sortBy, [h("th", { scope: "col", class: "select" }, h("span", { class: "hidden" }, "select"))]);
    render($("runs").tBodies[0], shown.map((row) => ({ key: row.name, value: { ...row, selected: selected.has(row.name), version: 0 } })), runRow);
    $("empty").hidden = all.length > 0 || version === "";
    const button = $("compare");
    button.setAttribute("aria-disabled", String(selected.size < 2));
    setText(button, selected.size ? `Compare ${selected.size} selected ${selected.size === 1 ? "run" : "runs"}` : "Compare selected runs");
    updateTimes();
  }
  function runRow(row) {
    const box = h("input", { type: "checkbox", "aria-label": `Select ${row.name}`, onchange: () => {
      if (box.checked) selected.add(row.name); else selected.delete(row.name);
      showList();
    } });
    box.checked = row.selected;
    const cells = {
      state: h("span", { class: `state ${row.state}` }, row.reading && !ACTIVE.includes(row.state) ? "reading …" : row.state),
      round: `${row.round}/${row.rounds}`, method: row.method, data: row.data, clients: row.clients ?? "–", seed: row.seed,
      trained: formatScore(row.trained, row.score), received: formatScore(row.received, row.score), last_update: h("span", { "data-time": row.last_update }, formatAge(row.last_update)),
    };
    return h("tr", { "data-run": row.name, "data-state": row.state }, h("td", { class: "select" }, h("label", {}, box)),
      COLUMNS.map((column) => column.key === "name"
        ? h("th", { scope: "row" }, h("a", { href: address({ run: row.name }) }, row.name), clientProblems(row) ? h("div", { class: problemClass(row) }, h("small", {}, clientProblems(row))) : null)
        : h("td", { class: columnClass(column) }, cells[column.key])));
  }
  function runCard(row) {
    return h("li", { "data-run": row.name }, h("div", { class: "head" },
      h("h3", {}, h("a", { href: address({ run: row.name }) }, row.name)), h("strong", {}, formatScore(row[row.ranked_by], row.score))),
    sparkline(row), progressBar(row), clientProblems(row) ? h("p", { class: problemClass(row) }, clientProblems(row)) : null);
  }
  function sparkline(row) {
    const values = (row.sparkline || []).filter((value) => value !== null);
    if (values.length < 2) return null;
    const low = Math.min(...values), high = Math.max(...values), namespace = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(namespace, "svg"), path = document.createElementNS(namespace, "polyline");
    const width = 100 * Math.max(row.round / row.rounds, 0.02);
    path.setAttribute("points", values.map((value, i) => `${(width * i / (values.length - 1)).toFixed(2)},${(28 - 26 * (high > low ? (value - low) / (high - low) : 0.5)).toFixed(2)}`).join(" "));
    svg.setAttribute("viewBox", "0 0 100 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "sparkline");
    svg.setAttribute("aria-hidden", "true");
    svg.append(path);
    return svg;
  }
  function progressBar(row) {
    const bar = h("div");
    bar.style.transform = `scaleX(${row.rounds ? Math.min(row.round / row.rounds, 1) : 0})`;
    return h("div", {}, h("div", { class: "meter", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": row.rounds, "aria-valuenow": row.round,
      "aria-label": `Rounds of ${row.name}` }, bar), h("p", {}, h("span", {}, `round ${row.round} of ${row.rounds}`), h("span", { "data-remaining": row.name }, remaining(row))));
  }
  function updateTimes() {
    document.querySelectorAll("[data-remaining]").forEach((element) => { const row = runs.get(element.dataset.remaining); if (row) setText(element, remaining(row)); });
    document.querySelectorAll("[data-time]").forEach((element) => setText(element, formatAge(Number(element.dataset.time))));
  }

  // ---- one run

  const list = { sort: "number", descending: false, page: 0 }; // of clients
  const PROBLEM_COLUMNS = [{ key: "name", title: "client" }, { key: "kind", title: "problem" }, { key: "count", title: "rounds", number: true }, { key: "last_round", title: "last in round", number: true }, { key: "reason", title: "reason" }];
  const CLIENT_COLUMNS = [{ key: "name", title: "client" }, { key: "train", title: "training samples", number: true }, { key: "test", title: "test samples", number: true, wide: true },
    { key: "received", title: "received", number: true, wide: true }, { key: "trained", title: "trained", number: true }, { key: "failed", title: "failed", number: true }, { key: "missed", title: "missed", number: true }];

  async function openRun(name) {
    let found;
    try { found = await get("run", { run: name }); } catch (error) { setText($("run-error"), error.message); return; }
    if (view.kind !== "run" || view.run !== name) return;
    const row = found.row;
    document.title = `${row.round}/${row.rounds} ${name}`;
    setText($("run-title"), name);
    setText($("run-summary"), row.state === "unreadable" ? "" : found.summary);
    setText($("run-error"), row.state === "unreadable" ? row.message : "");
    render($("run-progress"), ACTIVE.includes(row.state) ? [{ key: name, value: row }] : [], progressBar);
    $("run-message").hidden = !row.message || row.state === "unreadable";
    $("run-message").className = row.state;
    setText($("run-message"), row.message);
    showButtons(row);
    showFigures($("run-figures"), found.figures);
    $("problems-section").hidden = found.problems.length === 0;
    setText($("problems-title"), found.problems.every((one) => one.kind === "missed") ? "Clients that missed rounds" : "Clients with problems");
    renderHead($("problems"), PROBLEM_COLUMNS);
    render($("problems").tBodies[0], found.problems.map((one) => ({ key: `${one.kind} ${one.number}`, value: one })), (one) => h("tr", {}, PROBLEM_COLUMNS.map((column) =>
      column.key === "name" ? h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name)) : h("td", { class: columnClass(column) }, String(one[column.key])))));
    renderHead($("settings"), [{ key: "name", title: "setting" }, { key: "value", title: "value" }]);
    render($("settings").tBodies[0], Object.entries(found.settings).map((pair) => ({ key: pair[0], value: pair })), ([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, String(value))));
    $("clients-section").hidden = row.clients === null;
    if (row.clients !== null) await showClients();
  }
  function showButtons(row) {
    const buttons = [];
    if (ACTIVE.includes(row.state) && row.can_stop) buttons.push([row.state === "stopping" ? "Stop immediately" : "Stop", "stop"]);
    if (["stopped", "failed"].includes(row.state)) buttons.push([row.round || row.clients ? "Resume" : "Retry", "resume"]);
    if (["stopped", "failed"].includes(row.state) && row.clients === null) buttons.push(["Remove from list", "remove"]);
    render($("run-buttons"), [{ key: "state", value: [row.state] }, ...buttons.map((value) => ({ key: value[1], value }))], ([title, action]) => action
      ? h("button", { type: "button", id: `do-${action}`, onclick: () => act(action, row.name) }, title) : h("span", { class: `state ${title}` }, title));
  }
  async function act(action, name) {
    try {
      await post(action, { run: name });
      setText($("run-error"), "");
      if (action === "remove") location.hash = "";
    } catch (error) { setText($("run-error"), error.message); }
  }
  async function showClients() {
    const name = view.run;
    const found = await get("clients", { run: name, sort: list.sort, descending: list.descending ? 1 : 0, page: list.page, query: $("filter-clients").value });
    if (view.run !== name) return;
    list.page = found.page;
    renderHead($("clients"), CLIENT_COLUMNS, { key: list.sort, descending: list.descending }, (key) => { Object.assign(list, { descending: list.sort === key ? !list.descending : false, sort: key, page: 0 }); showClients(); });
    render($("clients").tBodies[0], found.rows.map((one) => ({ key: one.number, value: { ...one, run: name } })), (one) => h("tr", { "data-client": one.number }, CLIENT_COLUMNS.map((column) =>
      column.key === "name" ? h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name))
        : h("td", { class: columnClass(column) }, ["received", "trained"].includes(column.key) ? formatScore(one[column.key], found.score) : String(one[column.key])))));
    setText($("page-number"), `page ${found.page + 1} of ${found.pages} (${found.total} ${found.total === 1 ? "client" : "clients"})`);
    $("previous").disabled = found.page === 0;
    $("next").disabled = found.page + 1 >= found.pages;
  }

  // ---- one client, a comparison

  async function openClient(name, number) {
    const found = await get("client", { run: name, client: number }).catch((error) => ({ error: error.message }));
    if (view.kind !== "client" || view.run !== name || view.client !== number) return;
    $("client-back").href = address({ run: name });
    setText($("client-back"), `← ${name}`);
    if (found.error) { setText($("client-title"), `Client ${number}`); setText($("client-summary"), found.error); return; }
    setText($("client-title"), found.name);
    const samples = [[found.train, "training"], [found.test, "test"], [found.validation, "validation"]].filter(([count, what]) => count || what !== "validation");
    setText($("client-summary"), `${samples.map(([count, what]) => `${count.toLocaleString("en")} ${what} samples`).join(", ")}.`);
    render($("client-problems"), found.problems.map((problem) => ({ key: problem, value: problem })), (problem) => h("li", { class: "trouble" }, `This client ${problem}`));
    showFigures($("client-figures"), found.figures);
    setText($("neighbors-summary"), found.neighbors.summary);
    const percent = (value) => value === null ? "–" : `${(100 * value).toFixed(1)} %`;
    renderHead($("neighbors"), [{ key: "name", title: "client" }, { key: "weight", title: "weight", number: true }, { key: "similarity", title: "class similarity", number: true }]);
    render($("neighbors").tBodies[0], found.neighbors.rows.map((one) => ({ key: one.number, value: { ...one, run: name } })), (one) => h("tr", {},
      h("th", { scope: "row" }, h("a", { href: address({ run: name, client: one.number }) }, one.name)), h("td", { class: "number" }, percent(one.weight)), h("td", { class: "number" }, percent(one.similarity))));
  }
  // A comparison is the server's slowest request, so active runs update it at most every five seconds.
  let comparedAt = 0, timer = 0;
  function compareLater() {
    clearTimeout(timer);
    timer = setTimeout(() => { if (view.kind === "comparison") openComparison(view.runs); }, Math.max(comparedAt + 5000 - Date.now(), 0));
  }
  async function openComparison(names) {
    comparedAt = Date.now();
    let found = { summary: [], figures: [] };
    try {
      found = await get("comparison", names.map((name) => ["run", name]));
      setText($("comparison-error"), "");
    } catch (error) { setText($("comparison-error"), error.message); }
    if (view.kind !== "comparison" || view.runs !== names) return;
    render($("comparison-names"), names.map((name) => ({ key: name, value: name })), (name) => h("li", {}, h("a", { href: address({ run: name }) }, name)));
    render($("comparison-summary"), found.summary.map((sentence, index) => ({ key: index, value: sentence })), (sentence) => h("p", { class: "answer" }, sentence));
    showFigures($("comparison-figures"), found.figures);
  }

  // ---- navigation

  const form = newForm({ $, h, setText, get, post, announce, onStarted: (name) => { location.hash = address({ run: name }); } });

  const SECTIONS = ["list", "run", "client", "comparison", "new"];
  function route(focus = true) {
    const parameters = new URLSearchParams(location.hash.slice(1));
    const before = view;
    if (parameters.has("client")) view = { kind: "client", run: parameters.get("run") || "", client: parameters.get("client") };
    else if (parameters.has("run")) view = { kind: "run", run: parameters.get("run") };
    else if (parameters.has("compare")) view = { kind: "comparison", runs: parameters.getAll("compare") };
    else view = { kind: parameters.has("new") ? "new" : "list" };
    SECTIONS.forEach((name) => { $(name).hidden = name !== view.kind; });
    document.title = "FedTailor live";
    if (view.kind === "run") {
      if (before.run !== view.run) { Object.assign(list, { page: 0, sort: "number", descending: false }); $("filter-clients").value = ""; $("run-buttons").replaceChildren(); }
      setText($("run-title"), view.run); setText($("run-summary"), ""); setText($("run-error"), "");
      openRun(view.run).catch(() => {});
    }
    if (view.kind === "client") openClient(view.run, view.client);
    if (view.kind === "comparison") openComparison(view.runs);
    if (view.kind === "new") form.open();
    if (focus) { scrollTo(0, 0); $(`${view.kind}-title`).focus({ preventScroll: true }); }
  }

  $("filter").addEventListener("input", showList);
  $("filter-clients").addEventListener("input", () => { list.page = 0; showClients(); });
  $("previous").addEventListener("click", () => { list.page -= 1; showClients(); });
  $("next").addEventListener("click", () => { list.page += 1; showClients(); });
  $("compare").addEventListener("click", () => { if (selected.size > 1) location.hash = `#${new URLSearchParams([...selected].map((name) => ["compare", name]))}`; });
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  window.addEventListener("hashchange", () => route());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) updateTimes(); });
  if (location.search) history.replaceState(null, "", `/${location.hash}`); // remove the token from the URL; the cookie has it
  setInterval(updateTimes, 1000);
  route(false);
  poll();
})();
