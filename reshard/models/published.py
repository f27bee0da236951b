"""A live model's config, as it would be published."""

import math
from collections.abc import Mapping
from typing import Any

from reshard.models.family import family_of, has_table


def published(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a transformers config's dict without what transformers adds, and what an engine's
    model class has changed in place."""
    config = {key: _in_json(value) for key, value in own_fields(config).items()}
    return family_of(config, where).as_published(config) if has_table(config) else config


def own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's fields without those in which transformers and reshard note where it came from, and what wrote
    it."""
    return {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }


def _in_json(value: Any) -> Any:
    """Return a setting with infinities as transformers writes them, since JSON has none."""
    if isinstance(value, list | tuple):
        return [_in_json(entry) for entry in value]
    return {"__float__": "Infinity"} if isinstance(value, float) and value == math.inf else value
