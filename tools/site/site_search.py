"""What the search of the site knows besides Sphinx's index: words that lead to a page, and what pages are about."""

import itertools
import json
import math
import pathlib
import re
from collections import Counter

from site_links import Repository

HERE = pathlib.Path(__file__).resolve().parent
RAW = re.compile(r"^``````\{raw\}.*?^``````$", re.S | re.M)  # HTML, which site_pages.raw() writes


def write_search(repository: Repository, pages: dict[str, str], index: dict[str, dict[str, str]]) -> None:
    """Writes words.json, for conf.py, and scorer.js, for the browser. `index`: page -> name that it defines -> anchor.

    A page is about a word if it has it often and few others have it.
    """
    for line in (HERE / "words.txt").read_text(encoding="utf-8").splitlines():
        place, _, words = line.partition(": ")
        page, _, anchor = place.partition("#")
        index.setdefault(page, {}).update(dict.fromkeys(words.split(", "), anchor))
    for name, one in repository.exercises.items():
        index[f"exercise-{name}"] = {name: ""}
        words = (f"exercise {one.chapter}", f"exercises of step {one.chapter}")
        index.setdefault(f"step{one.chapter}", {}).update(dict.fromkeys(words, "write-it-yourself"))
    counts = {page: Counter(re.findall(r"[a-z_]\w{2,}", RAW.sub("", text).lower())) for page, text in pages.items()}
    having = Counter(itertools.chain(*counts.values()))
    weights = {page: {word: weight for word, n in words.items()
                      if (weight := round(20 * math.log(len(counts) / having[word]) * n / (n + 3)))}
               for page, words in counts.items()}
    (repository.out / "words.json").write_text(json.dumps(index), encoding="utf-8")
    scorer = f"const WEIGHTS = {json.dumps(weights)};\n{(HERE / 'search.js').read_text(encoding='utf-8')}"
    (repository.out / "scorer.js").write_text(scorer, encoding="utf-8")
