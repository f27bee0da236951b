"""Have llvmlite's library make no functions of names such as ``__dict__``, as it does of any name: at start the builds
of vLLM 0.31 and 0.32 for the CPU ask every object of every module for that one."""

from llvmlite.binding import ffi

look_up = ffi._lib_wrapper.__getattr__


def look_up_function(library: ffi._lib_wrapper, name: str):
    """The library's function of a name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return look_up(library, name)


ffi._lib_wrapper.__getattr__ = look_up_function
