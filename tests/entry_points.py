"""What installed packages offer by entry points is read once: vLLM asks at every start of an engine, and all of 250 packages answer."""

from importlib import metadata

every = metadata.entry_points()
metadata.entry_points = lambda **parameters: every.select(**parameters)  # type: ignore[assignment]
