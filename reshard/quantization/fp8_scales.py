"""fp8 (e4m3) with one scale for a matrix, or for each of its rows, as ModelOpt, FBGEMM and AutoFP8 publish it:
``weight`` are codes, ``weight_scale`` is what they are multiplied by."""

from collections.abc import Mapping

from reshard.core.errors import ReshardError
from reshard.quantization.channels import SCALE_SUFFIX, Channels
from reshard.quantization.compressed_tensors import scheme_of_scales
from reshard.quantization.fp8_blocks import FP8
from reshard.quantization.scheme import StoredTensor, StoredWeight

FBGEMM = "fbgemm_fp8"
SCHEMES = [Channels(FP8.name, "tensor"), Channels(FP8.name, "channel")]


def find_weights(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that have such scales, by name.

    Raises ReshardError if a scale belongs to no fp8 matrix, or has another shape.
    """
    weights = {}
    for scale in (name for name in tensors if name.endswith(f".weight{SCALE_SUFFIX}")):
        name = scale.removesuffix(SCALE_SUFFIX)
        codes = tensors.get(name)
        if codes is None or codes.dtype != FP8 or len(codes.shape) != 2:
            raise ReshardError(f"{where}: {scale} does not belong to a matrix in fp8 (e4m3)")
        scheme = scheme_of_scales(SCHEMES, scale, tensors[scale], codes.shape, where)
        weights[name] = StoredWeight(name, codes.shape, scheme, (name, scale))
    return weights
