"""A chain of deltas brings a model and its drafter in one version, bit for bit what vLLM's own loaders make of the files
of both; or it brings neither."""

import pytest
import torch

from reshard import hf_to_mcore
from tests.megatron.test_logits import TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3

MODULE = "delta_drafters_on_cpu"
# The numbers of the model's and the drafter's directory after each version: either stays as it was in one of them.
STEPS = [(1, 0), (1, 1), (1, 2), (2, 2), (0, 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models of one shape, in both formats."""
    folder, made = tmp_path_factory.mktemp("models"), []
    for seed in range(3):
        hf = make(folder / f"hf{seed}", "qwen3", torch.bfloat16, seed)
        hf_to_mcore(hf, folder / f"mcore{seed}", transformer_impl="local")
        made.append((str(hf), str(folder / f"mcore{seed}")))
    return made


@pytest.fixture(scope="module")
def drafters(models, tmp_path_factory):
    """Three drafters of each kind."""
    folder = tmp_path_factory.mktemp("drafters")
    kinds = {"few tokens": (64, False), "own embedding": (None, True)}
    return {
        kind: [
            Eagle3(models[0][0], *how, seed=seed).publish(folder / kind / str(seed)) for seed in range(3)
        ]
        for kind, how in kinds.items()
    }


@pytest.mark.parametrize(
    "kind, parallel, ranks, engine",
    [
        ("few tokens", None, 1, {}),
        ("own embedding", None, 2, {"tp": 2}),
        ("few tokens", f"{TP} 2", 2, {"tp": 2}),
    ],
    ids=["fsdp", "fsdp on two ranks", "megatron on two ranks"],
)
def test_an_engine_follows_a_model_and_its_drafter(
    kind, parallel, ranks, engine, models, drafters, tmp_path
):
    flags = None if parallel is None else flags_at(tmp_path / "flags", parallel) if False else None
    if parallel is not None:
        from pathlib import Path

        flags = flags_at(Path(models[0][1]), parallel)
    arguments = models, drafters[kind], flags, engine, STEPS, str(tmp_path)
    for of in run_on_ranks(ranks, "follow", *arguments, module=MODULE):
        print(of)
