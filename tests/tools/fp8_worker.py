"""An extension of vLLM's workers under which fp8 by tensor can be had without a GPU: vLLM's build
for the CPU multiplies in it, by torch, and has no kernel that quantizes to it. Here torch does what
that does; all else is vLLM's."""

import torch
from vllm import _custom_ops

from reshard.engines.vllm.worker import RefitExtension

LARGEST = 448.0  # of e4m3


def by_tensor(values, scale=None, **others):
    """The e4m3 of a tensor and its one scale, which is made where none is given."""
    if scale is None:
        scale = (values.abs().amax().float() / LARGEST).reshape(1)
    codes = (values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scale


class Fp8Extension(RefitExtension):
    """For ``worker_extension_cls``."""

    def __new__(cls, *args, **kwargs):
        _custom_ops.scaled_fp8_quant = by_tensor
        return super().__new__(cls, *args, **kwargs)

    def in_fp8(self) -> int:
        """How many of the model's parameters are."""
        return sum(one.dtype == torch.float8_e4m3fn for one in self.get_model().parameters())
