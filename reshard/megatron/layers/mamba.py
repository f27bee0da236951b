"""Mamba-2 layers of Megatron-Core: their spec among local layers, and in torch what they take from
mamba-ssm, whose kernels need a GPU."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import conv1d, silu, softplus

KEYS = {"norm.": "mixer.in_proj.layer_norm_"}  # as Transformer Engine's fused layers are saved


def local_mamba_layer() -> ModuleSpec:
    """Return the spec of a Mamba layer without Transformer Engine, for which Megatron-Core has none."""
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        MambaLayer, submodules=MambaLayerSubmodules(WrappedTorchNorm, mixer, get_bias_dropout_add, KEYS)
    )


class GroupNorm(torch.nn.Module):
    """RMSNorm over each group of `group_size` channels, in place of mamba-ssm's ``RMSNormGated``; outputs are
    gated before."""

    tp_group: Any = None  # the mixer sets it

    def __init__(self, hidden_size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        groups = hidden.float().unflatten(-1, (-1, self.group_size))
        normed = torch.nn.functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(hidden.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    *,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """Return the gated outputs of a Mamba-2 layer, ``[batch, tokens, heads * headdim]``, for the outputs of
    its ``in_proj``, ``[batch, tokens, z x B C dt]``: what mamba-ssm's ``mamba_split_conv1d_scan_combined``
    computes, a token after the other.

    `weight` is ``[x B C, width]`` of a causal convolution with `bias`; `A`, `D` and `dt_bias` have one number
    for each head.
    """
    heads, tokens = len(A), zxbcdt.shape[1]
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, len(weight), heads], dim=-1)
    width = weight.shape[-1]
    xbc = silu(conv1d(xbc.mT, weight[:, None], bias, padding=width - 1, groups=len(weight))[..., :tokens]).mT
    x, B, C = xbc.float().split([inner, (len(weight) - inner) // 2, (len(weight) - inner) // 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, -2) for t in (B, C))
    dt = softplus(dt.float() + dt_bias)
    state = x.new_zeros(len(x), heads, headdim, B.shape[-1])
    outputs = []
    for t in range(tokens):
        decay, step = torch.exp(dt[:, t] * A)[..., None, None], dt[:, t, :, None] * x[:, t]
        state = state * decay + step[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1) + D.float()[:, None] * x[:, t])
    y = torch.stack(outputs, dim=1).flatten(-2)
    return (y * silu(z.float())).to(zxbcdt.dtype)
