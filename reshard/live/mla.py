"""What Megatron-Core 0.19 lacks for multi-head latent attention, as modules for its layer specs."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class PlainCoreAttention(MegatronModule):
    """Causal softmax attention over ``[sequence, batch, heads, dim]`` with value heads of a size of their own, for local layers.

    Megatron's local core attention takes no such heads. Scores are computed whole, in the weights' dtype.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
        n = scores.shape[-1]
        future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhst,tbhd->sbhd", weights, value)
        return mixed.reshape(*mixed.shape[:2], -1)


class MLAWithPlainQueries(MLASelfAttention):
    """MLA without ``q_lora_rank`` as it is published: no second norm before ``linear_q_proj``."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        return _PlainQueries(self.config, replace(submodules, q_layernorm=IdentityOp)).resolve()


class _PlainQueries(QKNormConfigResolver):
    def _mla_fused_linear_or_default(self, module_spec: Any, module_name: str) -> Any:
        return self.linear_impl if module_name == "linear_q_proj" else super()._mla_fused_linear_or_default(module_spec, module_name)
