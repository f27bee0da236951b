"""An engine that serves quantized weights hands them on as they are, to one that serves them alike: the newcomer then
holds the same bits, wherever vLLM keeps them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import install_sglang_cpu
from tests.engines.test_nvfp4_engine import config_of as in_nvfp4
from tests.megatron.test_logits import TP, flags_at
from tests.refit.test_blocks_engine import published
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.by_compressed_tensors import MADE_UP, config_of
from tests.tools.by_compressed_tensors import compressed as by_package


def without(ends: list[str], held: dict) -> dict:
    return {name: bits for name, bits in held.items() if not name.endswith(tuple(ends))}


def compressed(kind: str, strategy: str, **options) -> dict:
    return {"hf_overrides": {"quantization_config": config_of(kind, strategy)}, **options}


ONLINE = {"quantization": "fp8_per_block"}
EXPERTS_IN_BF16 = config_of("float", "channel", ignore=["lm_head", "re:.*experts.*"])
ARRANGED = {**ONLINE, "moe_backend": "flashinfer_trtllm"}
# The model, how it is served, on how many ranks, and how others are served that get nothing, with what is said of each.
CASES = {
    "fp8 in blocks": (
        "served-moe-halves", {**ONLINE, "tp": 2}, 2,
        {"by tensor": ({"quantization": "fp8"}, "by PerTensorTorchFP8ScaledMMLinearKernel here, and "),
         "in bf16": ({"quantization": None}, " is UnquantizedLinearMethod here, and Fp8")},
    ),
    "fp8 in packed blocks": (
        "served-moe-halves", {**ONLINE, "linear_backend": "deep_gemm", "moe_backend": "deep_gemm"}, 1, {},
    ),
    "fp8 in blocks, arranged": (
        "served-moe-halves", ARRANGED, 1,
        {"for another kernel": ({"moe_backend": "triton"}, "MoEMethod by FLASHINFER_TRTLLM there")},
    ),
    "fp8 by tensor": ("qwen3", {"tp": 2, "quantization": "fp8"}, 2, {}),
    "fp8 by channel, latent attention": ("deepseek-v3", compressed("float", "channel", tp=2), 2, {}),
    "int4 by Marlin": (
        "llama-bias", compressed("int4", "group 16"), 1,
        {"in larger groups": (compressed("int4", "group 32"), ".group_size is 32 here, and 16 there")},
    ),
    "int4 by channel, by Marlin": (
        "llama-bias", compressed("int4", "channel"), 1,
        {"for int8 inputs": (
            compressed("int4", "channel", environment={"VLLM_MARLIN_INPUT_DTYPE": "int8"}),
            ".config.act_type is torch.int8 here, and torch.bfloat16 there",
        )},
    ),
    "experts in bf16, with gate and up exchanged": (
        "served-moe-halves",
        {"hf_overrides": {"quantization_config": EXPERTS_IN_BF16}, "moe_backend": "flashinfer_cutlass"}, 1,
        {"not exchanged": ({"moe_backend": "triton"}, "experts is UnquantizedFusedMoEMethod by TRITON here, and Unqu")},
    ),
    "nvfp4 by Marlin": ("qwen3-moe", {"hf_overrides": {"quantization_config": in_nvfp4()}}, 1, {}),
    "mxfp8": (
        "served-moe-halves",
        {"quantization": "mxfp8", "moe_backend": "flashinfer_trtllm", "linear_backend": "flashinfer_cutlass"},
        1, {},
    ),
    "bf16, with what is computed of A_log": ("nemotron-h-moe", {}, 1, {}),
}  # fmt: skip


def check(said: dict, others: dict[str, str], early: str = "dummy weights") -> None:
    """Raise AssertionError unless a newcomer got every bit, `others` heard this, and who asked before the engine was
    refitted, `early`."""
    assert said["said"] == "no error" and said["version"] == 3 and said["serves"] == (True, True)
    assert without(MADE_UP, said["got"]) == without(MADE_UP, said["lent"]), "but for what no weights change"
    changed = [name for name, bits in said["got"].items() if said["before"][name] != bits]
    assert len(changed) > len(said["got"]) // 4 and said["still lent"] == said["lent"]
    one, other = (without(MADE_UP, held) for held in said["refitted"])
    assert one == other and not said["moved"]
    # Controls.
    assert early in said["early"] and "serves version 3, and cannot" in said["other version"]
    sentence, serves = said["spoiled"]
    assert "1 tensors did not arrive as they are" in sentence and not serves
    for name, expected in others.items():
        sentence = said["others"][name]
        assert "serves weights in a form of its own" in sentence and expected in sentence, sentence
        assert "\n" not in sentence


def arguments(checkpoints, engine: dict, ranks: int, loads: list[str], others: dict, folder: Path) -> tuple:
    sides = {"trainer": ranks, "engine": ranks, "together": True, "folder": str(folder), "port": free_port()}
    flags = flags_at(Path(checkpoints[0][1]), f"{TP} {ranks}" if ranks > 1 else "")
    return sides, flags, checkpoints, engine, loads, others


@pytest.mark.parametrize("case", CASES)
def test_a_newcomer_gets_every_bit_of_an_engine_and_is_refitted_after_that(case, converted, tmp_path):
    variant, engine, ranks, others = CASES[case]
    checkpoints = converted(variant)
    loads = [] if "hf_overrides" in engine else [checkpoints[1][0]]
    options = {name: how for name, (how, _) in others.items()}
    given = arguments(checkpoints, engine, ranks, loads, options, tmp_path)
    for said in run_on_ranks(ranks, "brought_up", *given, module="refit_twins_on_cpu"):
        check(said, {name: expected for name, (_, expected) in others.items()})


def with_cache_scales(folder: str, scale: float) -> str:
    """Add scales of an fp8 cache to a checkpoint of compressed-tensors."""
    file, config = (Path(folder) / name for name in ("model.safetensors", "config.json"))
    tensors, fields = load_file(file), json.loads(config.read_text())
    for layer in {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}:
        tensors |= {f"{layer}.self_attn.{one}_proj.{one}_scale": torch.tensor([scale]) for one in "kv"}
    save_file(tensors, file, {"format": "pt"})
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    fields["quantization_config"]["kv_cache_scheme"] = cache
    config.write_text(json.dumps(fields))
    return folder


def test_scales_of_inputs_and_of_caches_that_came_with_another_checkpoint_are_another_form(
    converted, tmp_path
):
    checkpoints = converted("qwen3")
    (first, _), (second, _) = checkpoints
    # Weights, the inputs' scales, and the cache's.
    made = [(second, 0, 0.5), (first, 0, 0.5), (second, 1, 0.5), (second, 0, 0.03)]
    folders = [
        with_cache_scales(by_package(hf, tmp_path / str(n), "float", "tensor", True, seed), scale)
        for n, (hf, seed, scale) in enumerate(made)
    ]
    (tmp_path / "run").mkdir()
    said_to = {
        "inputs": "the scales of the input of model.layers.0.",
        "caches": "the scales of the cache of model.layers.0.self_attn.attn is ",
    }
    others = {
        name: {"directory": folder, "load_format": "safetensors"}
        for name, folder in zip(said_to, folders[2:], strict=True)
    }
    engine = {"hf_overrides": {}, "kv_cache_dtype": "fp8"}
    given = arguments(checkpoints, engine, 1, folders[:2], others, tmp_path / "run")
    [said] = run_on_ranks(1, "brought_up", *given, module="refit_twins_on_cpu")
    check(said, said_to, "serves weights of no version")


@pytest.mark.parametrize("variant", ["served-moe-blocks", "served-mla-blocks"])
def test_a_newcomer_of_sglang_gets_every_bit_of_blocks_and_of_what_is_derived_of_them(
    variant, converted, tmp_path
):
    checkpoints = converted(variant)
    [_, other], blocks = published(checkpoints, tmp_path)
    (tmp_path / "run").mkdir()
    others = {"in bf16": {"hf_overrides": {}}}
    said_to = {"in bf16": "is nothing here, and fp8 blocks by "}
    if "mla" in variant:  # SGLang's class of the other has no scales of the cache
        others["fp8"] = {"directory": other, "load_format": "auto", "kv_cache_dtype": "fp8_e4m3"}
        said_to["fp8"] = "the scales of the cache of model.layers.0.self_attn."
    given = arguments(checkpoints, blocks, 1, [other], others, tmp_path / "run")
    [said] = run_on_ranks(
        1, "brought_up", *given, module="refit_twins_sglang_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    check(said, said_to)
    if "mla" in variant:
        assert any(name.endswith("w_kc") for name in said["got"])
