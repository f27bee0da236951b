"""The digest of live weights: that of the checkpoint that they came from, in trainers and in engines."""

from pathlib import Path

import pytest
import torch

import reshard
from reshard import hf_to_mcore, mcore_to_hf
from reshard.storage.digest import digest_of_path
from tests.digests.on_disk import expected
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make

CASES = [
    ("llama-rope-tied", f"{TP} 2 {PP} 2", 4, {"tp": 4}, False),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, {"tp": 4, "enable_expert_parallel": True}, False),
    ("qwen3-next", f"{TP} 2", 2, {"tp": 2}, False),
    ("glm4-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2}, True),
]


@pytest.mark.parametrize("variant, parallel, ranks, engine, wide", CASES, ids=[case[0] for case in CASES])
def test_a_trainer_and_an_engine_have_the_digest_of_their_checkpoint(
    variant, parallel, ranks, engine, wide, tmp_path
):
    """At layouts that split every kind of tensor, some with vocabulary padding, tied weights, norms that Megatron holds
    less 1, and one in fp32, whose router biases an engine in bf16 holds in fp32 too."""
    make(tmp_path / "hf", variant, torch.float32 if wide else torch.bfloat16)
    hf = tmp_path / "hf"
    hf_to_mcore(hf, tmp_path / "mcore", transformer_impl="local")
    text, numbers = expected(hf, "e_score_correction_bias", "bf16" if wide else None)
    if variant == "qwen3-next":  # some of its canonical tensors are views of published ones
        given = reshard.digest(hf)
        whole = {name: number for name, number in given.tensors.items() if "[" not in name}
        assert whole.items() <= numbers.items() and len(whole) > 40
        text, numbers = given.text, given.tensors
    arguments = flags_at(tmp_path / "mcore", parallel), str(hf), str(tmp_path / "mcore"), engine, wide
    outcomes = run_on_ranks(ranks, "of_megatron_and_vllm", *arguments, module="digest_on_cpu")
    for rank, outcome in enumerate(outcomes):
        assert outcome["checksums"] == [True, True] and outcome["checksums, changed"] == (rank > 0)
        assert outcome["trainer"] == [text, numbers]
        given_text, given = outcome["engine"]
        assert given == numbers and given_text == text
        if wide:
            assert outcome["as held"][0] == reshard.digest(hf).text
        assert outcome["trainer, changed"] not in ("", text), "the control"
        assert outcome["engine, changed"] not in ("", text), "the control"
        assert "holds a half-written model" in outcome["half"]
        assert "serve different versions" in outcome["versions"]
        assert outcome["silent"] == "a worker has not answered"
        assert outcome["options"] == "an engine knows what it serves: leave out hf_config"


def says_the_digest(outcomes: list[dict], text: str) -> None:
    """Hold what `digest_on_cpu.of_refit` returns to the digest of a checkpoint."""
    for rank, outcome in enumerate(outcomes):
        for place in ("report", "trainer", "engine", "described", "verified again"):
            assert outcome[place] == text, place
        assert outcome["changed"] not in ("", text), "the control"
        assert outcome["described, changed"] == (None if rank == 0 else text), (
            "each says what it holds itself"
        )
        assert outcome["not verified"] == [None, None]


@pytest.mark.parametrize("variant, parallel, ranks, engine, wide", [
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2, "enable_expert_parallel": True}, False),
    ("qwen3", "", 2, {"tp": 2}, False),
    ("glm4-moe", f"{PP} 2", 2, {"tp": 2}, True),
])  # fmt: skip
def test_a_verified_refit_from_megatron_says_the_digest_that_both_sides_have(
    variant, parallel, ranks, engine, wide, tmp_path
):
    hf, mcore = make(tmp_path / "hf", variant, torch.float32 if wide else torch.bfloat16), tmp_path / "mcore"
    hf_to_mcore(hf, mcore, transformer_impl="local")
    arguments = flags_at(mcore, parallel), str(hf), str(mcore), engine, wide
    outcomes = run_on_ranks(ranks, "of_refit_from_megatron", *arguments, module="digest_on_cpu")
    says_the_digest(outcomes, expected(hf, "e_score_correction_bias", "bf16" if wide else None)[0])
    if PP not in parallel:
        for outcome in outcomes:
            assert (
                "ranks serve different numbers of model.norm.weight: replicas of it differ"
                in outcome["replicas"]
            )


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_a_verified_refit_from_fsdp2_says_the_digest_that_both_sides_have(mesh, tmp_path):
    hf = make(tmp_path / "hf", "qwen3-moe", torch.float32)
    arguments = mesh, str(hf), {"tp": 2, "enable_expert_parallel": True}
    outcomes = run_on_ranks(2, "of_refit_from_fsdp", *arguments, module="digest_on_cpu")
    says_the_digest(outcomes, expected(hf, dtype="bf16")[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_in_fp8_blocks_has_the_digest_of_its_checkpoint_as_stored(ranks, tmp_path):
    make(tmp_path / "hf", "served-blocks", torch.bfloat16)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "fp8", quantize=True)
    stored = digest_of_path(tmp_path / "fp8", stored=True)
    assert stored.text != digest_of_path(tmp_path / "fp8").text
    outcomes = run_on_ranks(
        ranks, "of_vllm_in_blocks", str(tmp_path / "fp8"), {"tp": ranks}, module="digest_on_cpu"
    )
    for outcome in outcomes:
        assert outcome["whole"] == stored.text
        assert "served in fp8 blocks" in outcome["notices"][0]
        assert "leave out the dtype" in outcome["in bf16"]
        text, names = outcome["changed"]
        assert text != stored.text and len(names) == 1 and names[0].endswith("_scale_inv"), "the control"


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tp": 2}], ids=str)
def test_a_model_under_fsdp2_in_fp32_has_the_digest_of_its_checkpoint(mesh, tmp_path):
    make(tmp_path / "hf", "qwen3-moe", torch.float32)
    ranks = 1
    for size in mesh.values():
        ranks *= size
    outcomes = run_on_ranks(ranks, "of_fsdp", mesh, str(tmp_path / "hf"), module="digest_on_cpu")
    for dtype in ("bf16", "fp32"):
        text, numbers = expected(Path(tmp_path / "hf"), dtype=dtype)
        assert all(outcome[dtype] == [text, numbers] for outcome in outcomes)
    for outcome in outcomes:
        assert outcome["changed"] not in ("", outcome["bf16"][0]), "the control"
        if "replicate" in mesh:
            assert "ranks of the trainer hold different numbers of model." in outcome["changed"]
        assert "a live model has no published names of its own: give hf_config=" in outcome["nameless"]
