"use strict";
// The report: draw figures when they are scrolled near, and copy commands.
(() => {
  const all = document.querySelectorAll("figure[data-figure]");
  const observer = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
      observer.unobserve(entry.target);
      figures.draw(entry.target);
    }),
    { rootMargin: "800px 0px" },
  );
  all.forEach((figure) => observer.observe(figure));
  window.addEventListener("beforeprint", () => all.forEach((figure) => { if (!figure.content) figures.draw(figure); }));

  document.querySelectorAll(".copy").forEach((copy) => copy.addEventListener("click", () => {
    const text = copy.parentElement.querySelector("code");
    const done = () => { copy.textContent = "Copied"; };
    const selectText = () => { getSelection().selectAllChildren(text); copy.textContent = "Selected"; };
    navigator.clipboard ? navigator.clipboard.writeText(text.textContent).then(done, selectText) : selectText();
  }));
})();
