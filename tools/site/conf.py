"""Sphinx's settings for the site: Furo shows what MyST reads. make_site.py writes the pages and runs Sphinx."""

import json
import pathlib

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes

HERE = pathlib.Path(__file__).resolve().parent
project = html_title = "Distributed training, step by step"
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = [str(path) for path in sorted(HERE.iterdir()) if path.suffix in (".js", ".css")]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = html_use_index = html_show_search_summary = False
html_math_renderer = "mathml"
highlight_language = "none"  # of a block that names none
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = {"math"}  # as GitHub
myst_heading_anchors = 4  # GitHub's
myst_url_schemes = {"http": None, "https": None, "mailto": None, "page": "{{path}}#{{fragment}}"}


def show_formula(display: str):
    def visit(self, node):
        self.body.append(convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit, None


def prepare(app, doctree):
    """Sections get GitHub's anchors; the page's words go into the index, in which the search looks first."""
    for section in doctree.findall(nodes.section):
        if (slug := section.get("slug")) and slug not in section["ids"]:  # MyST 5 does it
            section["ids"].append(slug)
    words = json.loads((pathlib.Path(app.srcdir) / "words.json").read_text(encoding="utf-8"))
    entries = [("single", word, anchor, "main", None) for word, anchor in words.get(app.env.docname, {}).items()]
    doctree.append(addnodes.index(entries=entries))


def add_table(app, page, *_):
    """Two pages have wide tables, which are sorted and filtered in the browser."""
    if page in ("museum", "scoreboard"):
        app.add_js_file("table.js", loading_method="defer")


def setup(app):
    app.add_html_math_renderer("mathml", show_formula("inline"), show_formula("block"))
    app.connect("doctree-read", prepare)
    app.connect("html-page-context", add_table)
