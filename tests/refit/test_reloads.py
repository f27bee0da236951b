"""Refits into an engine that quantizes plain weights itself after loading, through vLLM's own
processing."""

from pathlib import Path

import pytest

from tests.megatron.test_logits import EP, PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.refits import refit

CASES = [
    ("qwen3", "fp8_per_channel"),
    ("qwen3", "mxfp8"),
    ("qwen3-moe", "fp8"),
    ("qwen3-moe", "int8_per_channel_weight_only"),
    ("deepseek-v3", "fp8_per_channel"),
    ("ling", "fp8_per_channel"),
    ("qwen3-next", "fp8_per_channel"),
    ("deepseek-v3", "fp8_per_tensor"),
]


@pytest.mark.parametrize("variant, quantization", CASES)
def test_a_refit_leaves_what_vllm_makes_of_the_same_weights(variant, quantization, converted, tmp_path):
    # Dummy weights make up scales of the key-value cache too, which nobody reads unless it is in
    # fp8.
    options = {"moving": variant == "qwen3-moe", "ignored": ["_k_scale", "_v_scale"]}
    refit(converted(variant), "", 1, {"quantization": quantization}, 1, True, tmp_path, **options)


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block"])
@pytest.mark.parametrize("rebinds", [False, True])
def test_what_attention_derives_from_its_projection_stays_where_cuda_graphs_read_it(
    quantization, rebinds, converted, tmp_path
):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    checkpoints = converted("deepseek-v3")
    arguments = (
        sides,
        flags_at(Path(checkpoints[0][1]), ""),
        checkpoints,
        {"quantization": quantization},
        rebinds,
    )
    [outcome] = run_on_ranks(1, "absorbed_where_it_was", *arguments, module="refit_reloads_on_cpu")
    held, expected, served, matrices, spoiled, then = outcome
    assert matrices == 8 and served
    assert held == expected and not held[0].items() & held[1].items()
    assert "1 tensors are not what the engine derives" in spoiled and "layers.1.self_attn" in spoiled
    assert then == "no error"


# Where the weights lie; in buckets, of many rounds in each of the slab's; through a slab of the
# trainer's; and one part so, the other so.
TURNS = [
    ("qwen3-moe", f"{TP} 2", 2, 2, True, {"round_bytes": 1}),
    ("qwen2", f"{TP} 2", 2, 2, True, {"round_bytes": 50_000}),
    ("qwen3-moe", f"{PP} 2 {EP} 2", 4, 2, False, {"round_bytes": 1, "bucket_bytes": 1 << 20}),
    ("qwen2", f"{TP} 2", 2, 1, False, {"round_bytes": 50_000, "backend": "staged", "bucket_bytes": 1 << 19}),
    ("qwen3-moe", f"{PP} 2", 2, 2, True, {"round_bytes": 50_000}),
]


@pytest.mark.parametrize("variant, parallel, trainers, engines, together, options", TURNS)
def test_layers_take_turns_in_a_slab_on_every_rank(
    variant, parallel, trainers, engines, together, options, converted, tmp_path
):
    engine = {"tp": engines, "quantization": "fp8_per_tensor"}
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path, **options)


def test_blocks_for_a_kernel_that_is_not_known_are_made_by_vllm(converted, tmp_path):
    refit(converted("qwen3-moe"), "", 1, {"quantization": "fp8_per_block"}, 1, True, tmp_path, unknown=True)


@pytest.mark.parametrize("together", [True, False])
def test_a_check_makes_it_again_and_what_fails_leaves_the_layers_as_they_were(together, converted, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": together, "folder": str(tmp_path), "port": free_port()}
    checkpoint = converted("qwen3-moe")[0]
    arguments = sides, flags_at(Path(checkpoint[1]), ""), checkpoint, {"quantization": "fp8_per_channel"}
    *trainers_messages, messages = run_on_ranks(
        1 if together else 2, "reloads_that_differ", *arguments, module="refit_reloads_on_cpu"
    )
    for on_trainer in trainers_messages:
        assert on_trainer[0] == on_trainer[6] == "no error" and all(
            "_proj" in message for message in on_trainer[1:5]
        )
    plain, scale, code, failed, number, middle, mended, same, quantized = messages
    assert plain == mended == "no error" and same and "the check ends here" in middle
    for messages in (scale, code):
        assert (
            "3 tensors did not arrive as they are in the trainer" in messages
            and "q_proj" in messages
            and "o_proj" not in messages
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
    assert {one["kernel"] for one in quantized} == {"ChannelWiseTorchFP8ScaledMMLinearKernel", "TRITON"}
    assert all("of vLLM, by a slab" in one["how"] and one["layers"] for one in quantized)
