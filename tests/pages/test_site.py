"""The site builds without a warning, fetches nothing, and fits a phone and a desk."""

import ast
import builtins
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks import charts

REPOSITORY = Path(__file__).resolve().parent.parent.parent
WIDTHS = (390, 1280)
PYTHON = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# Mapping tables are no programs.
PAGES_WITH_PYTHON = [
    page
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
    if PYTHON.search(page.read_text(encoding="utf-8")) and page.name != "mapping-tables.md"
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as a release does: a dead link, a page outside of the navigation or an unknown
    name is an error."""
    directory = tmp_path_factory.mktemp("site")
    # Not `--quiet`: with it mkdocs counts no warning, and `--strict` accepts everything.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_in_the_navigation_and_has_text(site):
    pages = sorted(path for path in (REPOSITORY / "docs").rglob("*.md"))
    generated = {"changelog.md", "contributing.md"}
    short = [str(page) for page in pages if page.name not in generated and len(page.read_text().split()) < 60]
    assert len(pages) > 30 and short == []


def test_every_link_within_the_site_leads_to_a_file_and_its_anchor(site):
    """Read from the pages as built: mkdocs does not see the anchors of listings and of commands."""
    texts = {
        page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"
    }
    anchors = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in texts.items()}
    checked, dead = 0, []
    for page, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="([^":]+)"', text)):
            path, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(page.parent / path)) if path else page
            checked += 1
            if not target.exists() or (anchor and anchor not in anchors[target]):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert checked > 1000 and sorted(dead) == []


def test_pages_fetch_nothing_from_other_hosts(site):
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(https?:)?//|"""
        r"""<link[^>]+rel=["']?(?:stylesheet|preconnect|icon)["']?[^>]+href=["']?https?://"""
    )
    assert [
        str(page) for page in site.rglob("*.html") if fetched.search(page.read_text(encoding="utf-8"))
    ] == []


def test_drawings_are_made_of_their_diagrams():
    spec = importlib.util.spec_from_file_location("render", REPOSITORY / "docs" / "diagrams" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    sources = sorted(render.DIAGRAMS.glob("*.mmd"))
    drawings = [(render.ASSETS / f"{source.stem}.svg").read_text(encoding="utf-8") for source in sources]
    stale = [
        source.name for source, drawing in zip(sources, drawings) if render.fingerprint(source) not in drawing
    ]
    assert sources and stale == []


def test_charts_are_drawn_from_figures_of_the_records():
    for chart in charts.CHARTS:
        record = (charts.RESULTS / chart.record).read_text(encoding="utf-8")
        figures = [bar.figure for bars in chart.groups.values() for bar in bars]
        assert [
            figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", record)
        ] == []
        assert (charts.ASSETS / f"{chart.name}.svg").read_text(encoding="utf-8") == charts.draw(chart)
    for strips in charts.STRIPS:  # drawn from what the record has
        assert (charts.ASSETS / f"{strips.name}.svg").read_text(encoding="utf-8") == charts.draw_strips(
            strips
        )


def browser() -> str:
    """Return the path of an installed Chromium; skip without one, except in CI."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("needs Chromium: apt-get install chromium")
    assert found, "CI has no Chromium: apt-get install chromium"
    return found


# What the reader's own program has, by the names that the pages give it.
READERS_OWN = {
    "address", "consume", "drafter", "engine", "first_rank", "generate", "link", "llm", "model", "models", "optimizer",
    "prompts", "rank", "ray", "sampling", "secret", "self", "size", "step", "steps", "train", "trainers", "version",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_python_of_a_page_imports_and_defines_what_it_uses(page):
    """All but what the reader's own program has."""
    defined, used = {*dir(builtins), *READERS_OWN}, {}
    for code in PYTHON.findall(page.read_text(encoding="utf-8")):
        if code.startswith("--8<--"):
            code = (REPOSITORY / code.split('"')[1].partition(":")[0]).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Name):
                used.setdefault(node.id, code)
    assert used and used.keys() - defined == set()


# Tables of literals and reports, whose columns are wider than a desk's page.
WIDER_THAN_A_DESK = {"concepts/mapping-tables.html", "guides/memory.html", "guides/parity-ci.html",
                     "guides/trainers/verl.html", "reference/checkpoint-format.html"}  # fmt: skip
CUT = """() => [...document.querySelectorAll('.md-typeset pre > code')]
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.textContent.slice(0, 60))"""
BROKEN = """() => [...document.querySelectorAll('.md-typeset td code .word')]
    .filter(word => word.getClientRects().length > 1).map(word => word.textContent)"""
# The height of letters in a drawing, of which its own letters have 16 pixels or more.
LETTERS = """() => [...document.querySelectorAll('.drawing img')]
    .map(drawing => 16 * drawing.getBoundingClientRect().width / drawing.naturalWidth)"""
UNHINTED = """() => [...document.querySelectorAll('.md-typeset table:not([class]), .md-typeset pre > code, .drawing')]
    .map(part => part.closest('.md-typeset__scrollwrap') || part)
    .filter(part => part.scrollWidth > part.clientWidth + 1)
    .filter(part => !getComputedStyle(part).backgroundAttachment.includes('local'))
    .map(part => part.textContent.slice(0, 60))"""
LONE = """() => [...document.querySelectorAll('.md-sidebar--primary:not([hidden])')]
    .filter(column => column.getBoundingClientRect().width)
    .filter(column => [...column.querySelectorAll('a.md-nav__link')]
        .filter(link => link.offsetParent).length < 2).length"""


def test_no_page_scrolls_sideways_and_what_is_wider_says_so(site):
    from playwright.sync_api import sync_playwright

    handler = partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *args: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = [page.relative_to(site) for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    # Listings of source are all made alike: the ones with the longest lines stand for them.
    listings = [page for page in pages if page.parts[0] == "source"]
    longest = sorted(listings, key=lambda page: -max(map(len, (site / page).read_text().split("\n"))))[:5]
    pages = [page for page in pages if page not in listings] + longest
    wrong = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        # Without the theme's scripts, which set no width, a page is laid out at once.
        tab = chromium.new_context(java_script_enabled=False).new_page()
        for page in pages:
            tab.goto(f"http://127.0.0.1:{server.server_port}/{page}", wait_until="load")
            for width in WIDTHS:
                tab.set_viewport_size({"width": width, "height": 900})
                needed = tab.evaluate("document.documentElement.scrollWidth")
                if needed > width:
                    wrong.append(f"{page} needs {needed} of {width} pixels")
                at = f"{page} at {width} pixels"
                wrong += [f"{at}: {word} is broken" for word in tab.evaluate(BROKEN)]
                wrong += [f"{at}: no hint beside {text!r}" for text in tab.evaluate(UNHINTED)]
                wrong += [
                    f"{at}: letters of {size:.1f} pixels" for size in tab.evaluate(LETTERS) if size < 10
                ]
                if width == max(WIDTHS) and page.parts[0] != "source":
                    wrong += [f"{at}: the left column holds one link"] * tab.evaluate(LONE)
                    cut = [] if str(page) in WIDER_THAN_A_DESK else tab.evaluate(CUT)
                    wrong += [f"{at}: {code!r} is cut" for code in cut]
        chromium.close()
    server.shutdown()
    assert len(pages) > 30 and wrong == []
