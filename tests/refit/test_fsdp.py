"""Refits from transformers models under FSDP2: bit for bit what vLLM's own loader makes of the
published checkpoint."""

from pathlib import Path

import pytest
import torch

from reshard import diff
from reshard.delta import apply
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import make

NARROW = ("k_proj", "up_proj", "kv_b_proj")
# Each family, and each axis of a mesh and of an engine, once; where both are in the same processes they are
# half as many.
CASES = [
    ("llama", {"shard": 2}, {"tp": 2}, 2, True),
    ("llama-rope-tied", {"shard": 3}, {"tp": 1}, 1, False),  # no size divides by 3
    ("qwen2", {"shard": 2}, {"pp": 2}, 2, True),
    ("qwen3", {"replicate": 2, "shard": 2}, {"tp": 4}, 4, True),
    ("qwen3-moe-mixed", {"shard": 3}, {"tp": 2}, 2, False),
    ("qwen3-next", {"shard": 2}, {"tp": 2}, 2, True),
    ("deepseek-v3", {"shard": 2, "tp": 2}, {"tp": 4}, 4, True),
    ("deepseek-v3-no-q-lora", {"shard": 2}, {"tp": 2}, 2, True),
    ("mixtral", {"replicate": 2, "shard": 1}, {"tp": 2}, 2, True),
    ("seed-oss", {"shard": 3}, {"tp": 2}, 2, False),
    ("phi4", {"shard": 3}, {"tp": 2}, 2, False),
    ("ling", {"shard": 2}, {"tp": 2}, 2, True),
    ("qwen2-moe", {"shard": 2, "tp": 2}, {"tp": 4}, 4, True),
    ("minimax-m2", {"shard": 2}, {"tp": 2}, 2, True),
    ("nemotron-h-moe", {"shard": 3}, {"tp": 2}, 2, False),
    ("olmoe", {"shard": 2, "tp": 1}, {"tp": 2, "enable_expert_parallel": True}, 2, True),
    ("glm-moe-dsa-shared", {"shard": 2}, {"tp": 2}, 2, True),
    ("ernie", {"shard": 3}, {"tp": 2, "enable_expert_parallel": True}, 2, False),
]
BLOCKS = {"quantization": "fp8_per_block"}
WIDEST = 256 * 384  # bytes of a row of blocks of the widest matrix that has parts of some
# Trainers whose parameters are fp32 of which the engine serves what its loader makes of fp32: bf16,
# but for MoE's bias.
WIDE = [
    ("qwen3-moe", {"shard": 4}, {"tp": 2, "enable_expert_parallel": True}, 2, False, {"backend": "nccl"}),
    ("deepseek-v3", {"shard": 2}, {"tp": 2}, 2, True, {}),
    ("glm4-moe", {"shard": 3}, {"tp": 1}, 1, False, {"backend": "staged"}),
    ("qwen3-moe", {"shard": 1}, {"tp": 1, "quantization": "fp8_per_channel"}, 1, True, {}),
    # blocks where all of their memory is read; in buckets, of parts, in many rounds; of parts of
    # which some come in buckets and others are read; and staged. Some are partly in bf16.
    ("qwen3", {"shard": 1}, BLOCKS, 1, True, {"narrow": NARROW}),
    ("served-moe-blocks", {"shard": 3}, BLOCKS, 1, False, {"slab_bytes": 1 << 17}),
    ("qwen3", {"shard": 2}, {"dp": 2} | BLOCKS, 2, True, {"slab_bytes": 1 << 16}),
    ("deepseek-v3", {"shard": 2}, BLOCKS, 1, False, {"backend": "staged", "narrow": NARROW}),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of a variant in bf16, or another dtype."""
    made: dict[tuple[str, torch.dtype], list[str]] = {}

    def get(variant: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        if (variant, dtype) not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant, dtype] = [
                str(make(folder / str(seed), variant, dtype, seed=seed)) for seed in (0, 1)
            ]
        return made[variant, dtype]

    return get


def sides_of(mesh: dict[str, int], engines: int, together: bool, folder: Path) -> tuple[dict, int]:
    trainers = torch.Size(mesh.values()).numel()
    sides = {
        "trainer": trainers,
        "engine": engines,
        "together": together,
        "folder": str(folder),
        "port": free_port(),
    }
    return sides, trainers if together else trainers + engines


@pytest.mark.parametrize(
    ("variant", "mesh"), [("qwen3-moe", {"shard": 3}), ("llama-rope-tied", {"replicate": 2, "shard": 1})]
)
def test_a_chain_from_an_fsdp_model_in_fp32_leads_a_checkpoint_in_bf16_to_its_versions(
    variant, mesh, checkpoints, tmp_path
):
    first, second = checkpoints(variant)
    ranks = torch.Size(mesh.values()).numel()
    outcomes = run_on_ranks(
        ranks, "write_chain", mesh, [first, second], f"{tmp_path}/chain", module="delta_on_cpu"
    )
    for wrong, densities in outcomes:
        assert "dtype bf17 is not one of bf16, fp16, fp32" in wrong
        assert all(0.5 < density < 1 for density in densities)
    for version, expected, other in ((1, second, first), (2, first, second)):
        apply(first, tmp_path / "chain", tmp_path / f"out{version}", version=version)
        assert (
            diff(expected, tmp_path / f"out{version}").equal
            and not diff(other, tmp_path / f"out{version}").equal
        )


@pytest.mark.parametrize(("variant", "mesh", "engine", "engines", "together"), CASES, ids=str)
def test_an_fsdp_model_refits_what_vllms_own_loader_makes_of_its_checkpoint(
    variant, mesh, engine, engines, together, checkpoints, tmp_path
):
    sides, ranks = sides_of(mesh, engines, together, tmp_path)
    check(
        run_on_ranks(ranks, "refit_twice", sides, mesh, checkpoints(variant), engine, module="fsdp_on_cpu"),
        engines,
    )


@pytest.mark.parametrize(("variant", "mesh", "engine", "engines", "together", "options"), WIDE, ids=str)
def test_fp32_parameters_arrive_as_vllms_own_loader_casts_them(
    variant, mesh, engine, engines, together, options, checkpoints, tmp_path
):
    sides, ranks = sides_of(mesh, engines, together, tmp_path)
    wide = checkpoints(variant, torch.float32)
    options = {"dtype": torch.float32, **options}
    results = run_on_ranks(
        ranks, "refit_twice", sides, mesh, wide, engine, module="fsdp_on_cpu", options=options
    )
    check(results, engines)
    limit, in_blocks = options.get("slab_bytes"), engine.get("quantization") == "fp8_per_block"
    for *_, described in results[-engines:]:
        parts = described["parts"]
        assert (parts["bytes"] > 0) == (parts["slab_bytes"] > 0) == (in_blocks and mesh["shard"] > 1)
        if limit:
            assert parts["rounds"] > 2 and parts["slab_bytes"] <= max(limit, WIDEST)


def check(results: list, engines: int) -> None:
    """Every engine's rank holds, after either refit, what its loader makes of that checkpoint."""
    checked = [(held, expected) for held, expected, _ in results if expected]
    assert len(checked) == engines
    for held, expected in checked:
        for now, loaded in zip(held, expected, strict=True):
            assert {
                name for name in loaded if now.get(name) != loaded[name]
            } == set() and now.keys() == loaded.keys()
        # The second refit must have brought other weights.
        assert sum(held[0][name] != held[1][name] for name in held[0]) > 0.6 * len(held[0])


def test_a_model_that_is_moved_between_refits_is_found_again(checkpoints, tmp_path):
    sides, ranks = sides_of({"shard": 2}, 1, False, tmp_path)
    arguments = (sides, {"shard": 2}, checkpoints("qwen3-moe"), {})
    held, expected, _ = run_on_ranks(
        ranks, "refit_twice", *arguments, module="fsdp_on_cpu", options={"moving": True}
    )[-1]
    assert held == expected


def test_a_model_that_is_moved_after_a_refit_gets_its_memory_back(checkpoints, tmp_path):
    sides, ranks = sides_of({"shard": 2}, 1, False, tmp_path)
    arguments = (sides, {"shard": 2}, checkpoints("qwen3-moe")[0])
    assert run_on_ranks(ranks, "kept_memory", *arguments, module="fsdp_on_cpu") == [[], [], []]


@pytest.mark.parametrize(("what", "sentence"), [
    ("dtype", "is float16 in the trainer, but bfloat16 in the engine"),
    ("config", "the trainer's rms_norm_eps is 0.5, but the served model's is 1e-06"),
    ("one too many", "holds 1 parameters that qwen3 does not have: model.layers.0.self_attn.adapter"),
    ("elsewhere", "is on meta, and a refit reads from cpu: move the whole model there first"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_at_connect_everywhere(what, sentence, checkpoints, tmp_path):
    sides, ranks = sides_of({"shard": 2}, 1, False, tmp_path)
    for said in run_on_ranks(
        ranks, "refused", sides, {"shard": 2}, checkpoints("qwen3")[0], what, module="fsdp_on_cpu"
    ):
        assert sentence in said, said
