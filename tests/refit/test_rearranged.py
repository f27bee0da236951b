"""Refits into an engine that rearranges experts for its kernels once they are loaded, as vLLM does by default on
Blackwell: the kernels are chosen and never run, what they read is compared with vLLM's own loading."""

import pytest

from tests.megatron.test_logits import EP, ETP, TP
from tests.refit.test_blocks_engine import IGNORED, published
from tests.tools.by_compressed_tensors import EXPERTS
from tests.tools.refits import refit

CASES = [
    ("flashinfer_trtllm", f"{TP} 2", 2, {"tp": 2}, 2, True, {"moving": True}),
    ("flashinfer_trtllm", f"{EP} 2 {ETP} 1", 2, {"tp": 2, **EXPERTS}, 2, False, {"round_bytes": 1}),
    ("flashinfer_cutlass", f"{TP} 2", 2, {"tp": 2}, 2, True, {"moving": True}),
    ("flashinfer_cutlass", f"{EP} 2 {ETP} 1", 2, {"tp": 2, **EXPERTS}, 2, False, {"round_bytes": 1}),
]


@pytest.mark.parametrize("backend, parallel, trainers, engine, engines, together, options", CASES)
def test_a_refit_leaves_experts_as_vllm_arranges_them_for_a_kernel(
    backend, parallel, trainers, engine, engines, together, options, converted, tmp_path
):
    engine = engine | {"moe_backend": backend}
    refit(
        converted("served-moe-halves"), parallel, trainers, engine, engines, together, tmp_path, **options
    )


BLOCKS = [
    ("flashinfer_trtllm", False, {"tp": 2}),
    ("flashinfer_trtllm", True, {"tp": 2}),
    ("flashinfer_trtllm", True, {"tp": 2, **EXPERTS}),
    ("flashinfer_cutlass", True, {"tp": 2, **EXPERTS}),
]


@pytest.mark.parametrize("backend, stored, engine", BLOCKS)
def test_a_refit_leaves_blocks_of_experts_as_vllm_arranges_them_for_a_kernel(
    backend, stored, engine, converted, tmp_path
):
    checkpoints, options = converted("served-moe-halves"), {"round_bytes": 1}
    engine = engine | {"moe_backend": backend}
    if stored:
        directories, by_config = published(checkpoints, tmp_path)
        engine, options = engine | by_config, options | {"published": directories}
    else:
        engine |= {"quantization": "fp8_per_block"}
    refit(checkpoints, f"{EP} 2 {ETP} 1", 2, engine, 2, True, tmp_path / "run", ignored=IGNORED, **options)


def test_a_refit_leaves_scales_of_32_elements_as_vllm_arranges_them_for_a_kernel(converted, tmp_path):
    engine = {"tp": 2, "quantization": "mxfp8", "moe_backend": "flashinfer_trtllm"}
    refit(converted("served-moe-halves"), f"{TP} 2", 2, engine, 2, True, tmp_path, ignored=IGNORED)


DEEP_GEMM = {"linear_backend": "deep_gemm", "moe_backend": "deep_gemm"}


@pytest.mark.parametrize("stored", [False, True])
def test_a_refit_leaves_scales_as_vllm_packs_them_for_deep_gemm(stored, converted, tmp_path):
    checkpoints, engine, options = converted("served-moe-halves"), {"tp": 2, **DEEP_GEMM}, {}
    if stored:
        directories, by_config = published(checkpoints, tmp_path)
        engine, options = engine | by_config, {"published": directories}
    else:
        engine |= {"quantization": "fp8_per_block"}
    refit(checkpoints, f"{TP} 2", 2, engine, 2, True, tmp_path / "run", ignored=IGNORED, **options)
