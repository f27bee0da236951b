"""A live model's config, as it would be published."""

from typing import Any

from reshard.models.family import family_of


def published(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a transformers config's dict without what transformers adds, and what an engine's
    model class has changed in place."""
    config = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key != "transformers_version"
    }
    return family_of(config, where).as_published(config)
