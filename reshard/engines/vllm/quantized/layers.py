"""Properties of vLLM's quantized layers that are no part of its interface: how a layer is quantized and
loaded, and which kernel serves it; for vLLM 0.24 to 0.33, as is `reshard.engines.vllm.compat`.
"""

from typing import Any, NamedTuple

from reshard.core.extras import importing
from reshard.engines.placing.blocks import Blocks, scale_names
from reshard.engines.vllm.compat import known
from reshard.engines.vllm.layers import exchanges_gate_and_up, is_rearranged
from reshard.engines.vllm.quantized.processing import loading_templates

with importing("vllm"):
    import torch


# Kernels that read 128x128 blocks of e4m3 ``[rows, columns]`` with fp32 scales, both as they were
# loaded; and kernels for which vLLM may quantize once more, to scales that are powers of two.
BLOCK_KERNELS = ("CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel")
DEEP_GEMM_KERNELS = ("DeepGemmFp8BlockScaledMMKernel", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel")
BLOCK_BACKENDS = ("TRITON", "BATCHED_TRITON")
DEEP_GEMM_BACKENDS = ("DEEPGEMM", "BATCHED_DEEPGEMM")
# Kernels for which vLLM puts the loaded blocks of experts in another order: gate and up exchanged, or
# rows shuffled and columns in blocks.
ARRANGED_BLOCK_BACKENDS = ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")
STORED_BLOCK_METHODS = ("Fp8LinearMethod", "Fp8MoEMethod")  # that load a checkpoint in blocks
BLOCK_METHODS = (*STORED_BLOCK_METHODS, "Fp8PerBlockOnlineLinearMethod", "Fp8PerBlockOnlineMoEMethod")


def blocks_of(module: torch.nn.Module, method: Any) -> Blocks | None:
    """Return how a layer serves from fp8 blocks in the order in which they are loaded; None if it
    does not."""
    scales = _scales_of_blocks(module, method)
    if not scales or any(getattr(module, name).dtype != torch.float32 for name in scales.values()):
        return None  # DeepGEMM's scales on Blackwell are packed
    kernel = kernel_of(module)
    used = None if hasattr(method, "fp8_backend") else method.fp8_linear
    plain, deep = (
        (kernel in BLOCK_BACKENDS, kernel in DEEP_GEMM_BACKENDS)
        if used is None
        else (kernel in BLOCK_KERNELS, kernel in DEEP_GEMM_KERNELS)
    )
    if plain:
        return Blocks(scales, kernel, False)
    if not deep:
        return None
    with known("does not say whether DeepGEMM's scales are powers of two"):
        if used is None:
            from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

            return Blocks(scales, kernel, bool(is_deep_gemm_e8m0_used()))
        return Blocks(scales, kernel, bool(getattr(used, "fallback", used).use_deep_gemm_e8m0))


def _scales_of_blocks(module: torch.nn.Module, method: Any) -> dict[str, str]:
    """Return the names of a layer's scales of 128x128 blocks by those of its matrices; none if it has no such
    blocks."""
    block = list(
        getattr(method, "weight_block_size", None) or getattr(module, "weight_block_size", None) or []
    )
    has_blocks = type(method).__name__ in BLOCK_METHODS and block == [128, 128]
    return scale_names(module) if has_blocks else {}


def stores_blocks(module: torch.nn.Module) -> bool:
    """Tell whether a layer is loaded from a checkpoint in fp8 blocks of 128x128."""
    method = module.quant_method
    return type(method).__name__ in STORED_BLOCK_METHODS and bool(_scales_of_blocks(module, method))


# vLLM's classes for checkpoints by ``compressed-tensors`` whose codes and scales can be made of
# plain weights: of linear layers, of experts, and with packed codes.
COMPRESSED_SCHEMES = {
    "CompressedTensorsW8A8Fp8": "float8_e4m3fn",
    "CompressedTensorsW8A8Int8": "int8",
    "CompressedTensorsW8A16Fp8": "float8_e4m3fn",
}
COMPRESSED_EXPERTS = {
    "CompressedTensorsW8A8Fp8MoEMethod": "float8_e4m3fn",
    "CompressedTensorsW8A8Int8MoEMethod": "int8",
}
PACKED_SCHEME = "CompressedTensorsWNA16"
PACKED_EXPERTS = ("CompressedTensorsWNA16MarlinMoEMethod", "CompressedTensorsWNA16MoEMethod")
PACKED_CODES = {4: "int4", 8: "int8"}
NVFP4 = "nvfp4"  # codes of 4 bits with scales of two kinds
NVFP4_METHODS = ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod")
MODELOPT_EXPERTS = "ModelOptNvFp4FusedMoE"
# vLLM 0.33 has only the last one.
MODELOPT_LINEAR = ("ModelOptNvFp4LinearMethod", "ModelOptNvFp4W4A16LinearMethod", "ModelOptLinearMethod")
# Kernels that multiply with plain inputs, whatever scales a checkpoint has for them.
PLAIN_INPUTS = (
    "MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel", "FlashInferCuteDslNvFp4W4A16LinearKernel",
    "B12xNvFp4W4A16LinearKernel",
    "MARLIN", "HUMMING",
)  # fmt: skip


class Packed(NamedTuple):
    """The packing of codes: the `bits` of each, and whether vLLM loads them `turned`, inputs before
    outputs.

    `others` are the names of parameters that it has for its loader only; names of codes have the
    suffix `end`.
    """

    bits: int
    turned: bool
    others: tuple[str, ...]
    end: str = "_packed"


class Compressed(NamedTuple):
    """A layer that vLLM loads as codes and scales.

    - `weights`: the names that its matrices would have as plain weights.
    - `codes`: what the codes are, such as ``float8_e4m3fn``, ``int4`` or ``nvfp4``.
    - `strategy`: what has one scale: a ``channel`` of the output, a ``group`` of its columns, a
      ``block``, or a published ``tensor``.
    - `inputs`: the names of static scales of its input, which come with a checkpoint.
    - `scheme`: vLLM's name for all this.
    - `block`: the rows and columns of a group or block.
    - `packed`: how codes are packed, if they are.
    - `reads_inputs`: whether its kernel reads the scales of its input.
    """

    weights: tuple[str, ...]
    codes: str
    strategy: str
    inputs: tuple[str, ...]
    scheme: str
    block: tuple[int, int] | None = None
    packed: Packed | None = None
    reads_inputs: bool = True


def compressed_of(module: torch.nn.Module) -> Compressed | None:
    """Return how a layer is loaded from a checkpoint quantized by ``compressed-tensors``, by
    ModelOpt in nvfp4, or in fp8 blocks that vLLM then puts in another order.

    None if it is not, or if a refit cannot make what it is loaded from.
    """
    method: Any = getattr(module, "quant_method", None)
    kind = type(method).__name__
    linear = kind == "CompressedTensorsLinearMethod" and not hasattr(module, "org_vocab_size")
    weights = ("weight",) if linear else ("w13_weight", "w2_weight")
    with known("says in another way how a layer is quantized"):
        if kind in PACKED_EXPERTS or (linear and type(module.scheme).__name__ == PACKED_SCHEME):
            return _packed(module, method if not linear else module.scheme, weights)
        if kind in NVFP4_METHODS or (linear and type(module.scheme).__name__ in NVFP4_METHODS):
            return _nvfp4(module, method if not linear else module.scheme, weights)
        if kind == MODELOPT_EXPERTS:
            return _nvfp4(module, method, weights)
        if kind in MODELOPT_LINEAR and not hasattr(module, "org_vocab_size"):
            return _nvfp4(module, method, ("weight",))
        if kind in STORED_BLOCK_METHODS:
            return _arranged_blocks(module, method)
        if kind in COMPRESSED_EXPERTS:
            scheme, codes = kind, COMPRESSED_EXPERTS[kind]
            strategy, static = method.weight_quant.strategy, bool(method.static_input_scales)
        elif linear:
            instance: Any = module.scheme
            scheme = type(instance).__name__
            if scheme not in COMPRESSED_SCHEMES:
                return None
            codes, static = COMPRESSED_SCHEMES[scheme], bool(instance.is_static_input_scheme)
            # A scheme that multiplies with plain inputs has no `weight_quant`.
            strategy = getattr(instance, "weight_quant", instance).strategy
            if static and not getattr(instance, "input_symmetric", True):
                return None  # vLLM does not leave zero points as they were when it processes them once more
        else:
            return None
    strategy = str(getattr(strategy, "value", strategy))
    owner = method if kind in COMPRESSED_EXPERTS else module.scheme
    block = tuple(getattr(owner, "weight_block_size", None) or ()) if strategy == "block" else None
    # Weight-only fp8: vLLM cannot process scales of tensors twice, and renames the scales of
    # blocks.
    supported = ("channel",) if scheme == "CompressedTensorsW8A16Fp8" else ("channel", "tensor", "block")
    if strategy not in supported or (block is not None and len(block) != 2):
        return None
    inputs = tuple(name.replace("weight", "input_scale") for name in weights) if static else ()
    return Compressed(weights, codes, strategy, inputs, scheme, block)


def _arranged_blocks(module: torch.nn.Module, method: Any) -> Compressed | None:
    """Return how a layer is loaded from fp8 blocks that vLLM then arranges for its kernel; None for others."""
    scales, kernel = _scales_of_blocks(module, method), kernel_of(module)
    packed = any(getattr(module, name).dtype == torch.int32 for name in scales.values())
    arranged = kernel in ARRANGED_BLOCK_BACKENDS or (
        packed and kernel in (*DEEP_GEMM_KERNELS, *DEEP_GEMM_BACKENDS)
    )
    if not scales or not arranged or module.orig_dtype != torch.bfloat16:
        return None
    kind = type(method).__name__
    return Compressed(tuple(scales), "float8_e4m3fn", "block", (), kind, (128, 128))


def _packed(module: torch.nn.Module, owner: Any, weights: tuple[str, ...]) -> Compressed | None:
    """Return how a layer with packed codes is loaded; None if they have zero points, or their
    columns another order."""
    experts = weights != ("weight",)
    quantized = owner.weight_quant if experts else owner
    # vLLM 0.33 takes no columns in another order.
    ordered = getattr(quantized, "actorder", None) if experts else getattr(owner, "has_g_idx", False)
    ordered = getattr(ordered, "value", ordered) in (True, "group", "dynamic")
    templates = loading_templates(module)
    if not quantized.symmetric or ordered or owner.num_bits not in PACKED_CODES or not templates:
        return None
    strategy = str(getattr(owner.strategy, "value", owner.strategy))
    block = (1, int(owner.group_size)) if strategy == "group" else None
    # The weights' shapes and the orders of columns need not be loaded.
    made = {f"{name}_{end}" for name in weights for end in ("packed", "scale")}
    others = tuple(
        name for name in templates
        if name not in made and name.endswith(("weight_shape", "_g_idx", "_g_idx_sort_indices"))
    )  # fmt: skip
    turned = bool(getattr(templates[f"{weights[0]}_packed"], "is_transposed", False))
    codes = PACKED_CODES[owner.num_bits]
    packed = Packed(owner.num_bits, turned, others)
    return Compressed(weights, codes, strategy, (), type(owner).__name__, block, packed)


def _nvfp4(module: torch.nn.Module, owner: Any, weights: tuple[str, ...]) -> Compressed | None:
    """Return how a layer in nvfp4 is loaded; None if vLLM has not noted it, or no longer has the
    scales of inputs that its kernel reads."""
    templates, kernel = loading_templates(module), kernel_of(module)
    reads = kernel not in PLAIN_INPUTS
    modelopt = type(owner).__name__ in (*MODELOPT_LINEAR, MODELOPT_EXPERTS)
    if modelopt and any(f"{name}_scale_2" not in templates for name in weights):
        return None
    if not templates or (modelopt and reads and weights != ("weight",)):
        return None
    inputs = tuple(name for name in templates if name.endswith(("input_global_scale", "input_scale")))
    packed = Packed(4, False, (), "" if modelopt else "_packed")
    return Compressed(weights, NVFP4, "group", inputs, type(owner).__name__, (1, 16), packed, reads)


def inputs_as_loaded(module: torch.nn.Module, how: Compressed) -> dict[str, torch.Tensor]:
    """Return the scales of a layer's input by name, as a checkpoint has brought them; without those
    that no kernel reads and vLLM has dropped."""
    scales = {}
    for key in how.inputs:
        if how.codes != NVFP4:
            scales[key] = getattr(module, key).detach().max().clone()
            continue
        # Linear layers keep the inverse, or have another name for it.
        kept = "input_global_scale" if key == "input_scale" else f"{key}_inv"
        value = getattr(module, kept, None) if how.weights == ("weight",) else getattr(module, key, None)
        if value is not None:
            scales[key] = value.detach().clone()
    return scales


def plain_templates(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that a layer with packed codes would be loaded into if it were not
    quantized, by name, on the meta device; none for other layers."""
    how = compressed_of(module)
    if how is None or how.packed is None:
        return {}
    plain_parameters, templates = {}, loading_templates(module)
    for name in how.weights:
        packed, scales = templates[name + how.packed.end], templates[f"{name}_scale"]
        *rows, width = packed.mT.shape if how.packed.turned else packed.shape
        linear = name == "weight"
        in_words = width * (8 * packed.element_size() // how.packed.bits)
        columns = int(module.input_size_per_partition) if linear else in_words  # type: ignore[arg-type]
        dtype: Any = scales.dtype if how.codes != NVFP4 else module.params_dtype
        plain = torch.empty((*rows, columns), dtype=dtype, device="meta")
        plain.__class__, plain.__dict__ = packed.__class__, dict(packed.__dict__)
        vars(plain).pop("is_transposed", None)
        plain_parameters[name] = plain
    return plain_parameters


def method_of(module: torch.nn.Module) -> str:
    """Return how vLLM quantizes a layer, by its own names."""
    scheme: Any = getattr(module, "scheme", None)
    name = type(module.quant_method).__name__
    owner = module.quant_method if scheme is None else scheme
    asymmetric = getattr(getattr(owner, "weight_quant", owner), "symmetric", True) is False
    details = [] if scheme is None else [type(scheme).__name__]
    details += ["asymmetric"] if asymmetric else []
    return f"{name} ({', '.join(details)})" if details else name


def processing_of(module: torch.nn.Module) -> str:
    """Return how vLLM quantizes a layer, for logs: the scheme of its checkpoint, or the method."""
    if is_rearranged(module):
        return "arranged for its kernel by the processing"
    compressed = compressed_of(module)
    if compressed is None:
        return method_of(module)
    inputs = (
        ", scales of the input as they were loaded" if compressed.inputs and compressed.reads_inputs else ""
    )
    size = "" if compressed.block is None else f" of {compressed.block[0]}x{compressed.block[1]}"
    size += " and one for all of it" if compressed.codes == NVFP4 else ""
    return f"{compressed.scheme} ({compressed.codes}, a scale for each {compressed.strategy}{size}{inputs})"


ONLINE = "vllm.model_executor.layers.quantization.online."


def made_online(module: torch.nn.Module) -> bool:
    """Tell whether vLLM has quantized a layer itself after loading plain weights, in an order that
    only its own processing knows."""
    method = getattr(module, "quant_method", None)
    return type(method).__module__.startswith(ONLINE) and blocks_of(module, method) is None


def is_processed_again(module: torch.nn.Module) -> bool:
    """Tell whether vLLM processes a layer at each refit, of weights that a refit brings to another place: those that
    it quantizes itself, that it loads as codes and scales, and that it rearranges in another way than exchanging gate
    and up."""
    rearranged = is_rearranged(module) and not exchanges_gate_and_up(module)
    return rearranged or made_online(module) or compressed_of(module) is not None


def instead_of(module: torch.nn.Module) -> str:
    """Return what a user may do if vLLM cannot process a layer once more, for errors."""
    return "pass moe_backend='triton'" if is_rearranged(module) else "serve in bf16"


def kernel_of(module: torch.nn.Module) -> str:
    """Return the name of what multiplies with a layer's weights, for logs."""
    method = module.quant_method
    names = ("fp8_backend", "int8_backend", "nvfp4_backend", "wna16_backend", "unquantized_backend")
    backends = (getattr(method, name, None) for name in names)
    backend = next((backend.name for backend in backends if backend is not None), None)
    scheme = getattr(module, "scheme", None) or method
    linear = getattr(scheme, "fp8_linear", None) or getattr(scheme, "kernel", None)
    return backend or (type(linear).__name__ if linear is not None else "unknown")


def own_blocks(values: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes and the scales of blocks that vLLM's own functions make of a bf16
    matrix."""
    with known("quantizes blocks elsewhere"):
        from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        codes, scales = per_block_cast_to_fp8(values, [128, 128], use_ue8m0=rounding == "ue8m0")
        if rounding == "twice":
            requant_weight_ue8m0_inplace(codes, scales)
        return codes, scales
