// How results of the search are ordered. WEIGHTS, which site_pages.py writes before this: page -> word -> how much the
// page is about it.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  /** Words of the index first, then pages that are about the words, chapters and guides before tours and exercises. */
  score(result) {
    let [page, , anchor, , score, , kind] = result;
    if (kind === "index") {
      if (anchor) result[3] = anchor.slice(1).replace(/-/g, " "); // the place in the page, shown behind its title
      return score < 60 ? score / 10 : score;
    }
    const query = new URLSearchParams(location.search).get("q").toLowerCase();
    for (const word of query.split(/[^\p{L}\p{N}_]+/u).filter(Boolean))
      score += Math.max(0, ...Object.entries(WEIGHTS[page] || {}).map(([w, weight]) => w.startsWith(word) && weight));
    return /^(tour|exercise|source)-/.test(page) ? score / 2 : score;
  },
};
