"""Markdown to HTML for the site: headings get GitHub's anchors, code its colours, links and pictures new addresses."""

import html
import pathlib
import re
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from site_code import line_html, tokens_by_line

ATTRIBUTE = re.compile(r'\b(src|href)="([^"]*)"')
IMAGE_TAG = re.compile(r"<img\b[^>]*>")
NOT_IN_SLUG = re.compile(r"[^\w\- ]")


class Heading(NamedTuple):
    """A line of a page's contents list."""

    level: int
    anchor: str
    text: str


class Document:
    """One Markdown file: `title`, `headings` (levels 2 and 3) and `html`, the body without the title.

    It lies in `folder` of the `repository` (site_pages.py), which knows where links and pictures lead. `name(text)` is
    the address of what a text in backticks names, or None.
    """

    def __init__(self, text: str, repository, folder: pathlib.Path, name=lambda text: None):
        self.repository, self.folder, self.name = repository, folder, name
        self.title, self.headings, self.anchors = "", [], {}
        self.parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        self.parser.add_render_rule("fence", self.render_fence)
        self.parser.add_render_rule("code_block", self.render_fence)
        self.parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
        self.parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
        self.tokens = self.parser.parse(text)
        self.take_title()
        self.name_headings()
        self.rewrite(self.tokens)
        self.html = self.render(self.tokens)

    def render(self, tokens: list[Token]) -> str:
        """The HTML of some of the document's tokens."""
        return self.parser.renderer.render(tokens, self.parser.options, {})

    @staticmethod
    def render_fence(renderer, tokens, k, options, env) -> str:
        """A code block in colour."""
        language = tokens[k].info.split()[0] if tokens[k].info.split() else "text"
        lines = [line_html(line) for line in tokens_by_line(tokens[k].content, language)]
        return "<pre><code>" + "\n".join(lines) + "</code></pre>\n"

    def take_title(self) -> None:
        """The first heading becomes the page's title and leaves the body."""
        for k, token in enumerate(self.tokens):
            if token.type == "heading_open" and token.tag == "h1":
                self.title = plain(self.tokens[k + 1])
                del self.tokens[k : k + 3]
                return

    def name_headings(self) -> None:
        """As GitHub: lower case, without punctuation, spaces to hyphens; a number where a name has been used before."""
        for k, token in enumerate(self.tokens):
            if token.type != "heading_open":
                continue
            text = plain(self.tokens[k + 1])
            slug = NOT_IN_SLUG.sub("", text.lower()).replace(" ", "-")
            number = self.anchors.get(slug, 0)
            self.anchors[slug] = number + 1
            anchor = f"{slug}-{number}" if number else slug
            token.attrSet("id", anchor)
            if token.tag in ("h2", "h3"):
                self.headings.append(Heading(int(token.tag[1]), anchor, text))

    def rewrite(self, tokens: list[Token]) -> None:
        """New addresses of links and pictures. A code span that names something becomes a link, unless it is in one."""
        for k, token in enumerate(tokens):
            if token.type == "th_open" and not tokens[k + 1].content:  # a column without a name has no header
                token.tag = tokens[k + 2].tag = "td"
            if token.type in ("html_block", "html_inline"):
                token.content = ATTRIBUTE.sub(self.new_attribute, token.content)
                missing = [tag for tag in IMAGE_TAG.findall(token.content) if not re.search(r'\balt="[^"]+"', tag)]
                assert not missing, f"a picture without a text for those who can't see it: {missing[0]}"
            if token.type == "inline":
                token.children = self.rewrite_inline(token.children)

    def rewrite_inline(self, children: list[Token]) -> list[Token]:
        """What rewrite() does within a paragraph. Raises AssertionError for a picture without a text."""
        found, is_in_link = [], False
        for token in children:
            if token.type in ("link_open", "link_close"):
                is_in_link = token.type == "link_open"
            if token.type == "link_open":
                token.attrSet("href", self.repository.address(token.attrGet("href"), self.folder))
            elif token.type == "image":
                assert token.content, f"the picture {token.attrGet('src')} has no text for those who can't see it"
                token.attrSet("src", self.repository.picture(token.attrGet("src"), self.folder))
                token.attrSet("loading", "lazy")
            elif token.type == "html_inline":
                self.rewrite([token])
            elif token.type == "code_inline" and not is_in_link and (address := self.name(token.content)):
                link = Token("link_open", "a", 1, attrs={"href": address})
                found += [link, token, Token("link_close", "a", -1)]
                continue
            found.append(token)
        return found

    def new_attribute(self, match: re.Match) -> str:
        """A src or href of HTML in the Markdown file, with its new address."""
        change = self.repository.picture if match[1] == "src" else self.repository.address
        return f'{match[1]}="{html.escape(change(html.unescape(match[2]), self.folder))}"'


def plain(inline: Token) -> str:
    """The text of a heading, without its marks."""
    return "".join(child.content for child in inline.children if child.type in ("text", "code_inline", "softbreak"))
