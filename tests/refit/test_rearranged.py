"""Refits into an engine that rearranges experts for its kernels once they are loaded, as vLLM does by default on
Blackwell: the kernels are chosen and never run, what they read is compared with vLLM's own loading."""

from pathlib import Path

import pytest

from tests.megatron.test_logits import EP, ETP, TP, flags_at
from tests.refit.test_blocks_engine import IGNORED, published
from tests.starting.ranks import free_port, run_on_ranks
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
    refit(converted("served-moe-halves"), parallel, trainers, engine, engines, together, tmp_path, **options)


def test_experts_of_a_width_that_vllm_pads_for_a_kernel_are_refitted(converted, tmp_path):
    """vLLM 0.32 makes 256 of 192 rows, of which its loader fills 192 and its processing the others with zeros."""
    checkpoints = converted("served-moe-narrow")
    refit(checkpoints, f"{TP} 1", 1, {"moe_backend": "flashinfer_trtllm"}, 1, True, tmp_path)


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


@pytest.mark.parametrize("linear", ["flashinfer_cutlass", "flashinfer_cutedsl"])
def test_a_refit_leaves_scales_of_32_elements_as_vllm_arranges_them_for_a_kernel(linear, converted, tmp_path):
    engine = {
        "tp": 2, "quantization": "mxfp8", "moe_backend": "flashinfer_trtllm", "linear_backend": linear
    }  # fmt: skip
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


def sides_of(folder: Path) -> dict:
    folder.mkdir(exist_ok=True)
    return {"trainer": 1, "engine": 1, "together": True, "folder": str(folder), "port": free_port()}


GATE_AND_UP = {f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight" for layer in range(4)}
DOWN = {name.replace("w13", "w2") for name in GATE_AND_UP}
BY_PROCESSING = "arranged for its kernel by the processing of vLLM, by a slab"
NO_DIGEST = "quantizes or rearranges"
NO_DELTA = "rearranged or quantized, and deltas are of plain weights"


@pytest.mark.parametrize(
    "backend, how, moved, wrong, by_processing",
    [
        ("flashinfer_cutlass", "", GATE_AND_UP, set(), False),
        ("flashinfer_cutlass", "left", set(), GATE_AND_UP, False),
        ("flashinfer_cutlass", "unknown", GATE_AND_UP, set(), True),
        ("flashinfer_trtllm", "", GATE_AND_UP | DOWN, set(), True),
        ("flashinfer_trtllm", "left", GATE_AND_UP | DOWN, GATE_AND_UP, True),
    ],
)
def test_experts_lie_elsewhere_than_they_are_loaded_and_exchanged_ones_are_seen(
    backend, how, moved, wrong, by_processing, converted, tmp_path
):
    checkpoint = converted("served-moe-halves")[0]
    arguments = (
        sides_of(tmp_path),
        flags_at(Path(checkpoint[1]), ""),
        checkpoint,
        {"moe_backend": backend},
        how,
    )
    [[found, elsewhere, described, said]] = run_on_ranks(
        1, "arranged", *arguments, module="refit_reloads_on_cpu"
    )
    assert (found, elsewhere) == (wrong, moved)
    kernel = {"how": BY_PROCESSING, "kernel": backend.upper(), "layers": 4}
    assert described == ([kernel] if by_processing else [])
    for sentence, of_slabs in zip(said, (NO_DIGEST, NO_DELTA), strict=True):
        assert of_slabs in sentence if by_processing else sentence == "no error"


def test_other_arrangements_are_refused_with_the_option_that_chooses_another(converted, tmp_path):
    checkpoints = converted("served-moe-halves")[:1]
    _, blocks = published(checkpoints, tmp_path)
    directory = checkpoints[0][0]
    sentences = {
        "changed for MARLIN, which a refit cannot write: pass moe_backend='triton'":
            (directory, blocks, "routed_experts", "MARLIN"),
        "changed for OtherKernel, which a refit cannot write: pass linear_backend='triton'":
            (directory, blocks, "qkv_proj", "OtherKernel"),
        "is loaded with rows of gate and up together, which vLLM then exchanges for FLASHINFER_CUTLASS, and a refit "
        "does not follow that: pass moe_backend='triton'":
            (converted("gpt-oss")[0][0], {"moe_backend": "flashinfer_cutlass"}, "", ""),
    }  # fmt: skip
    [said] = run_on_ranks(
        1, "arranged_otherwise", sides_of(tmp_path), [*sentences.values()], module="refit_reloads_on_cpu"
    )
    for sentence, message in zip(sentences, said, strict=True):
        assert sentence in message and "\n" not in message, message


def test_the_fp32_sinks_that_flashinfer_reads_are_those_of_the_new_weights(converted, tmp_path):
    checkpoints = converted("gpt-oss")
    arguments = sides_of(tmp_path), flags_at(Path(checkpoints[0][1]), ""), checkpoints
    [outcome] = run_on_ranks(1, "sinks_of_flashinfer", *arguments, True, module="refit_reloads_on_cpu")
    found, stayed, spoiled = outcome
    assert stayed and found[0][1] != found[1][1] and all(read == loaded for read, loaded in found)
    assert "1 tensors are not what the engine derives" in spoiled and "layers.1.attn.attn.sinks" in spoiled
    arguments = sides_of(tmp_path / "unknown"), *arguments[1:]
    [said] = run_on_ranks(1, "sinks_of_flashinfer", *arguments, False, module="refit_reloads_on_cpu")
    assert "reads a copy of its sinks that this vLLM does not make again of new weights" in said
    assert said.endswith("or pass attention_backend='TRITON_ATTN'")


def test_experts_that_are_shuffled_below_adapters_are_refused_by_name(converted, tmp_path):
    directory = converted("served-moe-halves")[0][0]
    [message] = run_on_ranks(
        1, "arranged_below_adapters", sides_of(tmp_path), directory, module="refit_reloads_on_cpu"
    )
    assert "experts in the order of FLASHINFER_TRTLLM, which a refit cannot write" in message
    assert message.endswith("pass moe_backend='triton'")
