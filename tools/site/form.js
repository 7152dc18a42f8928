// Forms that can be kept as a link, their numbers, and what is found. It needs figure.js.
"use strict";

/** A field's number. Throws an Error that says what it may be. */
function fieldNumber(form, name, [lowest, highest], isWhole) {
  const field = form.elements[name],
    value = field.valueAsNumber;
  if (!(value >= lowest && value <= highest) || (isWhole && !Number.isInteger(value))) {
    const label = field.parentElement.firstChild.textContent.trim();
    throw new Error(`${label}: choose ${isWhole ? "a whole number" : "a number"} from ${lowest} to ${highest}.`);
  }
  return value;
}

/** Writes the form into the address's fragment. */
function rememberForm(form) {
  const words = [...new FormData(form)].map(([name, value]) => `${name}=${value}`);
  history.replaceState(null, "", `#${words.join("&")}`);
}

/** Fills the form's fields from the address's fragment. */
function recallForm(form) {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const field = form.elements[name];
    if (field && field.type === "checkbox") field.checked = true;
    else if (field) field.value = value;
  }
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
