"""In the place of how NeMo-RL exports the drafter of a policy: gathered from all ranks, under its published names."""

import torch
import torch.distributed as dist


def _gathered(tensor, dim):
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, tensor.contiguous())
    return torch.cat(shards, dim)


def export_eagle_weights_to_hf(model):
    state, config = model.state_dict(), model.config
    groups, head = config.num_query_groups, config.kv_channels
    rows = config.num_attention_heads // groups * head
    layer, named = "eagle_module.layer", {"fc.weight": _gathered(state["eagle_module.fc.weight"], 0)}
    fused = _gathered(state[f"{layer}.self_attention.linear_qkv.weight"], 0)
    q, k, v = fused.view(groups, rows + 2 * head, -1).split([rows, head, head], 1)
    for name, part in (("q", q), ("k", k), ("v", v)):
        named[f"midlayer.self_attn.{name}_proj.weight"] = part.reshape(-1, fused.shape[1])
    halves = state[f"{layer}.mlp.linear_fc1.weight"].chunk(2)
    for name, half in zip(("gate", "up"), halves, strict=True):
        named[f"midlayer.mlp.{name}_proj.weight"] = _gathered(half, 0)
    for ours, theirs in (
        ("self_attn.o_proj", "self_attention.linear_proj"),
        ("mlp.down_proj", "mlp.linear_fc2"),
    ):
        named[f"midlayer.{ours}.weight"] = _gathered(state[f"{layer}.{theirs}.weight"], 1)
    for ours, theirs in (
        ("midlayer.hidden_norm", "layer.hidden_norm"), ("midlayer.input_layernorm", "layer.input_layernorm"),
        ("midlayer.post_attention_layernorm", "layer.pre_mlp_layernorm"), ("norm", "norm"),
    ):  # fmt: skip
        named[f"{ours}.weight"] = state[f"eagle_module.{theirs}.weight"]
    named["lm_head.weight"] = _gathered(state["eagle_module.eagle_output_layer.weight"], 0)
    named["d2t"] = state["eagle_module.d2t"]
    return list(named.items())
