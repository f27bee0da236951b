"""Read the entry points of installed packages once: vLLM does at every start of an engine, through
all of 250 packages."""

from importlib import metadata

every = metadata.entry_points()
metadata.entry_points = lambda **parameters: every.select(**parameters)  # type: ignore[assignment]
