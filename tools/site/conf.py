"""Sphinx's settings for the site: Furo shows what MyST reads. make_site.py writes the pages and runs Sphinx."""

import pathlib

from latex2mathml.converter import convert

HERE = pathlib.Path(__file__).resolve().parent
project = "Distributed training, step by step"
html_title = project
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_theme_options = {"source_repository": None}
html_static_path = [str(path) for path in sorted(HERE.iterdir()) if path.suffix in (".js", ".css")]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_use_index = html_show_search_summary = False
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "page": "{{path}}#{{fragment}}"}
copybutton_prompt_text = "$ "


def setup(app):
    """Formulas become MathML, which browsers show by themselves."""
    def show(display):
        def visit(self, node):
            self.body.append(convert(node.astext(), display=display))
            raise docutils.nodes.SkipNode
        return visit

    import docutils.nodes

    app.add_html_math_renderer("mathml", (show("inline"), None), (show("block"), None))
