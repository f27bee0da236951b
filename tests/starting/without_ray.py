"""Imported before what would import Ray where it is there: Ray does not work in processes that are
forked after its import."""

import sys

sys.modules["ray"] = None  # type: ignore[assignment]
