"""An extension of vLLM's workers under which fp8 by tensor can be had on any CPU: vLLM's build has its kernel that quantises only where the
CPU knows AVX512, and there it is used; elsewhere torch does what that does. All else is vLLM's, the layers that multiply in fp8 too."""

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
        if not torch.cpu._is_avx512_supported():
            _custom_ops.scaled_fp8_quant = by_tensor
        return super().__new__(cls, *args, **kwargs)

    def in_fp8(self) -> int:
        """How many of the model's parameters are."""
        return sum(one.dtype == torch.float8_e4m3fn for one in self.get_model().parameters())
