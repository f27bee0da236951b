"""fp8 (e4m3) with one scale for a matrix, or for each of its rows, as ModelOpt, FBGEMM and AutoFP8 publish it:
``weight`` are codes, ``weight_scale`` is what they are multiplied by. transformers calls it ``weight_scale_inv``
also where its config says that there are no blocks."""

from collections.abc import Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.quantization.channels import SCALE_SUFFIX, Channels
from reshard.quantization.compressed_tensors import scheme_of_scales
from reshard.quantization.fp8_blocks import FP8, has_blocks
from reshard.quantization.fp8_blocks import SCALE_SUFFIX as INVERSE_SUFFIX
from reshard.quantization.scheme import StoredTensor, StoredWeight

FBGEMM = "fbgemm_fp8"
SCHEMES = [Channels(FP8.name, "tensor"), Channels(FP8.name, "channel")]


def find_weights(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that have such scales, by name.

    Raises ReshardError if a scale belongs to no fp8 matrix, or has another shape.
    """
    weights: dict[str, StoredWeight] = {}
    suffixes = (SCALE_SUFFIX,) if has_blocks(config) else (SCALE_SUFFIX, INVERSE_SUFFIX)
    ends = tuple(f".weight{suffix}" for suffix in suffixes)
    for scale in (name for name in tensors if name.endswith(ends)):
        name = scale.removesuffix(SCALE_SUFFIX).removesuffix(INVERSE_SUFFIX)
        codes = tensors.get(name)
        if codes is None or codes.dtype != FP8 or len(codes.shape) != 2:
            raise ReshardError(f"{where}: {scale} does not belong to a matrix in fp8 (e4m3)")
        if name in weights:
            raise ReshardError(
                f"{where}: {name} has both {SCALE_SUFFIX} and {INVERSE_SUFFIX}: keep one of them"
            )
        scheme = scheme_of_scales(SCHEMES, scale, tensors[scale], codes.shape, where)
        weights[name] = StoredWeight(name, codes.shape, scheme, (name, scale))
    return weights
