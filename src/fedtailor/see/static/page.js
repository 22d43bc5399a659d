"use strict";
// The report: figures are drawn when they come near, and commands can be copied.
(() => {
  const all = document.querySelectorAll("figure[data-figure]");
  const near = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      near.unobserve(entry.target);
      figures.paint(entry.target);
    }),
    { rootMargin: "800px 0px" },
  );
  all.forEach((figure) => near.observe(figure));
  window.addEventListener("beforeprint", () => all.forEach((figure) => { if (!figure.shown) figures.paint(figure); }));

  document.querySelectorAll(".copy").forEach((copy) => copy.addEventListener("click", () => {
    const text = copy.parentElement.querySelector("code");
    const done = () => { copy.textContent = "Copied"; };
    const by_hand = () => { getSelection().selectAllChildren(text); copy.textContent = "Selected"; };
    navigator.clipboard ? navigator.clipboard.writeText(text.textContent).then(done, by_hand) : by_hand();
  }));
})();
