"""A live model's config, as it would be published."""

import math
from typing import Any

from reshard.models.family import family_of, has_table


def published(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a transformers config's dict without what transformers adds, and what an engine's
    model class has changed in place."""
    config = {
        key: _in_json(value)
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }
    return family_of(config, where).as_published(config) if has_table(config) else config


def _in_json(value: Any) -> Any:
    """Return a setting with infinities as transformers writes them, since JSON has none."""
    if isinstance(value, list | tuple):
        return [_in_json(entry) for entry in value]
    return {"__float__": "Infinity"} if isinstance(value, float) and value == math.inf else value
