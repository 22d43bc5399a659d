"use strict";
// Building blocks of the dashboard: elements that are updated in place, tables, and figures.
const elements = (() => {
  const $ = (id) => document.getElementById(id);
  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  // Updates an element in place to match a new one, so that a click in progress and the focus are not lost.
  function update(old, fresh) {
    if (old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
    if (old.nodeType === Node.TEXT_NODE) { setText(old, fresh.textContent); return; }
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (old.checked !== fresh.checked) old.checked = fresh.checked;
    while (old.childNodes.length > fresh.childNodes.length) old.lastChild.remove();
    [...fresh.childNodes].forEach((child, index) => { if (old.childNodes[index]) update(old.childNodes[index], child); else old.append(child); });
  }
  // Renders items as children of an element. A child is reused while its key exists, with the event listeners of its
  // first version, so listeners must depend only on the key. The focus is preserved.
  function render(parent, items, make) {
    const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
    const focused = document.activeElement;
    const children = items.map(({ key, value }) => {
      const serialized = JSON.stringify(value), before = old.get(String(key));
      if (before && before.serialized === serialized) return before;
      const fresh = make(value);
      fresh.dataset.key = key;
      if (before) update(before, fresh);
      return Object.assign(before || fresh, { serialized });
    });
    children.forEach((element, index) => {
      if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] || null);
    });
    while (parent.children.length > children.length) parent.lastChild.remove();
    if (parent.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true }); // moving an element removes its focus
  }

  // ---- tables

  const columnClass = (column) => ["number", "wide", "desk"].filter((word) => column[word]).join(" ") || null; // wide: hidden on phones; desk: also on tablets

  function renderHead(table, columns, order, sortBy, leading = []) {
    const row = table.tHead.rows[0];
    if (row.children.length === 0) row.append(...leading, ...columns.map((column) => h("th", { scope: "col", class: columnClass(column), "data-sort": column.key },
      sortBy ? h("button", { type: "button", onclick: () => sortBy(column.key) }, column.title) : column.title)));
    [...row.children].forEach((cell) => {
      if (order && cell.dataset.sort === order.key) cell.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  // ---- figures

  function showTable(element) {
    const table = element.content.table, container = element.querySelector("details .table");
    if (element.querySelector("details").open) container.replaceChildren(h("table", {}, h("caption", { class: "hidden" }, element.content.title),
      h("thead", {}, h("tr", {}, table.columns.map((column) => h("th", { scope: "col" }, column)))),
      h("tbody", {}, table.rows.map((row) => h("tr", {}, row.map((cell, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, String(cell ?? "–"))))))));
  }
  function showFigures(parent, items) {
    const old = new Map([...parent.children].map((child) => [child.dataset.figure, child]));
    items.forEach((content, index) => {
      const element = old.get(content.key) || newFigure(content);
      old.delete(content.key);
      if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] || null);
      element.content = content;
      setText(element.querySelector("h3"), content.title);
      setText(element.querySelector("figcaption p"), content.summary);
      element.setAttribute("aria-label", content.title);
      element.querySelector(".plot").setAttribute("aria-label", `${content.title}. ${content.summary}`);
      showTable(element);
      figures.draw(element);
    });
    old.forEach((element) => { Plotly.purge(element.querySelector(".plot")); element.remove(); });
  }
  function newFigure(content) {
    const details = h("details", { ontoggle: () => showTable(element) }, h("summary", {}, "Table"), h("div", { class: "table", tabindex: 0, role: "region", "aria-label": `Table of ${content.title}` }));
    const controls = content.choices.map((choice, index) => h("fieldset", { class: "choice" }, h("legend", {}, choice.label), choice.options.map((option, i) => {
      const radio = h("input", { type: "radio", name: `${content.key}-${index}`, "data-choice": index, value: i });
      radio.checked = i === 0;
      return h("label", {}, radio, h("span", {}, option.name));
    })));
    const element = h("figure", { "data-figure": content.key }, h("figcaption", {}, h("h3", {}), h("p", {})),
      controls.length ? h("div", { class: "controls" }, controls) : null, h("div", { class: "plot", role: "img" }), details);
    return element;
  }

  return { $, h, setText, render, columnClass, renderHead, showFigures };
})();
