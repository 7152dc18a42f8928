// How results of the search are found and ordered. WEIGHTS, which site_pages.py writes before this: page -> word -> how
// much the page is about it.
const EACH_WORD = 12; // what each word of the query that a page has is worth
const lookedFor = () => new URLSearchParams(location.search).get("q").toLowerCase().trim();
const wordsOf = (text) => text.split(/[^\p{L}\p{N}_]+/u).filter(Boolean);

var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  /** Words of the index first, then pages that are about the words, chapters and guides before tours and exercises. */
  score(result) {
    let [page, , anchor, , score, , kind] = result;
    if (kind === "index") {
      if (anchor) result[3] = anchor.slice(1).replace(/-/g, " "); // the place in the page, shown behind its title
      const step = (page.match(/^step(\d+)/) || [0, 0])[1]; // of several steps, the first one that defines a name
      return score < 60 ? score / 10 : score + 1000 - step / 100;
    }
    for (const word of wordsOf(lookedFor()).filter((word) => word.length > 2)) // "on" begins too many others
      score += Math.max(0, ...Object.entries(WEIGHTS[page] || {}).map(([w, weight]) => w.startsWith(word) && weight));
    return /^(tour|exercise|source)-/.test(page) ? score / 2 : score;
  },
};

/** Sphinx's own search wants all words on one page. This one finds pages that have any of them, the more the better, and
 *  what the index has of a part of the query ("wandb" in "wandb offline"). */
const hasAll = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const pages = new Map(), query = ` ${lookedFor()} `, { indexentries, docnames, titles, filenames } = Search._index;
  for (const word of words)
    for (const result of hasAll(new Set([word]), excluded)) {
      const found = pages.get(result[0]) || [...result.slice(0, 4), 0, ...result.slice(5)];
      found[4] += result[4] + EACH_WORD;
      pages.set(result[0], found);
    }
  const entries = Object.entries(indexentries).filter(([entry]) => query.trim() !== entry && query.includes(` ${entry} `));
  const parts = entries.flatMap(([entry, places]) => places.map(([file, id]) => [docnames[file], titles[file],
    id ? `#${id}` : "", null, 60 + Math.round((39 * entry.length) / query.length), filenames[file], "index"]));
  return [...parts, ...pages.values()];
};
