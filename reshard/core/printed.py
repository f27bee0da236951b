"""Results that print as the commands print them, and those that have to be asked for what was found."""

from collections.abc import Iterable, Sequence
from html import escape


class Printed:
    """A result that ``print`` and notebooks show as its command does: its lines, and then a note for each notice."""

    notices: Sequence[str] = ()

    def lines(self) -> Iterable[str]:
        """Return the lines of text, without the notices."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"note: {notice}" for notice in self.notices)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class NoTruthValue:
    """A result that Python does not take for true because it is an object: ``assert reshard.diff(a, b)`` would pass
    whatever differs. `question` names the property to ask instead."""

    question = "ok"

    def __bool__(self) -> bool:
        raise TypeError(f"a {type(self).__name__} is neither true nor false: ask for its .{self.question}")


def size(n: int) -> str:
    """Return bytes as text for people."""
    value, unit = float(n), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.2f} {unit}"
