"""Fixtures: checkpoints are made once a session."""

import os
import signal
import sys

import pytest

from tests import warm

# Pytest's workers are forked by a program that stands for a Python; what they start as sys.executable is to be a real one.
sys.executable = os.environ.get("WARM_EXECUTABLE", sys.executable)

# vLLM's quantised kernels would be built aside by every process that imports them, two processes with torch for each.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
# Ray's workers would have only what all other tests leave of the cores.
os.environ.setdefault("RAY_worker_niceness", "0")
# Started in the background by a shell, pytest ignores SIGINT, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose tests start Megatron, vLLM, FSDP or many processes, those that take longest first: each worker takes a file at a time.
# `-m "not slow"` leaves what answers in a minute or two.
SLOW = (
    "refit", "engine", "disk_faults", "homes", "parity", "members", "megatron_saves", "logits", "swift", "roll", "fsdp", "verl", "nemo_rl",
    "weight_transfer", "serving", "published", "build", "compat", "blocks", "reloads", "install", "meaning", "examples", "input_faults",
    "surface", "offload", "families", "report", "trainers_checkpoints",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        name = item.path.stem.removeprefix("test_")
        return SLOW.index(name) if name in SLOW else len(SLOW)

    for item in items:
        if place(item) < len(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    program = warm.share()
    for spec in specs:
        spec.python = program


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that gives the directory of a variant; made at the first call."""
    from tests.checkpoints import make

    made = {}

    def get(variant, **options):
        key = (variant, *sorted(options.items(), key=str))
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp(variant), variant, **options)
        return made[key]

    return get
