"""Old public names, which work for one more release and warn with the new ones."""

import functools
import operator
import os
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Keywords of public calls: the new name of each, and what becomes of its value.
RENAMED_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "executor": ("backend", lambda value: value),
    "exact": ("match_vllm_rounding", lambda value: value),
    "release": ("keep_mapped", operator.not_),
    "members": ("group", lambda value: value),
    "vocab_divisible_by": ("make_vocab_size_divisible_by", lambda value: value),
}


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a name has become another: the caller of our caller, or who is further up."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def renamed_options(options: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
    """Return these options under their new names, warning of each old one.

    The warning names the line that is `stacklevel` calls further out. Raises TypeError where both
    names are given.
    """
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        if name in RENAMED_OPTIONS:
            new, convert = RENAMED_OPTIONS[name]
            if new in options:
                raise TypeError(f"{name} is now {new}: give {new} only")
            value = convert(value)
            replacement = f"{new}={value!r}" if isinstance(value, bool) else f"{new}="
            warn_renamed(f"{name}=", replacement, stacklevel + 1)
            name = new
        renamed[name] = value
    return renamed


def accepts_renamed_options(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function also be called with the old names of its options (`RENAMED_OPTIONS`)."""

    @functools.wraps(call)
    def with_new_names(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if kwargs.keys().isdisjoint(RENAMED_OPTIONS):
            return call(*args, **kwargs)
        return call(*args, **renamed_options(kwargs))

    return with_new_names


def renamed_variable(old: str, new: str, default: str) -> str:
    """Return the value of an environment variable, also where it is set under its old name."""
    if old in os.environ:
        warn_renamed(f"the environment variable {old}", new)
    return os.environ.get(new, os.environ.get(old, default))


class MovedModules(MetaPathFinder, Loader):
    """Lets modules be imported, and run by ``python -m``, under the names that they had: `moved`
    maps old names to new ones."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved

    def install(self) -> None:
        """Have Python ask this finder for modules that it does not find."""
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that this loader loads, or None for a module that was not moved."""
        return ModuleSpec(fullname, self) if fullname in self.moved else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the placeholder that `exec_module` replaces."""
        warnings.warn(
            f"{spec.name} is now {self.moved[spec.name]}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the module itself under its old name, so that there is one of it."""
        sys.modules[module.__name__] = import_module(self.moved[module.__name__])

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the module's code, for ``python -m`` with the old name."""
        spec = util.find_spec(self.moved[fullname])
        return spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
