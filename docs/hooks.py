"""Bring files of the repository that pages link to into the site: tests, records, examples.

A page links to them as it would on a code host (`../../tests/refit/test_refit.py`). Each becomes a page
below `source/`, so that every link works offline, and a promise leads to its test.
"""

import posixpath
import re
from functools import partial
from pathlib import Path

from mkdocs.structure.files import File

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"(<code>)(.*?)(</code>)", re.DOTALL)
DRAWING = re.compile(r'<img [^>]*src="([^":]+\.svg)"[^>]*>')
READABLE = 0.65  # of a diagram's own width, in which words are 16 pixels high; those of charts are smaller
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files, config):
    """Add a page for every file outside of the pages that a page, or such a file, links to."""
    root = Path(config.config_file_path).parent
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    waiting += [
        (name, (root / name).read_text(encoding="utf-8")) for name in ("CHANGELOG.md", "CONTRIBUTING.md")
    ]
    seen: set[str] = set()
    while waiting:
        home, text = waiting.pop()
        for _, target, _, _ in LINK.findall(text):
            path = repository_path(home, target)
            if path is None or path in seen or in_site(path) or not (root / path).is_file():
                continue
            seen.add(path)
            content = source_page(root, path)
            uri = f"source/{path.removesuffix('.md')}.md"
            files.append(File.generated(config, uri, content=UNSEARCHED + content))
            if path.endswith(".md"):
                waiting.append((path, content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links to files outside of the pages to the pages that were made of them."""
    root = Path(config.config_file_path).parent
    home = home_of(page.file.src_uri)
    if page.file.src_uri in ("changelog.md", "contributing.md"):
        home = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}[page.file.src_uri]
        markdown = (root / home).read_text(encoding="utf-8")

    def in_the_site(link):
        opening, target, anchor, closing = link.groups()
        path = repository_path(home, target)
        if path is None or not (root / path).exists():
            return link.group()
        if path.startswith("docs/"):
            uri = path.removeprefix("docs/")
        elif (root / path).is_file():
            uri = PAGES.get(path, f"source/{path.removesuffix('.md')}.md")
        else:
            return link.group()
        here = posixpath.dirname(page.file.src_uri)
        return f"{opening}{posixpath.relpath(uri, here or '.')}{line_of(root / path, anchor)}{closing}"

    return LINK.sub(in_the_site, markdown)


def line_of(file, anchor):
    """Return the anchor of the line of a listing on which a function is defined, where a link to a Python
    file names one."""
    if not anchor or file.suffix != ".py":
        return anchor or ""
    lines = file.read_text(encoding="utf-8").splitlines()
    [line] = [n for n, text in enumerate(lines, 1) if text.startswith(f"def {anchor[1:]}(")]
    return f"#__codelineno-0-{line}"


def home_of(uri: str) -> str:
    """Return the path in the repository of a page's text."""
    if not uri.startswith("source/"):
        return f"docs/{uri}"
    return uri.removeprefix("source/")


def in_site(path: str) -> bool:
    """Return True for a file that is a page, or belongs to pages, already."""
    return path.startswith("docs/") or path in PAGES


def repository_path(home: str, target: str) -> str | None:
    """Return the path in the repository that a link in the file `home` leads to; None for another."""
    if re.match(r"[a-z]+:|/", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
    return None if path.startswith("..") else path


def source_page(root: Path, path: str) -> str:
    """Return the text of the page that shows a file of the repository."""
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = "`````"
    return (
        f"# {path}\n\n{fence} {{ .{LANGUAGES.get(Path(path).suffix, 'text')} linenums=1 }}\n{text}\n{fence}\n"
    )


def on_page_context(context, page, config, nav):
    """Hide the left column of a page that is alone in its section: it would hold one link."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    return context


def on_page_content(html, page, config, files):
    """Mark what the style sheet lays out: the words of code in cells, and drawings.

    The cell of a default is left empty where an option has none: newer versions of click name a marker there.
    """
    html = html.replace("<code>Sentinel.UNSET</code>", "")
    html = CELL.sub(lambda cell: CODE.sub(with_words, cell.group()), html)
    return DRAWING.sub(partial(as_drawing, docs=Path(config.docs_dir), home=page.file.src_uri), html)


def with_words(code):
    """Return a piece of code with each of its words marked, so that none is broken."""
    opening, text, closing = code.groups()
    return opening + re.sub(r"[^\s<>]+", r'<span class="word">\g<0></span>', text) + closing


def as_drawing(image, docs, home):
    """Return a drawing as a link to its file, with its own width, and the least at which its words can be read."""
    source = image.group(1)
    drawing = (docs / posixpath.normpath(posixpath.join(posixpath.dirname(home), source))).read_text("utf-8")
    width = float(re.search(r'viewBox="\S+ \S+ (\S+) ', drawing).group(1))
    least = READABLE * width if "made of" in drawing else width
    widths = f"--readable: {least:.0f}px; --own: {width:.0f}px"
    return f'<a class="drawing" href="{source}" style="{widths}">{image.group()}</a>'
