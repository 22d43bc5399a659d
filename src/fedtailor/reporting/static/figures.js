"use strict";
// Shared by the report and the dashboard: the light and dark theme, and drawing figures according to their controls.
const figures = (() => {
  const drawn = (window.drawn = []); // keys of the drawn figures
  const root = document.documentElement;
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 520; // pixels; below this width, legends and color bars do not fit beside a figure

  // A plotly template with the page's fonts and colors.
  function template() {
    const style = getComputedStyle(root);
    const variable = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: variable("--faint"), linecolor: variable("--faint"), zerolinecolor: variable("--quiet"), tickcolor: variable("--faint"),
      tickfont: { color: variable("--quiet"), size: 12 }, title: { font: { color: variable("--quiet"), size: 13 }, standoff: 10 },
      zerolinewidth: 1, automargin: true, exponentformat: "power",
    };
    const yaxis = { ...axis, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" }; // distance between labels and axis
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: variable("--sans"), size: 13, color: variable("--ink") }, colorway: ["#0072b2", "#d55e00", "#009e73", "#cc79a7"],
        xaxis: axis, yaxis, margin: { l: 12, r: 16, t: 16, b: 44 }, hovermode: "closest", dragmode: false,
        hoverlabel: { bgcolor: variable("--ground"), bordercolor: variable("--quiet"), font: { color: variable("--ink"), size: 13 } },
        legend: { font: { color: variable("--ink"), size: 12 } }, annotationdefaults: { font: { color: variable("--quiet"), size: 13 } },
      },
    };
  }

  // Keep figures as wide as their containers, also when a phone is rotated or the page is printed.
  const resizeObserver = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const width = target.clientWidth;
    if (target._fullLayout && width && Math.abs(target._fullLayout.width - width) > 1) Plotly.relayout(target, { width });
  }));

  function set(target, path, value) { // `path` is a dotted name, as in plotly.restyle
    const names = path.split("."), last = names.pop();
    names.forEach((name) => { target = target[name] ??= {}; });
    target[last] = structuredClone(value);
  }

  // The data and layout for the selected options and the selected round.
  function applyControls(figure) {
    const data = structuredClone(figure.content.data), layout = structuredClone(figure.content.layout), chosen = [];
    figure.querySelectorAll("[data-choice]").forEach((control) => {
      if (control.type === "radio" && !control.checked) return;
      const option = figure.content.choices[Number(control.dataset.choice)].options[Number(control.value)];
      Object.entries(option.traces).forEach(([name, values]) => data.forEach((trace, i) => set(trace, name, values[i % values.length])));
      Object.entries(option.layout).forEach(([name, value]) => set(layout, name, value));
      chosen.push(control.value);
    });
    const slider = figure.querySelector("[data-frames]");
    if (slider) figure.content.frames[Number(slider.value)].data.forEach((part, i) => Object.assign(data[i], part));
    layout.uirevision = chosen.join(); // keeps zoom and hidden traces until another option is selected
    return { data, layout };
  }

  function fit({ data, layout }, width) {
    if (width) layout.width = width; // a hidden figure gets its width when it becomes visible
    if (layout.yaxis2 && layout.legend === undefined) layout.legend = { orientation: "h", x: 0, y: 1, yanchor: "bottom" };
    if (!width || width >= NARROW) return;
    Object.entries(layout.meta?.narrow ?? {}).forEach(([name, value]) => set(layout, name, value));
    if (layout.legend === undefined) layout.legend = { orientation: "h", y: -0.25 };
    if (layout.yaxis && layout.yaxis.scaleanchor) layout.height = Math.min(layout.height || 420, width + 110);
    data.filter((trace) => trace.colorbar).forEach((trace) => {
      Object.assign(trace.colorbar, { orientation: "h", x: 0.5, y: 1, yanchor: "bottom", thickness: 8, len: 0.7 });
      if (trace.colorbar.title) trace.colorbar.title.side = "top"; // a vertical title would take too much space
    });
  }

  // Draw or redraw a figure. Its `content` is set by the dashboard; in a report, it is in a script element.
  function draw(figure) {
    figure.content ??= JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const plot = figure.querySelector(".plot"), { data, layout } = applyControls(figure);
    fit({ data, layout }, plot.clientWidth);
    layout.template = template();
    plot.style.height = `${layout.height || 420}px`;
    const config = { displaylogo: false, displayModeBar: true, responsive: false, showTips: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toggleSpikelines"] };
    Plotly.react(plot, data, layout, config).then(() => {
      // for screen readers, the plot is one image with a summary and a table: hide its unnamed buttons from Tab
      plot.querySelectorAll("a, button, [tabindex]").forEach((inner) => inner.setAttribute("tabindex", "-1"));
      if (figure.dataset.drawn !== undefined) return;
      figure.dataset.drawn = "";
      drawn.push(figure.dataset.figure);
      resizeObserver.observe(plot);
    });
  }

  document.addEventListener("input", ({ target }) => {
    if (target.dataset.frames !== undefined) {
      const name = JSON.parse(target.dataset.frames)[Number(target.value)];
      target.setAttribute("aria-valuetext", `round ${name}`);
      target.parentElement.querySelector("output").textContent = name;
    } else if (target.dataset.choice === undefined) return;
    draw(target.closest("figure"));
  });

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
  function applyTheme() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Light theme" : "Dark theme");
    document.querySelectorAll("figure[data-drawn]").forEach(draw);
  }
  function storedTheme(theme) {
    try {
      if (theme) localStorage.setItem("theme", theme);
      return localStorage.getItem("theme");
    } catch { return null; } // storage may be blocked for local files
  }
  const stored = storedTheme();
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    storedTheme(root.dataset.theme);
    applyTheme();
  });
  systemDark.addEventListener("change", applyTheme);
  applyTheme();
  return { draw };
})();
