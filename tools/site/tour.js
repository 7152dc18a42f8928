// A tour, one scene at a time: arrow keys, the space bar, and an address for each scene.
"use strict";

(() => {
  const scenes = [...document.querySelectorAll(".scene")];
  const button = document.getElementById("play");
  let current = 0,
    timer = null;

  /** Shows scene `k` alone, its lit lines in view. */
  function show(k) {
    current = Math.max(0, Math.min(scenes.length - 1, k));
    scenes.forEach((scene, i) => (scene.hidden = i !== current));
    const lit = scenes[current].querySelector(".lit");
    if (lit) lit.closest(".shown").scrollTop += lit.getBoundingClientRect().top - lit.closest(".shown").getBoundingClientRect().top - 60;
    history.replaceState(null, "", `#scene-${current + 1}`);
  }

  /** Plays on from this scene, or stops. A scene stays as long as it takes to read. */
  function play(isOn) {
    clearTimeout(timer);
    timer = null;
    button.textContent = isOn ? "Stop" : "Play";
    if (!isOn) return;
    timer = setTimeout(() => {
      if (current === scenes.length - 1) return play(false);
      show(current + 1);
      play(true);
    }, 1000 * scenes[current].dataset.seconds);
  }

  /** The scene that the page's address names, or the first. */
  const addressed = () => (Number(location.hash.match(/^#scene-(\d+)$/)?.[1]) || 1) - 1;

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === " " && event.target !== button) play(timer === null);
    else if (step) {
      play(false);
      show(current + step);
    } else return;
    event.preventDefault();
  });
  button.addEventListener("click", () => play(timer === null));
  addEventListener("hashchange", () => show(addressed()));
  addEventListener("resize", () => show(current)); // a phone is turned: the lit lines stay in view
  document.getElementById("keys").hidden = false;
  show(addressed());
})();
