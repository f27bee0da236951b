"""Old public names, which work for one more release and warn with the new ones."""

import functools
import operator
import os
import warnings
from collections.abc import Callable, Mapping
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

    The warning names the line that is `stacklevel` calls further out. Raises TypeError if both
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
