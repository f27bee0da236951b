"""An engine that serves quantized weights hands them on as they are, to one that serves them alike: the newcomer then
holds the same bits, wherever vLLM keeps them."""

from pathlib import Path

import pytest

from tests.megatron.test_logits import TP, flags_at
from tests.refit.test_blocks_engine import published
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.by_compressed_tensors import config_of


def compressed(kind: str, strategy: str, **options) -> dict:
    return {"hf_overrides": {"quantization_config": config_of(kind, strategy)}, **options}


BLOCKS = {"quantization": "fp8_per_block"}
# The model, how it is served, on how many ranks, and how others are served that get nothing, with what is said of each.
CASES = {
    "fp8 in blocks": ("served-moe-halves", {**BLOCKS, "tp": 2}, 2, {}),
    "fp8 in packed blocks": (
        "served-moe-halves", {**BLOCKS, "linear_backend": "deep_gemm", "moe_backend": "deep_gemm"}, 1, {}
    ),
    "fp8 in blocks, arranged": ("served-moe-halves", {**BLOCKS, "moe_backend": "flashinfer_trtllm"}, 1, {}),
    "fp8 by tensor": ("qwen3", {"tp": 2, "quantization": "fp8"}, 2, {}),
    "fp8 by channel, latent attention": ("deepseek-v3", compressed("float", "channel", tp=2), 2, {}),
    "int4 by Marlin": ("llama-bias", compressed("int4", "group 16"), 1, {}),
    "mxfp8": (
        "served-moe-halves",
        {"quantization": "mxfp8", "moe_backend": "flashinfer_trtllm", "linear_backend": "flashinfer_cutlass"},
        1,
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_newcomer_gets_every_bit_of_a_quantized_engine_and_is_refitted_after_that(case, converted, tmp_path):
    variant, engine, ranks, others = CASES[case]
    checkpoints = converted(variant)
    sides = {"trainer": ranks, "engine": ranks, "together": True, "folder": str(tmp_path), "port": free_port()}
    flags = flags_at(Path(checkpoints[0][1]), f"{TP} {ranks}")
    for said in run_on_ranks(
        ranks, "brought_up", sides, flags, checkpoints, engine, {name: how for name, (how, _) in others.items()},
        module="refit_twins_on_cpu",
    ):  # fmt: skip
        print({k: v for k, v in said.items() if k not in ("lent", "before", "got", "still lent", "refitted")})
        wrong = [name for name, bits in said["lent"].items() if said["got"].get(name) != bits]
        print(len(said["lent"]), wrong[:10])
        assert said["said"] == "no error" and said["version"] == 3 and said["serves"] == (True, True)
        assert said["got"] == said["lent"] == said["still lent"] != said["before"]
        one, other = said["refitted"]
        assert one == other and not said["moved"]
