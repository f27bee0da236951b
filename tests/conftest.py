"""Fixtures: checkpoints are made once a session."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.starting import warm

# Pytest's workers are forked by a program that stands for a Python; what they start as
# sys.executable is to be a real one.
sys.executable = os.environ.get("WARM_EXECUTABLE", sys.executable)

# vLLM's quantized kernels would be built aside by every process that imports them, two processes
# with torch for each.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
# Ray's workers would have only what all other tests leave of the cores.
os.environ.setdefault("RAY_worker_niceness", "0")
# Started in the background by a shell, pytest ignores SIGINT, and so would every command that a
# test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What engines of tests that are started from here are given by their own modules.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "SGLANG_"))}


# Test files whose tests are slow, those that take longest first: a worker takes one file at a time.
# A name also stands for files whose names go on after it (`refit` for test_refit_faults.py), so
# that a file that is split keeps its place.
SLOWEST_FIRST = (
    "install", "without_table", "lora", "engine", "verl", "causes", "fleet", "site", "refit", "parity", "swift",
    "nvfp4_engine", "nemo_rl", "wrapped", "processes", "hybrid", "sglang", "roll", "logits", "live_save", "live_load",
    "fsdp", "compressed", "serving", "towers", "trl", "monitored", "switching", "gtp",
    "megatron_saves", "weight_transfer", "delta_live", "blocks", "kernels", "storage_faults", "object_stores", "cli",
    "optimizer", "members", "published", "bitwise", "resume", "reloads", "build", "compat", "surface", "config_rules",
    "megatron_args", "megatron_parser", "trainer_settings", "sleeping", "examples", "families", "offload",
    "input_faults", "source_changes", "html", "trainers_checkpoints", "lora_files",
)  # fmt: skip
# Test files that use these are slow as well, whatever their names.
STARTS_PROCESSES = (
    "run_on_ranks",
    "tests.starting.warm",
    "tests.starting.fork_server",
    "tests.tools.vllm_server",
    "tests.tools.environments",
)


def place_of(path: Path) -> int:
    """Return a test file's place in the order of the run: `SLOWEST_FIRST`, other slow files, quick
    ones."""
    if path.suffix == ".md":
        return SLOWEST_FIRST.index("parity")  # a page starts commands, and some run a model
    stem = path.stem.removeprefix("test_")
    names = [name for name in SLOWEST_FIRST if stem == name or stem.startswith(f"{name}_")]
    if names:
        return SLOWEST_FIRST.index(max(names, key=len))
    text = path.read_text(encoding="utf-8")
    return len(SLOWEST_FIRST) + (not any(word in text for word in STARTS_PROCESSES))


def pytest_collection_modifyitems(items):
    """Mark slow tests, for ``-m "not slow"``, which answers in a minute or two; put them first."""
    places = {path: place_of(path) for path in {item.path for item in items}}
    for item in items:
        if places[item.path] <= len(SLOWEST_FIRST):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session):
    """Refuse tests that set variables of an engine as they are imported: every engine of every other test would
    be started with them."""
    now = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "SGLANG_"))}
    if now != ENVIRONMENT:
        raise pytest.UsageError(f"importing the tests has set {', '.join(sorted(now.keys() - ENVIRONMENT))}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    program = warm.share()
    for spec in specs:
        spec.python = program


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return a function from a variant to its Hugging Face directory, which is made at the first
    call."""
    from tests.tools.checkpoints import make

    directories = {}

    def get(variant, **options):
        key = (variant, *sorted(options.items(), key=str))
        if key not in directories:
            directories[key] = make(tmp_path_factory.mktemp(variant), variant, **options)
        return directories[key]

    return get


@pytest.fixture(scope="session")
def trained(hub, tmp_path_factory):
    """Return the directory of a trained model with its tokenizer, in bf16: the first ten layers of
    SmolLM2-135M-Instruct, whose weights and activations have the outliers of the whole model."""
    from tests.tools.pages import TRAINED_MODEL, snapshot
    from tests.tools.trained import first_layers

    return first_layers(
        snapshot(hub(False), TRAINED_MODEL), tmp_path_factory.mktemp("trained") / "hf", layers=10
    )


@pytest.fixture(scope="session")
def whole(checkpoint, tmp_path_factory):
    """Return, by direction, the source and the bytes that an undisturbed run makes of it."""
    import torch

    from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
    from tests.tools.disk import tree

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
    """Return a copy of a checkpoint that a test may damage."""
    import torch

    return Path(shutil.copytree(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture
def mcore(source, tmp_path):
    """Return `source` as a Megatron checkpoint."""
    from reshard import MegatronLayout, hf_to_mcore

    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2))
    return tmp_path / "mcore"


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Return a function from a variant to two checkpoints in bf16, each as (Hugging Face directory,
    Megatron directory)."""
    import torch

    from reshard import hf_to_mcore
    from tests.tools.checkpoints import make

    pairs = {}

    def get(variant: str, **options) -> list[tuple[str, str]]:
        key = (variant, *sorted(options))
        if key not in pairs:
            pairs[key] = []
            for seed in (0, 1):
                folder = tmp_path_factory.mktemp(variant)
                make(folder / "hf", variant, torch.bfloat16, seed=seed, **options)
                hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
                pairs[key].append((str(folder / "hf"), str(folder / "mcore")))
        return pairs[key]

    return get


@pytest.fixture(scope="session")
def megatron_of(tmp_path_factory):
    """Return a function from a variant, a layout and further options of a conversion to (Hugging Face
    directory, Megatron checkpoint at that layout)."""
    from reshard import MegatronLayout, hf_to_mcore
    from tests.tools.checkpoints import make

    pairs = {}

    def get(variant: str, layout: MegatronLayout | None = None, **options):
        key = variant, layout or MegatronLayout(), *sorted(options.items())
        if key not in pairs:
            folder = tmp_path_factory.mktemp(variant)
            make(folder / "hf", variant)
            hf_to_mcore(folder / "hf", folder / "mcore", key[1], transformer_impl="local", **options)
            pairs[key] = folder / "hf", folder / "mcore"
        return pairs[key]

    return get


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A function that gives directories of a variant's weights in bf16: ``hf`` and ``mcore``,
    Megatron at one rank."""
    import torch

    from reshard import hf_to_mcore
    from tests.tools.checkpoints import make

    made = {}

    def get(variant, seed=0, **options):
        key = (variant, seed, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(variant)
            make(made[key] / "hf", variant, torch.bfloat16, seed=seed, **options)
            hf_to_mcore(made[key] / "hf", made[key] / "mcore", transformer_impl="local")
        return made[key]

    return get
