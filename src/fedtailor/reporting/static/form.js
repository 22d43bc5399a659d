"use strict";
// The form for a new experiment: all fields, validated while the user types, and the equivalent command.
const newForm = ({ $, h, setText, get, post, announce, onStarted }) => {
  let schema = null;
  const fieldId = (name) => `field-${name.replaceAll(".", "-")}`;
  function input(field, prefix, value) {
    const name = prefix ? `${prefix}.${field.name}` : field.name, id = fieldId(name);
    const attributes = { id, name, "data-field": name, "aria-describedby": field.help ? `${id}-help` : null };
    let control;
    if (field.type === "choice" || field.type === "method") {
      const others = field.choices.filter((choice) => choice !== field.default);
      control = h("select", attributes, h("option", { value: "" }, `${field.default} (default)`), others.map((choice) => h("option", { value: choice }, choice)));
    } else {
      const list = field.choices.length ? `${id}-list` : null;
      control = h("input", { ...attributes, type: "text", placeholder: field.default, list, spellcheck: "false", inputmode: { integer: "numeric", number: "decimal" }[field.type] });
      if (list) control = [control, h("datalist", { id: list }, field.choices.map((choice) => h("option", { value: choice })))];
    }
    (Array.isArray(control) ? control[0] : control).value = value || "";
    return h("div", { class: "field" }, h("label", { for: id }, field.label), control, field.help ? h("small", { id: `${id}-help` }, field.help) : null);
  }
  // Shows the fields of the selected method, data set, or network. Fields with the same name keep their values.
  function showFields(container, known, name, prefix) {
    const before = values();
    const selected = known[name];
    const fields = selected ? selected.fields : [];
    container.replaceChildren(...(selected ? [h("p", { class: "paper" }, selected.description || "")] : []),
      h("div", { class: "fields" }, fields.map((field) => input(field, prefix, before[`${prefix}.${field.name}`]))));
    fields.filter((field) => field.type === "method").forEach((field) => {
      const path = `${prefix}.${field.name}`, select = $(fieldId(path)), nested = h("div", { class: "inner" });
      const show = () => showFields(nested, known, select.value, path);
      select.addEventListener("change", show);
      container.append(nested);
      if (select.value) show();
    });
  }
  function selectByName(title, key, known, initial, emptyLabel) {
    const container = h("div", { "aria-live": "off" });
    const families = Map.groupBy ? Map.groupBy(Object.keys(known), (name) => known[name].family || "") : new Map([["", Object.keys(known)]]);
    const options = [...families].map(([family, names]) => {
      const group = names.map((name) => h("option", { value: name }, name));
      return family ? h("optgroup", { label: family }, group) : group;
    });
    const select = h("select", { id: fieldId(key), name: key, "data-field": key, onchange: () => showFields(container, known, select.value, key) },
      initial ? [] : h("option", { value: "" }, emptyLabel), options);
    select.value = initial;
    return [h("fieldset", { "data-section": key }, h("legend", {}, title), h("div", { class: "fields" }, h("div", { class: "field" }, h("label", { for: fieldId(key) }, key), select)), container),
      () => showFields(container, known, select.value, key)];
  }
  async function open() {
    if (schema) return;
    const found = await get("form");
    if (schema) return; // opened again while loading
    schema = found;
    const section = Object.fromEntries(schema.sections.map((one) => [one.key, h("fieldset", { "data-section": one.key || "run" }, h("legend", {}, one.title),
      h("div", { class: "fields" }, one.fields.map((field) => input(field, ""))))]));
    const collapsed = (key) => { const title = section[key].querySelector("legend"); title.className = "hidden"; return h("details", {}, h("summary", {}, title.textContent), section[key]); };
    const [method, showMethod] = selectByName("Method", "method", schema.methods, "fedavg", "");
    const [network, showNetwork] = selectByName("Network", "network", schema.networks, "", "suitable for the data (default)");
    const [data, showData] = selectByName("Data", "data", schema.data, "digits", "");
    $("sections").append(method, data, section[""], network, collapsed("augmentation"), collapsed("unreliable"), collapsed("channel"));
    showMethod(); showData(); showNetwork();
    $("form").addEventListener("input", checkLater);
    checkLater();
  }
  const values = () => Object.fromEntries([...$("form").querySelectorAll("[data-field]")].map((control) => [control.dataset.field, control.value]).filter(([, value]) => value.trim()));
  let timer = 0, latestRequest = 0;
  function checkLater() { clearTimeout(timer); timer = setTimeout(check, 250); }
  async function check() {
    const request = ++latestRequest;
    try {
      const found = await post("check", { values: values() });
      if (request === latestRequest) { showError(""); setText($("command"), found.command); }
    } catch (error) { if (request === latestRequest) { showError(error.message); setText($("command"), ""); } }
  }
  // Shows a message and marks the field it mentions: the longest full field name in it, otherwise the first short one.
  function showError(message) {
    setText($("form-error"), message);
    const controls = [...$("form").querySelectorAll("[data-field]")];
    const words = ` ${message.replaceAll(/[^\w.]+/g, " ").replaceAll(/\.(?= |$)/g, " ")} `;
    const full = controls.filter((one) => words.includes(` ${one.dataset.field} `)).sort((a, b) => b.dataset.field.length - a.dataset.field.length)[0];
    const position = (one) => words.indexOf(` ${one.dataset.field.split(".").pop()} `);
    const named = full || controls.filter((one) => position(one) >= 0).sort((a, b) => position(a) - position(b))[0];
    controls.forEach((one) => { if (message && one === named) one.setAttribute("aria-invalid", "true"); else one.removeAttribute("aria-invalid"); });
    return named;
  }
  async function start(event) {
    event.preventDefault();
    clearTimeout(timer);
    latestRequest += 1;
    $("start").disabled = true;
    try {
      const found = await post("start", { values: values() });
      showError("");
      announce(`${found.run} was started`);
      onStarted(found.run);
    } catch (error) {
      $("start").disabled = false; // a disabled button cannot be focused
      const named = showError(error.message);
      (named || $("start")).focus();
      announce(error.message);
    }
    $("start").disabled = false;
  }

  $("form").addEventListener("submit", start);
  return { open };
};
