"""Figures of memory as text, in GiB."""

from collections.abc import Iterator, Sequence

from reshard.memory.options import GIB
from reshard.memory.outside import Band


def gib(n: float) -> str:
    """Return bytes in GiB, without the unit."""
    return f"{n / GIB:.2f}"


def band_text(band: Band) -> str:
    """Return both ends of a band in GiB, without the unit."""
    return f"{band.low / GIB:.1f} to {band.high / GIB:.1f}"


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are aligned to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) + 2 for i in range(len(heads))]
    for row in [heads, *rows]:
        yield "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
