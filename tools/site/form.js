// Forms that can be kept as a link, their numbers, and what is found. It needs figure.js.
"use strict";

/** The numbers in a form's fields, by name. Throws an Error that says what a field may be. */
function numbersOf(form) {
  const fields = [...form.querySelectorAll("input[type=number]:enabled")];
  const wrong = fields.find((field) => !field.value || !field.validity.valid);
  if (wrong) {
    const label = wrong.parentElement.firstChild.textContent.trim(),
      kind = wrong.step === "1" ? "a whole number" : "a number";
    throw new Error(`${label}: choose ${kind} from ${wrong.min} to ${wrong.max}.`);
  }
  return Object.fromEntries(fields.map((field) => [field.name, field.valueAsNumber]));
}

/** Calls show() now and at each change, with its event. The address keeps the form; #problem tells what show() throws. */
function followForm(form, show) {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const field = form.elements[name];
    if (field && field.type === "checkbox") field.checked = true;
    else if (field) field.value = value;
  }
  const update = (event) => {
    const problem = document.getElementById("problem");
    try {
      show(event);
      problem.textContent = "";
      if (event) history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
    } catch (error) {
      problem.textContent = error.message;
    }
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

/** Puts [name, value, what else there is to say] of each fact into a list of terms. */
function showFacts(place, facts) {
  place.replaceChildren(
    ...facts.map(([name, value, more]) => {
      const row = htmlElement("div", {});
      htmlElement("dt", {}, row, name);
      htmlElement("small", {}, htmlElement("dd", {}, row, value), more);
      return row;
    }),
  );
}
