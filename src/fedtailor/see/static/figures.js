"use strict";
// What the report and the live page have in common: light and dark, and figures as the controls beside them have it.
const figures = (() => {
  const drawn = (window.drawn = []); // keys of the figures that are drawn
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 520; // pixels; below, legends and colour bars have no place beside a figure

  // What a figure takes from the page: letters, grid, ground.
  function look() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: of("--faint"), linecolor: of("--faint"), zerolinecolor: of("--quiet"), tickcolor: of("--faint"),
      tickfont: { color: of("--quiet"), size: 12 }, title: { font: { color: of("--quiet"), size: 13 }, standoff: 10 },
      zerolinewidth: 1, automargin: true, exponentformat: "power",
    };
    const upright = { ...axis, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" }; // letters off the axis
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: of("--sans"), size: 13, color: of("--ink") }, colorway: ["#0072b2", "#d55e00", "#009e73", "#cc79a7"],
        xaxis: axis, yaxis: upright, margin: { l: 12, r: 16, t: 16, b: 44 }, hovermode: "closest", dragmode: false,
        hoverlabel: { bgcolor: of("--ground"), bordercolor: of("--quiet"), font: { color: of("--ink"), size: 13 } },
        legend: { font: { color: of("--ink"), size: 12 } }, annotationdefaults: { font: { color: of("--quiet"), size: 13 } },
      },
    };
  }

  // A figure is as wide as its place, also when a phone is turned or a page is printed.
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const width = target.clientWidth;
    if (target._fullLayout && width && Math.abs(target._fullLayout.width - width) > 1) Plotly.relayout(target, { width });
  }));

  function set(target, path, value) { // by plotly's dotted names
    const names = path.split("."), last = names.pop();
    names.forEach((name) => { target = target[name] ??= {}; });
    target[last] = structuredClone(value);
  }

  // What is to be seen with the options and the round that are chosen.
  function compose(figure) {
    const data = structuredClone(figure.shown.data), layout = structuredClone(figure.shown.layout), chosen = [];
    figure.querySelectorAll("[data-choice]").forEach((control) => {
      if (control.type === "radio" && !control.checked) return;
      const option = figure.shown.choices[Number(control.dataset.choice)].options[Number(control.value)];
      Object.entries(option.traces).forEach(([name, values]) => data.forEach((trace, i) => set(trace, name, values[i % values.length])));
      Object.entries(option.layout).forEach(([name, value]) => set(layout, name, value));
      chosen.push(control.value);
    });
    const slider = figure.querySelector("[data-frames]");
    if (slider) figure.shown.frames[Number(slider.value)].data.forEach((part, i) => Object.assign(data[i], part));
    layout.uirevision = chosen.join(); // what a reader hid or enlarged stays so until they choose something else
    return { data, layout };
  }

  function fit({ data, layout }, width) {
    if (width) layout.width = width; // else it is hidden, and gets its width when it is not
    if (layout.yaxis2 && layout.legend === undefined) layout.legend = { orientation: "h", x: 0, y: 1, yanchor: "bottom" };
    if (!width || width >= NARROW) return;
    if (layout.legend === undefined) layout.legend = { orientation: "h", y: -0.25 };
    if (layout.yaxis && layout.yaxis.scaleanchor) layout.height = Math.min(layout.height || 420, width + 110);
    data.filter((trace) => trace.colorbar).forEach((trace) => {
      Object.assign(trace.colorbar, { orientation: "h", x: 0.5, y: 1, yanchor: "bottom", thickness: 8, len: 0.7 });
      if (trace.colorbar.title) trace.colorbar.title.side = "top"; // upright it would be all one sees
    });
  }

  // Draw a figure, or draw it anew: `shown` is what it shows, which a report has in a script inside.
  function paint(figure) {
    figure.shown ??= JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const plot = figure.querySelector(".plot"), { data, layout } = compose(figure);
    fit({ data, layout }, plot.clientWidth);
    layout.template = look();
    plot.style.height = `${layout.height || 420}px`;
    const settings = { displaylogo: false, displayModeBar: true, responsive: false, showTips: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toggleSpikelines"] };
    Plotly.react(plot, data, layout, settings).then(() => {
      // a picture for screen readers, who have the sentence and the numbers: no buttons without names inside
      plot.querySelectorAll("a, button, [tabindex]").forEach((inner) => inner.setAttribute("tabindex", "-1"));
      if (figure.dataset.drawn !== undefined) return;
      figure.dataset.drawn = "";
      drawn.push(figure.dataset.figure);
      sizes.observe(plot);
    });
  }

  document.addEventListener("input", ({ target }) => {
    if (target.dataset.frames !== undefined) {
      const name = JSON.parse(target.dataset.frames)[Number(target.value)];
      target.setAttribute("aria-valuetext", `round ${name}`);
      target.parentElement.querySelector("output").textContent = name;
    } else if (target.dataset.choice === undefined) return;
    paint(target.closest("figure"));
  });

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  function dress() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
    document.querySelectorAll("figure[data-drawn]").forEach(paint);
  }
  function remembered(theme) {
    try {
      if (theme) localStorage.setItem("theme", theme);
      return localStorage.getItem("theme");
    } catch { return null; } // a page from a file may not remember
  }
  const before = remembered();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    dress();
  });
  dark.addEventListener("change", dress);
  dress();
  return { paint };
})();
