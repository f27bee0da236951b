"""Fixtures: checkpoints are made once a session."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests import warm

# Pytest's workers are forked by a program that stands for a Python; what they start as sys.executable is to be a real one.
sys.executable = os.environ.get("WARM_EXECUTABLE", sys.executable)

# vLLM's quantized kernels would be built aside by every process that imports them, two processes with torch for each.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
# Ray's workers would have only what all other tests leave of the cores.
os.environ.setdefault("RAY_worker_niceness", "0")
# Started in the background by a shell, pytest ignores SIGINT, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose tests start Megatron, vLLM, FSDP or many processes, those that take longest first: each worker takes a file at a time.
# `-m "not slow"` leaves what answers in a minute or two.
SLOW = (
    "refit", "refit_faults", "compressed", "live_megatron", "engine", "nvfp4_engine", "members", "fsdp", "parity", "blocks", "logits", "weight_transfer",
    "megatron_saves", "serving", "roll", "swift", "reloads", "verl", "resume", "nemo_rl", "build", "meaning", "install", "published",
    "sleeping", "examples", "compat", "families", "offload", "input_faults", "input_faults_megatron", "input_faults_pickles", "input_faults_fuzz", "storage_faults", "processes", "source_changes", "surface", "report",
    "trainers_checkpoints",
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


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a trained model with its tokenizer, in bf16: SmolLM2-135M-Instruct."""
    from tests.trained import make

    return make(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def whole(checkpoint, tmp_path_factory):
    """By direction: the source, and the bytes that an undisturbed run makes of it."""
    import torch

    from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
    from tests.disk import tree

    folder = tmp_path_factory.mktemp("whole")
    sources = {"hf-to-mcore": checkpoint("qwen3-moe", dtype=torch.bfloat16), "mcore-to-hf": folder / "mcore"}
    hf_to_mcore(sources["hf-to-mcore"], folder / "mcore", MegatronLayout(tp=2, ep=2))
    mcore_to_hf(folder / "mcore", folder / "hf", max_shard_size="200KB")
    return {
        "hf-to-mcore": (sources["hf-to-mcore"], tree(folder / "mcore")),
        "mcore-to-hf": (folder / "mcore", tree(folder / "hf")),
    }


@pytest.fixture
def source(checkpoint, tmp_path):
    """A checkpoint that a test may spoil."""
    import torch

    return Path(shutil.copytree(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture
def mcore(source, tmp_path):
    """The same as a Megatron checkpoint."""
    from reshard import MegatronLayout, hf_to_mcore

    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2))
    return tmp_path / "mcore"


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Two checkpoints of a variant in bf16, each as (Hugging Face directory, Megatron directory)."""
    import torch

    from reshard import hf_to_mcore
    from tests.checkpoints import make

    made = {}

    def get(variant: str, **options) -> list[tuple[str, str]]:
        key = (variant, *sorted(options))
        if key not in made:
            made[key] = []
            for seed in (0, 1):
                folder = tmp_path_factory.mktemp(variant)
                make(folder / "hf", variant, torch.bfloat16, seed=seed, **options)
                hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
                made[key].append((str(folder / "hf"), str(folder / "mcore")))
        return made[key]

    return get
