"""A router that chooses experts by the softmax of all logits and a bias for each expert. Megatron-Core has
such a bias for sigmoid scores only."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter

from reshard.megatron import compat
from reshard.megatron.layers.specs import standard_specs


class SoftmaxBiasRouter(TopKRouter):
    """A router whose ``expert_bias`` ``[experts]``, of fp32, decides which experts a token goes to, and not
    how much of each it gets: that is the softmax over the logits of the chosen ones.

    Training leaves the bias as it is: Megatron updates one where ``moe_router_enable_expert_bias`` is set.
    """

    expert_bias: torch.Tensor

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        if config.moe_router_fusion:
            raise ValueError("moe_router_fusion would choose experts without their bias: leave it out")
        if getattr(self, "router_replay", None) is not None:
            raise ValueError("the routing of this model cannot be replayed: it is chosen with a bias")
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        del self.expert_bias
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)
        self.router_replay = BiasedChoice(self)


class BiasedChoice:
    """The choice of a router's experts, in the place of Megatron's replay of one."""

    def __init__(self, router: SoftmaxBiasRouter) -> None:
        self.router = router

    def get_replay_topk(self, logits: torch.Tensor, topk: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits ``[tokens, topk]`` of the chosen experts, and which they are."""
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32) + self.router.expert_bias
        chosen = torch.topk(scores, topk, dim=-1).indices
        return logits.gather(1, chosen), chosen


def specs(config: Any, transformer_impl: str, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specs of the decoder layers of a virtual stage, and of the model's last layer."""
    decoder, last = standard_specs(config, transformer_impl, vp_stage)
    for layer in (*decoder.layer_specs, last):
        with_softmax_bias(layer)
    return decoder, last


def with_softmax_bias(layer: Any) -> Any:
    """Put the router into a spec of a layer, where that has one, and return it."""
    mlp = layer.submodules.mlp
    modules = mlp.keywords.get("submodules") if isinstance(mlp, partial) else mlp.submodules
    if isinstance(modules, MoESubmodules):
        if not hasattr(modules, "router"):
            raise compat.unknown("takes no router but its own, and this family has another")
        modules.router = SoftmaxBiasRouter
    return layer
