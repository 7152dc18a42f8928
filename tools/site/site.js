// For every page: folds that open for what is linked to, boxes that scroll by keyboard.
"use strict";

(() => {
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

  addEventListener("hashchange", openTarget);
  addEventListener("resize", reachScrollers);
  addEventListener("toggle", reachScrollers, true);
  if (innerWidth <= 800) for (const group of document.querySelectorAll("header details")) group.open = false;
  const contents = document.querySelector(".contents details");
  if (contents && innerWidth <= 1100) contents.open = false;
  openTarget();
  reachScrollers();
})();
