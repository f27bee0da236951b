"""What vLLM's online quantizations find on a GPU, for `tests.on_cpu.vllm_on_cpu`: kernels that quantize,
by torch; and kernels that multiply, which are chosen and never run."""

import os
from inspect import signature

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp4
from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutedsl_moe import FlashInferCuteDSLExperts
from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts
from vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe import TritonOrDeepGemmExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe import TrtLlmFp8ExpertsMonolithic
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import TrtLlmNvFp4ExpertsMonolithic
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale
from vllm.platforms.interface import PlatformEnum

try:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
except ImportError:  # where older versions have it
    from vllm.model_executor.layers.fused_moe.fused_marlin_moe import MarlinExperts


def quantized(output, values, scale, largest, least: float = 0.0) -> None:
    """The e4m3 of a matrix and its scale for each row, or for all of it: in the place of vLLM's
    kernels for GPUs."""
    scale.copy_((largest.reshape(scale.shape).float() / 448).clamp(least))
    output.copy_((values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


def by_tensor(output, values, scale) -> None:
    quantized(output, values, scale, values.abs().amax())


def by_token(output, values, scale, bound=None) -> None:
    quantized(output, values, scale, values.abs().amax(1), 1 / (448 * 512))


def as_it_is(output, values, scale, group_shape=None) -> None:
    """The e4m3 of a matrix by a scale that is given."""
    output.copy_((values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


def repacked(words, *rest):
    """Words of codes ``[inputs, outputs]``, in another order, in the place of Marlin's: each one of
    all, and another one for inputs `of_8_bits`. Before vLLM 0.33 an order of columns comes first."""
    inputs, outputs, bits, of_8_bits = rest[-4:]
    assert words.shape == (inputs * bits // 32, outputs)
    return words.T.reshape(inputs // 16, -1).flip(1 if of_8_bits else 0).contiguous()


TritonExperts._supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
os.environ["VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"] = "0"
linear_kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.OOT] = [linear_kernels.EmulationMxfp8LinearKernel]
ORDER = "Tensor order, " if "perm" in signature(_custom_ops.gptq_marlin_repack).parameters else ""
KERNELS = torch.library.Library("_C", "FRAGMENT")
for definition, kernel in (
    ("dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()", by_tensor),
    ("static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()", as_it_is),
    (f"gptq_marlin_repack(Tensor words, {ORDER}SymInt inputs, SymInt outputs, int bits, bool of_8_bits) "
     "-> Tensor", repacked),
    ("dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) "
     "-> ()", by_token),
):  # fmt: skip
    KERNELS.define(definition)
    KERNELS.impl(definition.partition("(")[0], kernel, "CPU")
for plain in (
    linear_kernels.PerTensorTorchFP8ScaledMMLinearKernel,
    linear_kernels.ChannelWiseTorchFP8ScaledMMLinearKernel,
):
    plain.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear_kernels._POSSIBLE_FP8_KERNELS.setdefault(PlatformEnum.OOT, []).append(plain)
linear_kernels.CutlassInt8ScaledMMLinearKernel.is_supported = classmethod(
    lambda cls, capability=None: (True, None)
)
linear_kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.OOT] = [linear_kernels.CutlassInt8ScaledMMLinearKernel]
# Marlin's for packed codes, of linear layers and, where their sizes are its, of experts.
linear_kernels.MarlinLinearKernel.can_implement = classmethod(lambda cls, layer: (True, None))
linear_kernels._POSSIBLE_KERNELS[PlatformEnum.OOT] = [linear_kernels.MarlinLinearKernel]
MarlinExperts._supports_current_device = staticmethod(lambda: True)
linear_kernels.MarlinFP8ScaledMMLinearKernel.is_supported = classmethod(
    lambda cls, capability=None: (True, None)
)
linear_kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.OOT] = [linear_kernels.MarlinFP8ScaledMMLinearKernel]
# Those of nvfp4 that multiply with plain inputs, as Marlin does on a GPU before sm100, and that
# quantize them.
linear_kernels.MarlinNvFp4LinearKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
linear_kernels._POSSIBLE_NVFP4_KERNELS[PlatformEnum.OOT] = [
    linear_kernels.MarlinNvFp4LinearKernel,
    linear_kernels.EmulationNvFp4LinearKernel,
]
# Those of Blackwell for nvfp4 and mxfp8, where they are asked for by name.
for possible, kernels in (
    (
        linear_kernels._POSSIBLE_NVFP4_KERNELS,
        (
            linear_kernels.FlashInferCutlassNvFp4LinearKernel,
            linear_kernels.FlashInferCuteDslNvFp4LinearKernel,
            linear_kernels.FlashInferTrtllmNvFp4LinearKernel,
        ),
    ),
    (
        linear_kernels._POSSIBLE_MXFP8_KERNELS,
        (
            linear_kernels.FlashInferCutlassMxfp8LinearKernel,
            linear_kernels.FlashInferCutedslMxfp8LinearKernel,
        ),
    ),
):
    for named in kernels:
        named.is_supported = classmethod(lambda cls, capability=None: (True, None))
        possible[PlatformEnum.OOT].append(named)
for named in linear_kernels._POSSIBLE_MXFP8_KERNELS[PlatformEnum.OOT][1:]:
    named.can_implement = classmethod(lambda cls, config: (True, None))  # also of a few rows
# Those of experts that quantize what comes in, where they are asked for by name.
for experts, name in (
    (FlashInferExperts, "flashinfer_cutlass"),
    (CutlassExpertsFp4, "cutlass"),
    (TrtLlmFp8ExpertsMonolithic, "flashinfer_trtllm"),
    (TrtLlmNvFp4ExpertsMonolithic, "flashinfer_trtllm"),
    (TritonOrDeepGemmExperts, "deep_gemm"),
    (FlashInferCuteDSLExperts, "flashinfer_cutedsl"),
):
    experts.is_supported_config = staticmethod(
        lambda cls, config, *rest, name=name: (config.moe_backend == name, None)
    )
if not torch.cuda.is_available():
    torch.accelerator.current_device_index = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *args, **options: self

# DeepGEMM's, where they are asked for by name.
linear_kernels.DeepGemmFp8BlockScaledMMKernel.is_supported = classmethod(
    lambda cls, capability=None: (True, None)
)
linear_kernels.DeepGemmFp8BlockScaledMMKernel.can_implement = classmethod(lambda cls, config: (True, None))
linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.OOT].append(
    linear_kernels.DeepGemmFp8BlockScaledMMKernel
)


def pack_scales() -> None:
    """From now on DeepGEMM's scales are packed as on Blackwell, four exponents in a word, a row of words for each row
    of the weights, row after row in memory: by torch, in the place of its function for GPUs."""
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def packed(sf, mn, k, recipe, num_groups, is_sfa):
        exponents = (sf.view(torch.int32) >> 23).to(torch.uint8)
        assert not is_sfa and torch.equal(exponents.int() << 23, sf.view(torch.int32)), "powers of two"
        rows = exponents.repeat_interleave(recipe[1], -2)[..., :mn, :]
        words = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 4)).view(torch.int32)
        aligned = torch.nn.functional.pad(words.mT, (0, -mn % 4)).contiguous()
        return aligned[..., :mn].mT

    fp8_utils.transform_sf_into_required_layout = packed
    for module in (deep_gemm, fp8_utils):
        module.is_deep_gemm_e8m0_used = lambda: True
    deep_gemm.is_deep_gemm_supported = lambda: True


def interleave_scales() -> None:
    """From now on FlashInfer interleaves scales of blocks by vLLM's own function, in the place of its kernel."""
    import flashinfer
    from flashinfer.quantization import fp4_quantization

    def interleaved(scales):
        return swizzle_blockscale(scales.view(torch.float8_e4m3fn)).view(scales.dtype).flatten()

    fp4_quantization.block_scale_interleave = flashinfer.nvfp4_block_scale_interleave = interleaved
