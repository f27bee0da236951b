"""Refits into an engine that rearranges experts for its kernels once they are loaded, as vLLM does by default on
Blackwell: the kernels are chosen and never run, what they read is compared with vLLM's own loading."""

import pytest

from tests.megatron.test_logits import EP, ETP, TP
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
        converted("served-moe-blocks"), parallel, trainers, engine, engines, together, tmp_path, **options
    )
