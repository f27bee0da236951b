"""Read a page as a browser does, and check that it stands alone."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

from bokeh.document import Document

ATTRIBUTES = {
    "class",
    "content",
    "charset",
    "http-equiv",
    "name",
    "lang",
    "id",
    "scope",
    "style",
    "data-root-id",
    "data-head",
}
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "span", "ul", "li", "p", "br", "div", "table",
        "thead", "tbody", "tr", "th", "td", "script"}  # fmt: skip


class Parsed(HTMLParser):
    """A page as a browser sees it: its tags in order, their attributes, cells, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self.text, self.inside = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag
        self.attributes += attrs
        if tag in ("td", "script"):
            (self.cells if tag == "td" else self.scripts).append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
            return
        self.text += data
        if self.inside == "td":
            self.cells[-1] += data

    @property
    def policy(self) -> str:
        return next(value for name, value in self.attributes if name == "content" and "script-src" in value)

    @property
    def charts(self) -> Document:
        """Read what the last script draws as a browser does: a string of JavaScript, then HTML's
        escapes, then JSON."""
        [quoted] = re.findall(r"const docs_json = '(.*?)';", self.scripts[-1])
        [document] = json.loads(html.unescape(quoted.replace("\\\\", "\\"))).values()
        return Document.from_json(document)


def assert_stands_alone(parsed: Parsed) -> None:
    """Assert that a page fetches nothing and allows no scripts but its own."""
    assert set(parsed.tags) <= TAGS and {name for name, _ in parsed.attributes} <= ATTRIBUTES
    assert not any(re.search(r"https?:|url\(", value or "") for _, value in parsed.attributes)
    assert parsed.policy.startswith("default-src 'none';")
    hashes = [
        "sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in parsed.scripts
    ]
    assert re.search("script-src ([^;]*);", parsed.policy)[1] == " ".join(f"'{digest}'" for digest in hashes)
