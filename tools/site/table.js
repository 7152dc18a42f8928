// Wide tables (the museum's, the scoreboard's) are sorted by a column's button and filtered by the form above the first
// of them. Without JavaScript they are tables as they stand in the page.
const tables = [...document.querySelectorAll("article table")].filter((table) => table.tHead?.rows[0].cells.length > 7);
const rowsOf = (table) => [...table.tBodies[0].rows], rows = tables.flatMap(rowsOf);
const textOf = (row, column) => row.cells[column].textContent.trim();
const heads = tables.length ? [...tables[0].tHead.rows[0].cells].map((head) => head.textContent.trim()) : [];
const isSilent = (text) => /^(no|–|-|)$|^stops: /.test(text); // a cell in which nothing is said
const numberOf = (text) => (/^[+-]?[\d.]+(e[+-]?\d+)?( %)?$/.test(text) ? parseFloat(text) : NaN);

/** Numbers by size, then words; cells that say nothing are last in both directions. */
function compare(one, other, direction) {
  if (isSilent(one) || isSilent(other)) return isSilent(one) - isSilent(other);
  const [a, b] = [numberOf(one), numberOf(other)];
  if (!isNaN(a) && !isNaN(b)) return direction * (a - b);
  return direction * (isNaN(a) - isNaN(b) || one.localeCompare(other, "en", { numeric: true }));
}

function sort(table, head, column) {
  const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const sorted = rowsOf(table).sort((a, b) => compare(textOf(a, column), textOf(b, column), direction));
  table.tBodies[0].append(...sorted);
}

for (const table of tables) {
  table.classList.add("sorted");
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, head, column));
    head.append(button);
  });
}

/** A label with a choice; options: [what is shown, whether a row is]. */
function choice(form, name, options) {
  const label = document.createElement("label"), select = document.createElement("select");
  select.append(new Option("any"), ...options.map(([text]) => new Option(text)));
  label.append(name, select);
  form.append(label);
  return (row) => !select.selectedIndex || options[select.selectedIndex - 1][1](row);
}

/** By any word, by columns of few values, and by those in which some cells say nothing: by the checks. */
function addFilters() {
  const form = document.createElement("form"), words = document.createElement("input"), filters = [], said = [];
  const label = document.createElement("label"), count = document.createElement("output");
  form.className = "controls filters";
  label.append("with the words", words);
  form.append(label);
  heads.forEach((name, column) => {
    const values = [...new Set(rows.map((row) => textOf(row, column)))];
    const isMute = (row) => isSilent(textOf(row, column));
    if (values.some((value) => /^(no|–|)$/.test(value)))
      said.push([`${name}: yes`, (row) => !isMute(row)], [`${name}: no`, isMute]);
    else if (values.length > 1 && values.length < 9)
      filters.push(choice(form, name, values.sort().map((value) => [value, (row) => textOf(row, column) === value])));
  });
  filters.push(choice(form, "says something", said));
  form.append(count);
  const update = () => {
    const wanted = words.value.toLowerCase().split(/\s+/);
    const has = (row, word) => row.textContent.toLowerCase().includes(word);
    for (const row of rows) row.hidden = !(filters.every((is) => is(row)) && wanted.every((word) => has(row, word)));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  (tables[0].closest(".table-wrapper") || tables[0]).before(form);
  update();
}
if (tables.length) addFilters();
