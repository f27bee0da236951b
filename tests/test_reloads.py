"""Refits into an engine that quantises plain weights itself after loading, through vLLM's own processing."""

from pathlib import Path

import pytest

from tests.ranks import free_port, run_on_ranks
from tests.test_logits import flags_at
from tests.test_refit import TP, converted, refit

__all__ = ["converted"]
CASES = [
    ("qwen3", "fp8_per_channel"),
    ("qwen3", "mxfp8"),
    ("qwen3-moe", "fp8"),
    ("qwen3-moe", "int8_per_channel_weight_only"),
    ("deepseek-v3", "fp8_per_channel"),
    ("deepseek-v3", "fp8_per_tensor"),
]


@pytest.mark.parametrize("variant, quantization", CASES)
def test_a_refit_leaves_what_vllm_makes_of_the_same_weights(variant, quantization, converted, tmp_path):
    # Dummy weights make up scales of the key-value cache too, which nobody reads unless it is in fp8.
    options = {"moving": variant == "qwen3-moe", "ignored": ["_k_scale", "_v_scale"]}
    refit(converted(variant), "", 1, {"quantization": quantization}, 1, True, tmp_path, **options)


def test_layers_take_turns_in_a_slab_on_every_rank(converted, tmp_path):
    engine = {"tp": 2, "quantization": "fp8_per_tensor"}
    refit(converted("qwen3-moe"), f"{TP} 2", 2, engine, 2, True, tmp_path / "a", round_bytes=1)
    refit(converted("qwen2"), f"{TP} 2", 2, engine, 2, True, tmp_path / "b", round_bytes=50_000)


def test_blocks_for_a_kernel_that_is_not_known_are_made_by_vllm(converted, tmp_path):
    refit(converted("qwen3-moe"), "", 1, {"quantization": "fp8_per_block"}, 1, True, tmp_path, unknown=True)


def test_a_check_makes_it_again_and_what_fails_leaves_the_layers_as_they_were(converted, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    checkpoint = converted("qwen3-moe")[0]
    arguments = sides, flags_at(Path(checkpoint[1]), ""), checkpoint, {"quantization": "fp8_per_channel"}
    [said] = run_on_ranks(1, "reloads_that_differ", *arguments, module="refit_on_cpu")
    plain, scale, code, failed, number, mended, same, quantised = said
    assert plain == mended == "no error" and same
    for said in (scale, code):
        assert (
            "3 tensors did not arrive as they are in the trainer" in said
            and "q_proj" in said
            and "o_proj" not in said
        )
    assert (
        "vLLM fails to process model.layers.0.self_attn.qkv_proj once more (RuntimeError: out of memory)"
        in failed[0]
    )
    assert (
        "vLLM keeps factor beside the weights of model.layers.0.self_attn.qkv_proj, 2.0 before and 4.0"
        in number[0]
    )
    assert failed[1:] == number[1:] == (False, True), "unfit to serve, with all that it had"
    assert {one["kernel"] for one in quantised} == {"ChannelWiseTorchFP8ScaledMMLinearKernel", "TRITON"}
    assert all("of vLLM, by a slab" in one["how"] and one["layers"] for one in quantised)
