"""Reports as one HTML file each, with nothing from elsewhere: `chart` makes a Bokeh figure, `page`
the page.

A report is a template that extends ``page.html`` of this folder, its values, and its charts.
Templates escape every value; the page's policy lets no script run but those that `page` puts in,
and nothing be fetched.
"""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import HoverTool, TapTool
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

# The most marks under the pointer that are described.
MAX_DESCRIBED = 4
MARK, GUIDE = "#3b82d6", "#d4483b"
# How a page is encoded where a character has no UTF-8, as in some names of files: Python's name for
# it.
UNENCODABLE = "xmlcharrefreplace"
FOLDER = Path(__file__).resolve().parent


def chart(title: str, x: str, y: str, *, height: int = 320, **options: Any) -> figure:
    """Make an empty figure as wide as its place in the page, `height` pixels high, with axes named
    `x` and `y`.

    Draw with any of Bokeh's glyphs, and say with `describe` what the pointer shows. `options` are
    those of ``bokeh.plotting.figure``, such as ``x_range``. The tools that move and zoom must be
    picked first, so that a finger on a chart still moves the page.

    >>> drawn = chart("Memory", "stage", "GiB", x_range=["0", "1"])
    >>> drawn.vbar(x=["0", "1"], top=[41.5, 38.0], width=0.8).glyph.width
    0.8
    """
    drawn = figure(
        title=title,
        x_axis_label=x,
        y_axis_label=y,
        height=height,
        sizing_mode="stretch_width",
        min_border_right=20,
        tools="pan,box_zoom,wheel_zoom,reset",
        toolbar_location="below",
        active_drag=None,
        active_scroll=None,
        **options,
    )
    drawn.toolbar.logo = None
    return drawn


def describe(drawn: figure, marks: GlyphRenderer, columns: Mapping[str, str]) -> None:
    """Show `columns` of its data when the pointer, or a finger, is on one of the `marks`. A click
    selects the mark in every chart of the same data.

    `columns` has a label for each: ``"@a"`` is column a as it is, ``"@a{%.6g}"`` a number in C's
    format.
    """
    formats: dict[str, Any] = {
        column.split("{")[0]: "printf" for column in columns.values() if "{%" in column
    }
    hover = HoverTool(
        renderers=[marks], tooltips=list(columns.items()), formatters=formats, limit=MAX_DESCRIBED
    )
    drawn.add_tools(hover, TapTool(renderers=[marks]))


def page(template: Path, charts: Mapping[str, figure], **values: Any) -> str:
    """Render a template, which extends ``page.html``, with `values`; in it `charts` maps names to
    the figures' places. Write the page as UTF-8, with ``errors=UNENCODABLE``.
    """
    script, divisions = components(dict(charts), wrap_script=False)
    scripts = [Markup(text) for text in (_library(), _touch(), script)]
    hashes = [_hash(text) for text in scripts]
    places = {name: Markup(division) for name, division in divisions.items()}
    loaded = _environment(template.parent).get_template(template.name)
    return loaded.render(charts=places, scripts=scripts, hashes=hashes, **values)


def number(value: float | None) -> str:
    """Format a number as the terminal prints it."""
    return "-" if value is None else f"{value:.6g}"


@cache
def _library() -> str:
    """Return BokehJS without its widgets, tables and formulas."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


@cache
def _touch() -> str:
    return (FOLDER / "touch.js").read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which a content security policy allows a script."""
    digest = hashlib.sha256(script.encode("utf-8", UNENCODABLE)).digest()
    return "sha256-" + base64.b64encode(digest).decode()


@cache
def _environment(folder: Path) -> Environment:
    """Return the environment for the templates of a folder and of this package."""
    return Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
