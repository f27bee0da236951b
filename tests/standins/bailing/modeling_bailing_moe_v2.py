"""Ling 2.0 and Ring 2.0 in plain PyTorch, in place of the code that is published beside their weights: transformers
has no class of its own for them. Parameters have the published names. No cache, no multi-token prediction, which
the published code does not use in its logits either."""

import math

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, sigmoid, silu
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_bailing_moe_v2 import BailingMoeV2Config


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)).to(
            x.dtype
        )


class MLP(nn.Module):
    def __init__(self, config: BailingMoeV2Config, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Scores are sigmoids. A token goes to the experts with the best of biased scores, in the groups whose two best
    are best together; what weighs them is the scores without a bias, normalized."""

    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        logits = linear(x.float(), self.weight.float())
        scores = sigmoid(logits)
        biased = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        groups = biased.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        chosen = torch.zeros(biased.shape[:-1], dtype=torch.bool).scatter(-1, groups, True)
        biased = biased.masked_fill(~chosen[..., None], -math.inf).flatten(-2)
        experts = biased.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor, logits


class Experts(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(config, width) for _ in range(config.num_experts))
        if config.num_shared_experts is not None:
            self.shared_experts = MLP(config, width * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, weights, _ = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = experts == number
            tokens = here.any(-1)
            out[tokens] += expert(x[tokens]) * (weights * here).sum(-1)[tokens].unsqueeze(-1).to(x.dtype)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


class Attention(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        size, hidden, head = sum(self.heads), config.hidden_size, config.head_dim
        self.query_key_value = nn.Linear(hidden, size * head, bias=config.use_qkv_bias)
        self.query_layernorm = RMSNorm(head, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.key_layernorm = RMSNorm(head, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.dense = nn.Linear(self.heads[0] * head, hidden, bias=config.use_bias)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.query_key_value(x)
            .unflatten(-1, (sum(self.heads), -1))
            .transpose(1, 2)
            .split(self.heads, dim=1)
        )
        q, k = turned(self.query_layernorm(q), turns), turned(self.key_layernorm(k), turns)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.dense(out.transpose(1, 2).flatten(-2))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn the first dims of each head, the two halves of which are the coordinates, by these angles."""
    x1, x2, rest = x.split([turns.shape[-1]] * 2 + [x.shape[-1] - 2 * turns.shape[-1]], dim=-1)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


class Layer(nn.Module):
    def __init__(self, config: BailingMoeV2Config, number: int) -> None:
        super().__init__()
        dense = number < config.first_k_dense_replace
        self.attention = Attention(config)
        self.mlp = MLP(config, config.intermediate_size) if dense else Experts(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class BailingMoeV2PreTrainedModel(PreTrainedModel):
    config_class = BailingMoeV2Config
    base_model_prefix = "model"
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ("expert_bias",)
    _keys_to_ignore_on_load_unexpected = (r"eh_proj|[eh]norm|final_layernorm",)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding, Gate)):
            module.weight.data.normal_(std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()


class BailingMoeV2Model(BailingMoeV2PreTrainedModel):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        rope = getattr(self.config, "rope_parameters", None) or {}
        share = rope.get("partial_rotary_factor", getattr(self.config, "partial_rotary_factor", 1.0))
        theta = rope.get("rope_theta") or self.config.rope_theta
        dims = torch.arange(0, int(self.config.head_dim * share), 2)
        positions = torch.arange(input_ids.shape[-1])[None] if position_ids is None else position_ids
        turns = positions[:, None, :, None] * theta ** -(dims / int(self.config.head_dim * share))
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, turns)
        return self.norm(x)


class BailingMoeV2ForCausalLM(BailingMoeV2PreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__(config)
        self.model = BailingMoeV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **_
    ) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))
