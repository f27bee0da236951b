"""Fixtures: checkpoints are made once a session."""

import pytest

from tests.checkpoints import make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that gives the directory of a variant; made at the first call."""
    made = {}

    def get(variant, **options):
        key = (variant, *sorted(options.items(), key=str))
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp(variant), variant, **options)
        return made[key]

    return get
