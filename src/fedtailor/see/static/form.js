"use strict";
// The form of the live page: every field there is, checked while one writes, with the command that does the same.
// It is given what it needs of the page, and tells of the run that it started.
const newForm = ({ $, h, write, ask, tell, announce, started }) => {
  let form = null; // what the server knows of fields
  const identity = (name) => `field-${name.replaceAll(".", "-")}`;
  function input(field, prefix, value) {
    const name = prefix ? `${prefix}.${field.name}` : field.name, id = identity(name);
    const given = { id, name, "data-field": name, "aria-describedby": field.note ? `${id}-note` : null };
    let control;
    if (field.kind === "choice" || field.kind === "method") {
      const others = field.choices.filter((choice) => choice !== field.default);
      control = h("select", given, h("option", { value: "" }, `${field.default} (default)`), others.map((choice) => h("option", { value: choice }, choice)));
    } else {
      const words = field.choices.length ? `${id}-words` : null;
      control = h("input", { ...given, type: "text", placeholder: field.default, list: words, spellcheck: "false", inputmode: { whole: "numeric", number: "decimal" }[field.kind] });
      if (words) control = [control, h("datalist", { id: words }, field.choices.map((choice) => h("option", { value: choice })))];
    }
    (Array.isArray(control) ? control[0] : control).value = value || "";
    return h("div", { class: "field" }, h("label", { for: id }, field.label), control, field.note ? h("small", { id: `${id}-note` }, field.note) : null);
  }
  // The fields of what was chosen by name; what was written into fields of the same name before stays.
  function chosenFields(place, known, name, prefix) {
    const before = values();
    const chosen = known[name];
    const own = chosen ? chosen.fields : [];
    place.replaceChildren(...(chosen ? [h("p", { class: "paper" }, chosen.about || "")] : []),
      h("div", { class: "fields" }, own.map((field) => input(field, prefix, before[`${prefix}.${field.name}`]))));
    own.filter((field) => field.kind === "method").forEach((field) => {
      const path = `${prefix}.${field.name}`, select = $(identity(path)), inside = h("div", { class: "inner" });
      const show = () => chosenFields(inside, known, select.value, path);
      select.addEventListener("change", show);
      place.append(inside);
      if (select.value) show();
    });
  }
  function byName(title, key, known, initial, note) {
    const inside = h("div", { "aria-live": "off" });
    const families = Map.groupBy ? Map.groupBy(Object.keys(known), (name) => known[name].family || "") : new Map([["", Object.keys(known)]]);
    const options = [...families].map(([family, names]) => {
      const some = names.map((name) => h("option", { value: name }, name));
      return family ? h("optgroup", { label: family }, some) : some;
    });
    const select = h("select", { id: identity(key), name: key, "data-field": key, onchange: () => chosenFields(inside, known, select.value, key) },
      initial ? [] : h("option", { value: "" }, note), options);
    select.value = initial;
    return [h("fieldset", { "data-part": key }, h("legend", {}, title), h("div", { class: "fields" }, h("div", { class: "field" }, h("label", { for: identity(key) }, key), select)), inside),
      () => chosenFields(inside, known, select.value, key)];
  }
  async function open() {
    if (form) return;
    const found = await ask("form");
    if (form) return; // somebody left and came back meanwhile
    form = found;
    const part = Object.fromEntries(form.parts.map((one) => [one.key, h("fieldset", { "data-part": one.key || "run" }, h("legend", {}, one.title),
      h("div", { class: "fields" }, one.fields.map((field) => input(field, ""))))]));
    const folded = (key) => { const title = part[key].querySelector("legend"); title.className = "hidden"; return h("details", {}, h("summary", {}, title.textContent), part[key]); };
    const [method, showMethod] = byName("Method", "method", form.methods, "fedavg", "");
    const [network, showNetwork] = byName("Network", "network", form.networks, "", "the one that suits the data (default)");
    $("parts").append(method, part.data, part[""], network, folded("unreliable"), folded("channel"));
    const note = $(identity("data.name")).closest(".field");
    const about = h("small", { id: "data-about" });
    note.append(about);
    const tellData = () => write(about, form.data[$(identity("data.name")).value || "digits"] || "");
    $(identity("data.name")).addEventListener("change", tellData);
    tellData(); showMethod(); showNetwork();
    $("form").addEventListener("input", later);
    later();
  }
  const values = () => Object.fromEntries([...$("form").querySelectorAll("[data-field]")].map((control) => [control.dataset.field, control.value]).filter(([, value]) => value.trim()));
  let timer = 0, asked = 0;
  function later() { clearTimeout(timer); timer = setTimeout(check, 250); }
  async function check() {
    const mine = ++asked;
    try {
      const found = await tell("check", { values: values() });
      if (mine === asked) { refuse(""); write($("command"), found.command); }
    } catch (error) { if (mine === asked) { refuse(error.message); write($("command"), ""); } }
  }
  // The sentence, and the field it speaks of: the longest whole name in it, or else the first by the name it has in its part.
  function refuse(words) {
    write($("refusal"), words);
    const controls = [...$("form").querySelectorAll("[data-field]")];
    const said = ` ${words.replaceAll(/[^\w.]+/g, " ").replaceAll(/\.(?= |$)/g, " ")} `;
    const whole = controls.filter((one) => said.includes(` ${one.dataset.field} `)).sort((a, b) => b.dataset.field.length - a.dataset.field.length)[0];
    const place = (one) => said.indexOf(` ${one.dataset.field.split(".").pop()} `);
    const named = whole || controls.filter((one) => place(one) >= 0).sort((a, b) => place(a) - place(b))[0];
    controls.forEach((one) => { if (words && one === named) one.setAttribute("aria-invalid", "true"); else one.removeAttribute("aria-invalid"); });
    return named;
  }
  async function start(event) {
    event.preventDefault();
    clearTimeout(timer);
    asked += 1;
    $("start").disabled = true;
    try {
      const found = await tell("start", { values: values() });
      refuse("");
      announce(`${found.run} was started`);
      started(found.run);
    } catch (error) {
      $("start").disabled = false; // what is disabled takes no focus
      const named = refuse(error.message);
      (named || $("start")).focus();
      announce(error.message);
    }
    $("start").disabled = false;
  }

  $("form").addEventListener("submit", start);
  return { open };
};
