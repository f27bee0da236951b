"""Reports as one HTML file each, with nothing from elsewhere: `chart` makes a Bokeh figure, `page` the page.

A report is a template that extends ``page.html`` of this folder, its values, and its charts. Templates escape
every value; the page's policy lets no script run but those that `page` puts in, and nothing be fetched.
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

# Of the marks under the pointer so many are described.
DESCRIBED = 4
MARK, GUIDE = "#3b82d6", "#d4483b"
# How a page is encoded where a character has no UTF-8, as in some names of files: Python's name for it.
UNENCODABLE = "xmlcharrefreplace"
HERE = Path(__file__).resolve().parent


def chart(title: str, x: str, y: str, *, height: int = 320, **options: Any) -> figure:
    """An empty figure as wide as its place in the page, `height` pixels high, with axes named `x` and `y`.

    Draw with any of Bokeh's glyphs, and say with `describe` what the pointer shows. `options` are those of
    ``bokeh.plotting.figure``, such as ``x_range``. The tools that move and zoom must be picked first, so that
    a finger on a chart still moves the page.

    >>> drawn = chart("Memory", "stage", "GiB", x_range=["0", "1"])
    >>> drawn.vbar(x=["0", "1"], top=[41.5, 38.0], width=0.8).glyph.width
    0.8
    """
    made = figure(
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
    made.toolbar.logo = None
    return made


def describe(drawn: figure, marks: GlyphRenderer, columns: Mapping[str, str]) -> None:
    """The pointer, or a finger, on one of the `marks` shows `columns` of its data, and a click selects the
    mark in every chart of the same data.

    `columns` has a label for each: ``"@a"`` is column a as it is, ``"@a{%.6g}"`` a number in C's format.
    """
    formats: dict[str, Any] = {
        column.split("{")[0]: "printf" for column in columns.values() if "{%" in column
    }
    hover = HoverTool(renderers=[marks], tooltips=list(columns.items()), formatters=formats, limit=DESCRIBED)
    drawn.add_tools(hover, TapTool(renderers=[marks]))


def page(template: Path, charts: Mapping[str, figure], **values: Any) -> str:
    """The page of a template's file, which extends ``page.html``, with `values`; as `charts` it finds each
    figure's place by its name. Write the page as UTF-8, with ``errors=UNENCODABLE``.
    """
    script, divisions = components(dict(charts), wrap_script=False)
    scripts = [Markup(text) for text in (_library(), _touch(), script)]
    hashes = [_hash(text) for text in scripts]
    places = {name: Markup(division) for name, division in divisions.items()}
    found = _environment(template.parent).get_template(template.name)
    return found.render(charts=places, scripts=scripts, hashes=hashes, **values)


def number(value: float | None) -> str:
    """A figure as the terminal prints it, too."""
    return "-" if value is None else f"{value:.6g}"


@cache
def _library() -> str:
    """BokehJS without its widgets, tables and formulas."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


@cache
def _touch() -> str:
    return (HERE / "touch.js").read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """As a content security policy names a script that may run."""
    digest = hashlib.sha256(script.encode("utf-8", UNENCODABLE)).digest()
    return "sha256-" + base64.b64encode(digest).decode()


@cache
def _environment(folder: Path) -> Environment:
    """Templates of a folder, and those here."""
    return Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
