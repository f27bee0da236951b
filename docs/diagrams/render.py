"""Draw the diagrams of the pages: every `.mmd` here becomes an SVG in `docs/assets/`.

The site carries drawings instead of Mermaid's script, so that pages fetch nothing and stay small.
After a change of a diagram:

    npm pack mermaid && tar xzf mermaid-*.tgz package/dist/mermaid.min.js
    python docs/diagrams/render.py package/dist/mermaid.min.js
"""

import hashlib
import shutil
import sys
from pathlib import Path

DIAGRAMS = Path(__file__).parent
ASSETS = DIAGRAMS.parent / "assets"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = {
    "startOnLoad": False,
    "theme": "neutral",
    "fontFamily": "sans-serif",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "nodeSpacing": 30, "rankSpacing": 40},  # as wide as a phone
    "sequence": {"useMaxWidth": True, "mirrorActors": False},
}


def fingerprint(source: Path) -> str:
    """Return the comment that ties a drawing to the source it was made of."""
    return f"<!-- made of {source.name}: sha256 {hashlib.sha256(source.read_bytes()).hexdigest()} -->"


def render(script: Path) -> None:
    """Draw all diagrams with this copy of Mermaid, in an installed Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page()
        page.add_script_tag(path=script)
        page.evaluate("options => mermaid.initialize(options)", OPTIONS)
        for source in sorted(DIAGRAMS.glob("*.mmd")):
            draw = "([name, text]) => mermaid.render(name, text).then(drawing => drawing.svg)"
            svg = page.evaluate(draw, [source.stem, source.read_text(encoding="utf-8")])
            svg = svg.replace('style="', 'style="background-color: white; ', 1)  # also in dark mode
            target = ASSETS / f"{source.stem}.svg"
            target.write_text(f"{fingerprint(source)}\n{svg}\n", encoding="utf-8")
            print(target)
        chromium.close()


if __name__ == "__main__":
    render(Path(sys.argv[1]))
