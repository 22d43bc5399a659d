"use strict";
// What the live page is made of: elements that stay themselves while what they say changes, tables, figures.
const elements = (() => {
  const $ = (id) => document.getElementById(id);
  function h(tag, given = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }
  const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  // An element comes to say what a fresh one says. It stays itself, with all inside it that can: a click may be under way.
  function renew(old, fresh) {
    if (old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
    if (old.nodeType === Node.TEXT_NODE) { write(old, fresh.textContent); return; }
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (old.checked !== fresh.checked) old.checked = fresh.checked;
    while (old.childNodes.length > fresh.childNodes.length) old.lastChild.remove();
    [...fresh.childNodes].forEach((child, place) => { if (old.childNodes[place]) renew(old.childNodes[place], child); else old.append(child); });
  }
  // The children of an element, by key: each stays as long as its key does, and the focus stays where it was. What
  // listens inside one may therefore know no more of it than its key.
  function fill(parent, items, make) {
    const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
    const held = document.activeElement;
    const wanted = items.map(({ key, value }) => {
      const said = JSON.stringify(value), before = old.get(String(key));
      if (before && before.said === said) return before;
      const fresh = make(value);
      fresh.dataset.key = key;
      if (before) renew(before, fresh);
      return Object.assign(before || fresh, { said });
    });
    wanted.forEach((element, position) => {
      if (parent.children[position] !== element) parent.insertBefore(element, parent.children[position] || null);
    });
    while (parent.children.length > wanted.length) parent.lastChild.remove();
    if (parent.contains(held) && document.activeElement !== held) held.focus({ preventScroll: true }); // it was moved
  }

  // ---- tables

  const kind = (column) => ["number", "wide", "desk"].filter((word) => column[word]).join(" ") || null; // wide: not on phones; desk: nor on tablets

  function heads(table, columns, order, choose, first = []) {
    const row = table.tHead.rows[0];
    if (row.children.length === 0) row.append(...first, ...columns.map((column) => h("th", { scope: "col", class: kind(column), "data-sort": column.key },
      choose ? h("button", { type: "button", onclick: () => choose(column.key) }, column.title) : column.title)));
    [...row.children].forEach((cell) => {
      if (order && cell.dataset.sort === order.key) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  // ---- figures

  function numbers(element) {
    const table = element.shown.table, place = element.querySelector("details .table");
    if (element.querySelector("details").open) place.replaceChildren(h("table", {}, h("caption", { class: "hidden" }, element.shown.title),
      h("thead", {}, h("tr", {}, table.heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, table.rows.map((row) => h("tr", {}, row.map((cell, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, String(cell ?? "–"))))))));
  }
  function showFigures(parent, some) {
    const old = new Map([...parent.children].map((child) => [child.dataset.figure, child]));
    some.forEach((shown, position) => {
      const element = old.get(shown.key) || newFigure(shown);
      old.delete(shown.key);
      if (parent.children[position] !== element) parent.insertBefore(element, parent.children[position] || null);
      element.shown = shown;
      write(element.querySelector("h3"), shown.title);
      write(element.querySelector("figcaption p"), shown.says);
      element.setAttribute("aria-label", shown.title);
      element.querySelector(".plot").setAttribute("aria-label", `${shown.title}. ${shown.says}`);
      numbers(element);
      figures.paint(element);
    });
    old.forEach((element) => { Plotly.purge(element.querySelector(".plot")); element.remove(); });
  }
  function newFigure(shown) {
    const details = h("details", { ontoggle: () => numbers(element) }, h("summary", {}, "Numbers"), h("div", { class: "table", tabindex: 0, role: "region", "aria-label": `numbers of ${shown.title}` }));
    const controls = shown.choices.map((choice, place) => h("fieldset", { class: "choice" }, h("legend", {}, choice.label), choice.options.map((option, i) => {
      const radio = h("input", { type: "radio", name: `${shown.key}-${place}`, "data-choice": place, value: i });
      radio.checked = i === 0;
      return h("label", {}, radio, h("span", {}, option.name));
    })));
    const element = h("figure", { "data-figure": shown.key }, h("figcaption", {}, h("h3", {}), h("p", {})),
      controls.length ? h("div", { class: "controls" }, controls) : null, h("div", { class: "plot", role: "img" }), details);
    return element;
  }

  return { $, h, write, fill, kind, heads, showFigures };
})();
