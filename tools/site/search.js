// How results of the search are ordered. COUNTS, which site_pages.py writes before this: page -> word -> how often.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  /** Pages that use the words often come first; chapters and guides before tours and exercises. */
  score([page, , , , score, , kind]) {
    if (kind !== "text") return score;
    const query = new URLSearchParams(location.search).get("q").toLowerCase();
    for (const word of query.split(/[^\p{L}\p{N}_]+/u).filter(Boolean)) {
      const times = Object.entries(COUNTS[page] || {}).reduce((sum, [w, n]) => sum + n * w.startsWith(word), 0);
      score += (20 * times) / (times + 5);
    }
    return /^(tour|exercise|source)-/.test(page) ? score / 2 : score;
  },
};
