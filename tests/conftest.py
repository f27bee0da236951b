"""Fixtures: checkpoints are made once a session."""

import signal

import pytest

from tests.checkpoints import make

# Started in the background by a shell, pytest ignores SIGINT, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose tests start Megatron, vLLM, FSDP or many processes; `-m "not slow"` leaves what answers in a minute or two.
SLOW = (
    "build", "compat", "disk_faults", "engine", "examples", "families", "fsdp", "input_faults", "install", "logits", "meaning",
    "megatron_saves", "members", "parity", "published", "refit", "report", "surface",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


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
