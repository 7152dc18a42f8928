// For every page: previous and next by keyboard, folds that open for what is linked to.
"use strict";

(() => {
  /** Left and right, or p and n, turn pages, unless the key means something where it is pressed. */
  function turnPage(event) {
    const direction = { ArrowLeft: "prev", p: "prev", ArrowRight: "next", n: "next" }[event.key];
    const isScrolled = event.target.matches("pre, .scroll, .code");
    if (
      !direction ||
      (event.key.startsWith("Arrow") && (isScrolled || event.target.closest("button, [data-keys]"))) ||
      event.target.closest("input, select, textarea") ||
      event.ctrlKey ||
      event.altKey ||
      event.metaKey ||
      event.shiftKey
    )
      return;
    const link = document.querySelector(`link[rel="${direction}"]`);
    if (link) location.href = link.href;
  }

  /** A link to a line that is folded opens the fold. */
  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView();
  }

  /** What scrolls sideways can be scrolled by keyboard. */
  function reachScrollers() {
    for (const box of document.querySelectorAll("pre, .scroll, .code")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }

  addEventListener("keydown", turnPage);
  addEventListener("hashchange", openTarget);
  addEventListener("resize", reachScrollers);
  addEventListener("toggle", reachScrollers, true);
  if (innerWidth <= 800) for (const group of document.querySelectorAll("header details")) group.open = false;
  const contents = document.querySelector(".contents details");
  if (contents && innerWidth <= 1100) contents.open = false;
  openTarget();
  reachScrollers();
})();
