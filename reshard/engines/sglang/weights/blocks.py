"""Layers that SGLang serves from fp8 blocks of 128x128, as they were loaded."""

import torch

from reshard.engines.placing.blocks import Blocks, scale_names
from reshard.engines.sglang import compat


def layers_in_blocks(model: torch.nn.Module) -> dict[str, Blocks]:
    """Return the layers that serve from fp8 blocks, by name."""
    layers = {}
    for name, module in model.named_modules():
        kernel = None if getattr(module, "quant_method", None) is None else compat.block_kernel(module)
        if kernel is not None:
            # SGLang loads the scales of files as they are.
            layers[name] = Blocks(scale_names(module), kernel, powers_of_two=False, rounding="stored")
    return layers


def plain_matrices(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return, by name, what the matrices of a layer in blocks would be in this dtype, on the meta device:
    SGLang's loaders refuse plain weights for codes."""
    if getattr(module, "quant_method", None) is None or compat.block_kernel(module) is None:
        return {}
    matrices = {}
    for name in scale_names(module):
        codes = module.get_parameter(name)
        matrix = torch.empty_strided(codes.shape, codes.stride(), dtype=dtype, device="meta")
        matrix.__class__, matrix.__dict__ = codes.__class__, dict(codes.__dict__)
        matrices[name] = matrix
    return matrices
