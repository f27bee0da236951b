"""Codes, scales and checkpoints as compressed-tensors makes them, by its own functions."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from reshard.core.dtypes import dtype_named
from tests.starting.ranks import free_port

DTYPES = {"float": torch.float8_e4m3fn, "float alone": torch.float8_e4m3fn, "int": torch.int8}
# What codes are; the last two are packed, and like `float alone` of weights only.
CODES = {
    "float": "float8_e4m3fn",
    "float alone": "float8_e4m3fn",
    "int": "int8",
    "int4": "int4",
    "packed int8": "int8",
}
# Those that published configs name, and routers, whose plain weights vLLM's own class of a router
# serves.
IGNORED = ["lm_head", "re:.*mlp.gate$"]
# vLLM makes up scales of the key-value cache of dummy weights, which nobody reads unless it is in
# fp8.
MADE_UP = ["_k_scale", "_v_scale", "_q_scale", "_prob_scale"]
# What it makes for experts whose columns lie in another order, and leaves as the memory was.
MADE_UP += ["_g_idx", "_g_idx_sort_indices"]


def is_packed(kind: str) -> bool:
    return kind not in DTYPES


def arguments(kind: str, strategy: str) -> QuantizationArgs:
    strategy, *sizes = strategy.split()
    bits, number = 4 if kind == "int4" else 8, "float" if "float" in kind else "int"
    return QuantizationArgs(num_bits=bits, type=number, strategy=strategy, symmetric=True, dynamic=False,
                            group_size=int(sizes[0]) if strategy == "group" else None,
                            block_structure=[int(size) for size in sizes] if strategy == "block" else None)  # fmt: skip


def block_of(how: QuantizationArgs) -> tuple[int, int] | None:
    """The rows and columns of a block or group."""
    return (1, how.group_size) if how.group_size else how.block_structure and tuple(how.block_structure)


def magnitudes(weight: torch.Tensor, how: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest number of all that shares a scale."""
    if how.strategy == "tensor":
        return torch.aminmax(weight)
    rows, columns = block_of(how) or (1, weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def quantized(weight: torch.Tensor, kind: str, strategy: str) -> dict[str, torch.Tensor]:
    """Return what a matrix is stored as, by the package's own functions and the ends of names; codes come
    first, then scales."""
    how = arguments(kind, strategy)
    scales, zeros = calculate_qparams(*magnitudes(weight, how), how)
    if not is_packed(kind):
        return {"": quantize(weight, scales, zeros, how, dtype=DTYPES[kind]).contiguous(), "_scale": scales}
    plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    made = PackedQuantizationCompressor.compress(plain, QuantizationScheme(targets=["Linear"], weights=how))
    assert made.keys() == {"weight_packed", "weight_scale", "weight_shape"}
    return {end: made[f"weight{end}"].contiguous() for end in ("_packed", "_scale", "_shape")}


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, of -0, of the smallest numbers, whose scales come to 0, of negative numbers
    only, with one large number, with what lies between two codes, and of every magnitude."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=random) * 0.02
    values[0], values[1, ::2] = 0, -0.0
    values[2] *= torch.finfo(dtype).tiny
    values[3] = -values[3].abs()
    values[4] = -values[4].abs() - 3
    values[5, 7] = 300.0
    values[6] = torch.arange(96) * 0.5 - 24
    values[6, 0] = 127.5
    values[7] = torch.arange(96) * 0.5 - 24
    values[7, 0] = -448
    reach = 12 if dtype == torch.float16 else 30
    values[8:40] *= torch.exp2(torch.randint(-reach, reach, (32, 96), generator=random).float())
    values[40:44] *= torch.exp2(torch.randint(-reach, reach, (4, 1), generator=random).float())
    return values.to(dtype)


def config_of(kind: str, strategy: str, static: bool = False, **more) -> dict:
    """The ``quantization_config`` of a checkpoint, as those are published."""
    how = arguments(kind, strategy)
    weights = {
        "num_bits": how.num_bits,
        "type": how.type,
        "strategy": how.strategy,
        "symmetric": True,
        "dynamic": False,
    }
    strategies = {"tensor": "tensor", "block": "group"} if "float" in kind else {}
    inputs = weights | {
        "strategy": "tensor" if static else strategies.get(how.strategy, "token"),
        "dynamic": not static,
    }
    if how.strategy == "block":
        weights["block_structure"], inputs["group_size"] = how.block_structure, how.block_structure[1]
    group = {
        "targets": ["Linear"],
        "weights": weights | ({"group_size": how.group_size} if how.group_size else {}),
        "input_activations": None if is_packed(kind) or kind == "float alone" else inputs,
        "output_activations": None,
    }
    form = "pack-quantized" if is_packed(kind) else f"{how.type}-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": IGNORED,
        "config_groups": {"group_0": group},
    } | more


def compressed(
    directory: str,
    folder: Path,
    kind: str,
    strategy: str,
    static: bool = False,
    seed: int = 0,
    only: str = "_proj",
    **more,
) -> str:
    """A checkpoint as llm-compressor writes it, quantized by the package's own functions: weights
    with `only` in their names."""
    folder.mkdir(parents=True)
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(Path(directory) / "model.safetensors").items():
        tensors[name] = tensor
        if only in name and name.endswith(".weight") and tensor.ndim == 2:
            layer = name.removesuffix(".weight")
            stored = quantized(tensors.pop(name), kind, strategy)
            tensors |= {name + end: one for end, one in stored.items()}
            if static:
                fused = f"{seed} {layer}".replace("up_proj", "gate_proj")  # vLLM wants both to be the same
                tensors[f"{layer}.input_scale"] = torch.tensor([zlib.crc32(fused.encode()) / 2**32 + 0.01])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(directory) / "config.json").read_text())
    config["quantization_config"] = config_of(kind, strategy, static, **more)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)


# Fused layers of which each part has a scale, where vLLM takes the largest; rows of o_proj and
# down_proj, and whole matrices, of which ranks of the engine have parts; experts whole and split;
# kv_b_proj, of which MLA derives matrices; in rounds of a layer, in buckets.
EXPERTS = {"enable_expert_parallel": True}


def sides(folder: Path, ranks: int, **more) -> dict:
    return {
        "trainer": ranks,
        "engine": ranks,
        "together": True,
        "folder": str(folder),
        "port": free_port(),
        **more,
    }


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return plain.numpy().view(dtype_named(str(tensor.dtype)).numpy())


def of_package(codes, scales, strategy, block=None) -> torch.Tensor:
    """Return what compressed-tensors makes of codes, in the scales' dtype. It is told the blocks,
    which it would infer by dividing."""
    if strategy == "block":
        return dequantize(codes, scales, args=QuantizationArgs(strategy="block", block_structure=list(block)))
    return dequantize(codes, scales if strategy == "channel" else scales.reshape(1))


def scheme_of(**weights) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="int", **weights))


def packed_by_package(weight: torch.Tensor, **weights) -> dict[str, torch.Tensor]:
    """A matrix as the package packs it, by the ends of its tensors' names."""
    scheme = scheme_of(**weights)
    size = weights.get("group_size") or weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    made = PackedQuantizationCompressor.compress(plain, scheme)
    return {name.removeprefix("weight"): tensor.contiguous() for name, tensor in made.items()}


def unpacked_by_package(stored: dict[str, torch.Tensor], **weights) -> torch.Tensor:
    return PackedQuantizationCompressor.decompress(
        {f"weight{end}": tensor for end, tensor in stored.items()}, scheme_of(**weights)
    )["weight"]
