"""Names of a package that are loaded when they are first asked for, so that importing the package
imports none of the libraries behind them."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from reshard.core.extras import importing, is_installed


def lazy(
    package: str,
    places: Mapping[str, str],
    extra: str | None = None,
    needs: Mapping[str, Collection[str]] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a `package` whose names lie in these `places`: ``module`` if
    it has the same name there, ``module:name`` if it has another, and the submodule itself.

    Missing packages are named in a ReshardError, with `extra` or the extra that is known to bring them. `needs` says
    which names import a package (``torch``) that an extra brings: where it is not installed, ``dir()``, which lists
    ``__all__``, leaves them out: ``help()`` and an interpreter's completion get all that it lists.

    >>> load, names = lazy("reshard", {"splits": "reshard.core.splits:split"}, needs={"no_such_package": ["diff"]})
    >>> load("splits").__name__, "check" in names(), "diff" in names()
    ('split', True, False)
    """

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        with importing(extra):
            loaded = import_module(module)
            return loaded if module == f"{package}.{name}" else getattr(loaded, attribute or name)

    def names() -> list[str]:
        lacking = [
            name for needed, users in (needs or {}).items() if not is_installed(needed) for name in users
        ]
        module = vars(sys.modules[package])
        special = {name for name in module if name.startswith("__")}
        return sorted(special | set(module["__all__"]) - set(lacking))

    return load, names
