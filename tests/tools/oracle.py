"""Megatron's tensors, assembled by hand from Hugging Face ones: shares no code with the mapping
tables."""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file


def hf_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face directory."""
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def bits(tensor: torch.Tensor) -> tuple:
    """Return shape, dtype and a checksum of a tensor's bytes."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(data)


def dequantized(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face directory; fp8 weights times their scales, in bf16, and
    weights that compressed-tensors quantized by channel in the scales' dtype."""
    tensors, config = hf_tensors(directory), json.loads((directory / "config.json").read_text())
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales, weight = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
        factors = scales.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[
            :, : weight.shape[1]
        ]
        tensors[name.removesuffix("_scale_inv")] = (weight.float() * factors).bfloat16()
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        scales, weight = tensors.pop(name), name.removesuffix("_scale")
        tensors[weight] = tensors[weight].to(scales.dtype) * scales
    return tensors


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a torch_dist iteration directory, whole, with torch's own reader."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(str(directory))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        k: torch.empty(e.size, dtype=e.properties.dtype)
        for k, e in entries.items()
        if isinstance(e, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(directory)), no_dist=True)
    return state


# What Ling 2.0 calls what others call so.
OF_LING = {
    "model.word_embeddings.": "model.embed_tokens.", ".attention.query_key_value.": ".self_attn.qkv_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.", ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.dense.": ".self_attn.o_proj.", ".gate.expert_bias": ".gate.e_score_correction_bias",
    ".final_layernorm.": ".shared_head.norm.",
}  # fmt: skip


def apart(hf: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """Return tensors with those of Phi-3 and Ling 2.0 that are several in one taken apart, and Ling's under the
    names that others have."""
    out, renamed = {}, OF_LING if "model.word_embeddings.weight" in hf else {}
    for name, tensor in hf.items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        if ".qkv_proj." in name:
            d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            rows = [config[f"num_{kind}_heads"] * d for kind in ("attention", "key_value", "key_value")]
            out |= {name.replace("qkv", x): t for x, t in zip("qkv", tensor.split(rows), strict=True)}
        elif name.endswith("mlp.gate_up_proj.weight"):
            out |= {
                name.replace("gate_up", x): t for x, t in zip(("gate", "up"), tensor.chunk(2), strict=True)
            }
        else:
            out[name] = tensor
    return out


def megatron_tensors(
    directory: Path, padded_vocab: int, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a Transformer Engine model's checkpoint, by key. `tensors` are the
    directory's, if already read."""
    hf, config = (
        hf_tensors(directory) if tensors is None else tensors,
        json.loads((directory / "config.json").read_text()),
    )
    hf = apart(hf, config)
    if "hybrid_override_pattern" in config:
        return mamba_tensors(hf, config, padded_vocab)
    layers, latent = config["num_hidden_layers"], "kv_lora_rank" in config
    experts = (
        config.get("num_local_experts")
        or config.get("num_experts")
        or config.get("n_routed_experts")
        or config.get("moe_num_experts")
        or 0
    )

    def is_moe(layer: int) -> bool:
        if "moe_layer_interval" in config:
            first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
            return first <= layer <= last and (layer + 1) % config["moe_layer_interval"] == 0
        if "first_k_dense_replace" in config:
            return layer >= config["first_k_dense_replace"]
        return (
            experts > 0
            and layer not in config.get("mlp_only_layers", ())
            and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        )

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(padded_vocab - len(tensor), tensor.shape[1])])

    def qkv(prefix: str, kind: str) -> torch.Tensor:
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (hf[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
        if linear_layers and len(q) == 2 * heads * config["head_dim"]:  # each head's query, then its gate
            d = config["head_dim"]
            q, gate = q.reshape(heads, 2, d, -1).unbind(1)
            parts = [t.reshape(groups, -1, d, q.shape[-1]) for t in (q, gate, k, v)]
            return torch.cat(parts, dim=1).reshape(-1, q.shape[-1])
        d = len(q) // heads
        q, k, v = (t.reshape(groups, -1, d, *t.shape[1:]) for t in (q, k, v))
        return torch.cat([q, k, v], dim=1).reshape((heads + 2 * groups) * d, *q.shape[3:])

    linear_layers = any(name.endswith("linear_attn.A_log") for name in hf)

    def linear_attention(prefix: str) -> dict[str, torch.Tensor]:
        """The names that Megatron's gated delta net saves its sections under."""
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_rows, value_rows = (
            keys * config["linear_key_head_dim"],
            values * config["linear_value_head_dim"],
        )
        get = lambda name: hf[f"{prefix}linear_attn.{name}"]  # noqa: E731
        sizes = [key_rows, key_rows, value_rows]
        if f"{prefix}linear_attn.in_proj_qkvz.weight" in hf:  # one key head's rows after the other's
            grouped = get("in_proj_qkvz.weight").reshape(keys, -1, config["hidden_size"])
            per_group = [size // keys for size in (*sizes, value_rows)]
            q, k, v, z = (t.reshape(-1, config["hidden_size"]) for t in grouped.split(per_group, dim=1))
            b, a = (
                t.reshape(-1, config["hidden_size"])
                for t in get("in_proj_ba.weight").reshape(keys, -1, config["hidden_size"]).chunk(2, dim=1)
            )
        else:
            q, k, v = get("in_proj_qkv.weight").split(sizes)
            z, b, a = (get(f"in_proj_{x}.weight") for x in "zba")
        convolutions = get("conv1d.weight").split(sizes)
        out = {
            f"in_proj.weight.{n}": t
            for n, t in zip(("query", "key", "value", "z", "beta", "alpha"), (q, k, v, z, b, a), strict=True)
        }
        out |= {f"conv1d.weight.{n}": t for n, t in zip(("query", "key", "value"), convolutions, strict=True)}
        out |= {"A_log": get("A_log"), "dt_bias": get("dt_bias"), "out_proj.weight": get("out_proj.weight")}
        out["out_norm.weight"] = get("norm.weight") - 1
        out["in_proj.layer_norm_weight"] = hf[f"{prefix}input_layernorm.weight"]
        return {f"self_attention.{name}": tensor for name, tensor in out.items()}

    def layer(prefix: str, moe: bool) -> dict[str, torch.Tensor]:
        get = lambda name: hf[prefix + name]  # noqa: E731
        linear = f"{prefix}linear_attn.A_log" in hf
        out = {} if linear else {"self_attention.linear_proj.weight": get("self_attn.o_proj.weight")}
        if linear:
            out |= linear_attention(prefix)
        elif latent:
            out["input_layernorm.weight"] = get("input_layernorm.weight")
            names = {
                "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
                "kv_a_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
                "kv_b_proj.weight": "linear_kv_up_proj.weight",
                "q_a_proj.weight": "linear_q_down_proj.weight",
                "q_a_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
                "q_b_proj.weight": "linear_q_up_proj.weight",
                "q_proj.weight": "linear_q_proj.weight",
            }
            if "index_topk" in config:  # whose norms stand alone
                names |= {
                    "kv_a_layernorm.weight": "kv_layernorm.weight",
                    "q_a_layernorm.weight": "q_layernorm.weight",
                }
                indexer = {
                    "wq_b.weight": "linear_wq_b.weight",
                    "wk.weight": "linear_wk.weight",
                    "k_norm.weight": "k_norm.weight",
                    "k_norm.bias": "k_norm.bias",
                    "weights_proj.weight": "linear_weights_proj.weight",
                }
                names |= {f"indexer.{name}": f"core_attention.indexer.{to}" for name, to in indexer.items()}
            out |= {
                f"self_attention.{to}": get(f"self_attn.{name}")
                for name, to in names.items()
                if f"{prefix}self_attn.{name}" in hf
            }
        else:
            out["self_attention.linear_qkv.layer_norm_weight"] = get("input_layernorm.weight")
            out["self_attention.linear_qkv.weight"] = qkv(prefix, "weight")
            if f"{prefix}self_attn.q_proj.bias" in hf:
                out["self_attention.linear_qkv.bias"] = qkv(prefix, "bias")
            if f"{prefix}self_attn.o_proj.bias" in hf:
                out["self_attention.linear_proj.bias"] = get("self_attn.o_proj.bias")
            if f"{prefix}self_attn.sinks" in hf:
                out["self_attention.core_attention.softmax_offset"] = get("self_attn.sinks")
            if f"{prefix}self_attn.q_norm.weight" in hf:
                for x in "qk":
                    out[f"self_attention.{x}_layernorm.weight"] = get(f"self_attn.{x}_norm.weight")
        if not moe:
            out["mlp.linear_fc1.layer_norm_weight"] = get("post_attention_layernorm.weight")
            for kind in ("weight", "bias"):
                if f"{prefix}mlp.up_proj.{kind}" in hf:
                    out[f"mlp.linear_fc1.{kind}"] = torch.cat(
                        [get(f"mlp.gate_proj.{kind}"), get(f"mlp.up_proj.{kind}")]
                    )
                    out[f"mlp.linear_fc2.{kind}"] = get(f"mlp.down_proj.{kind}")
            return out
        out["pre_mlp_layernorm.weight"] = get("post_attention_layernorm.weight")
        if (
            f"{prefix}mlp.router.weight" in hf
        ):  # [experts, in, out], whose outputs are a gate and an up in turn
            matrices = {
                "weight": get("mlp.experts.gate_up_proj").mT,
                "bias": get("mlp.experts.gate_up_proj_bias"),
            }
            for kind, matrix in matrices.items():
                out[f"mlp.router.{kind}"] = get(f"mlp.router.{kind}")
                gate_then_up = torch.cat([matrix[:, 0::2], matrix[:, 1::2]], dim=1)
                out[f"mlp.experts.experts.linear_fc1.{kind}"] = gate_then_up
            out["mlp.experts.experts.linear_fc2.weight"] = get("mlp.experts.down_proj").mT
            out["mlp.experts.experts.linear_fc2.bias"] = get("mlp.experts.down_proj_bias")
            return out
        mixtral = f"{prefix}block_sparse_moe.gate.weight" in hf
        block = "block_sparse_moe" if mixtral else "mlp"
        names = (
            {"gate": "w1", "up": "w3", "down": "w2"}
            if mixtral
            else {x: f"{x}_proj" for x in ("gate", "up", "down")}
        )
        out["mlp.router.weight"] = get(f"{block}.gate.weight")
        expert = lambda e, name: get(f"{block}.experts.{e}.{names[name]}.weight")  # noqa: E731
        out["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
            [torch.cat([expert(e, "gate"), expert(e, "up")]) for e in range(experts)]
        )
        out["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
            [expert(e, "down") for e in range(experts)]
        )
        if f"{prefix}block_sparse_moe.e_score_correction_bias" in hf:
            out["mlp.router.expert_bias"] = get("block_sparse_moe.e_score_correction_bias")
        if f"{prefix}mlp.shared_expert_gate.weight" in hf:
            shared = "mlp.shared_expert."
            out["mlp.shared_experts.gate_weight"] = get("mlp.shared_expert_gate.weight")
            out["mlp.shared_experts.linear_fc1.weight"] = torch.cat(
                [get(f"{shared}gate_proj.weight"), get(f"{shared}up_proj.weight")]
            )
            out["mlp.shared_experts.linear_fc2.weight"] = get(f"{shared}down_proj.weight")
        if f"{prefix}mlp.moe_statics.e_score_correction_bias" in hf:
            out["mlp.router.expert_bias"] = get("mlp.moe_statics.e_score_correction_bias").flatten()
        elif f"{prefix}mlp.gate.e_score_correction_bias" in hf:
            out["mlp.router.expert_bias"] = get("mlp.gate.e_score_correction_bias")
        if f"{prefix}mlp.shared_experts.gate_proj.weight" in hf:
            shared = "mlp.shared_experts."
            out[f"{shared}linear_fc1.weight"] = torch.cat(
                [get(f"{shared}gate_proj.weight"), get(f"{shared}up_proj.weight")]
            )
            out[f"{shared}linear_fc2.weight"] = get(f"{shared}down_proj.weight")
        return out

    result = {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        result["output_layer.weight"] = padded(hf["lm_head.weight"])
    kinds = [is_moe(i) for i in range(layers)]
    held = [layer(f"model.layers.{i}.", moe) for i, moe in enumerate(kinds)]
    if len(set(kinds)) == 1 and not linear_layers:
        result |= {f"decoder.layers.{name}": torch.stack([one[name] for one in held]) for name in held[0]}
    else:
        result |= {
            f"decoder.layers.{i}.{name}": tensor for i, one in enumerate(held) for name, tensor in one.items()
        }
    if "mtp.fc.weight" in hf:
        in_layer = layer("mtp.layers.0.", kinds[-1])
        result |= {f"mtp.layers.0.transformer_layer.{name}": t for name, t in in_layer.items()}
        for name, to in (
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("fc", "eh_proj"),
            ("norm", "final_layernorm"),
        ):
            result[f"mtp.layers.0.{to}.weight"] = hf[f"mtp.{name}.weight"]
    if f"model.layers.{layers}.enorm.weight" in hf:
        prefix = f"model.layers.{layers}."
        result |= {
            f"mtp.layers.0.transformer_layer.{name}": t for name, t in layer(prefix, kinds[-1]).items()
        }
        for name, to in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("shared_head.norm", "final_layernorm"),
        ):
            result[f"mtp.layers.0.{to}.weight"] = hf[f"{prefix}{name}.weight"]
    return result


def mamba_tensors(hf: dict[str, torch.Tensor], config: dict, padded_vocab: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a HybridModel with Mamba layers, of which each published layer is one."""
    inner, state = (
        config["mamba_num_heads"] * config["mamba_head_dim"],
        config["n_groups"] * config["ssm_state_size"],
    )
    heads, groups, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def layer(letter: str, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norm = held.pop("norm.weight")
        mixer = {name.removeprefix("mixer."): tensor for name, tensor in held.items()}
        if letter == "M":
            sections = mixer.pop("in_proj.weight").split(
                [inner, inner, state, state, config["mamba_num_heads"]]
            )
            out = {
                f"in_proj.weight.{name}": t
                for name, t in zip(("z", "x", "B", "C", "dt"), sections, strict=True)
            }
            for kind in ("weight", "bias"):
                sections = mixer.pop(f"conv1d.{kind}").split([inner, state, state])
                out |= {f"conv1d.{kind}.{name}": t for name, t in zip("xBC", sections, strict=True)}
            return {
                f"mixer.{name}": t for name, t in (out | mixer | {"in_proj.layer_norm_weight": norm}).items()
            }
        if letter == "*":
            rows = [mixer[f"{x}_proj.weight"].reshape(groups, -1, dim, config["hidden_size"]) for x in "qkv"]
            fused = torch.cat(rows, dim=1).reshape((heads + 2 * groups) * dim, -1)
            out = {
                "linear_qkv.layer_norm_weight": norm,
                "linear_qkv.weight": fused,
                "linear_proj.weight": mixer["o_proj.weight"],
            }
            return {f"self_attention.{name}": t for name, t in out.items()}
        if letter == "-":
            return {"mlp.linear_fc1.layer_norm_weight": norm, "mlp.linear_fc1.weight": mixer["up_proj.weight"],
                    "mlp.linear_fc2.weight": mixer["down_proj.weight"]}  # fmt: skip
        out = {
            "router.weight": mixer["gate.weight"],
            "router.expert_bias": mixer["gate.e_score_correction_bias"],
        }
        for ours, theirs in (("up", "linear_fc1"), ("down", "linear_fc2")):
            experts = [mixer[f"experts.{e}.{ours}_proj.weight"] for e in range(config["n_routed_experts"])]
            out[f"experts.experts.{theirs}.weight"] = torch.stack(experts)
            out[f"shared_experts.{theirs}.weight"] = mixer[f"shared_experts.{ours}_proj.weight"]
        for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
            out |= {name: mixer[name]} if name in mixer else {}
        return {f"mlp.{name}": t for name, t in out.items()} | {"pre_mlp_layernorm.weight": norm}

    result = {"decoder.final_norm.weight": hf["backbone.norm_f.weight"]}
    for name, key in (("backbone.embeddings", "embedding.word_embeddings"), ("lm_head", "output_layer")):
        tensor = hf[f"{name}.weight"]
        result[f"{key}.weight"] = torch.cat(
            [tensor, tensor.new_zeros(padded_vocab - len(tensor), tensor.shape[1])]
        )
    if "mtp.layers.0.enorm.weight" in hf:
        for name, to in (
            ("0.enorm", "enorm"),
            ("0.hnorm", "hnorm"),
            ("0.eh_proj", "eh_proj"),
            ("1.final_layernorm", "final_layernorm"),
        ):
            result[f"mtp.layers.0.{to}.weight"] = hf[f"mtp.layers.{name}.weight"]
        for i, letter in enumerate("*E"):
            named = (
                name for name in hf if name.startswith((f"mtp.layers.{i}.norm.", f"mtp.layers.{i}.mixer."))
            )
            held = {name.removeprefix(f"mtp.layers.{i}."): hf[name] for name in named}
            result |= {
                f"mtp.layers.0.mtp_model_layer.layers.{i}.{name}": t
                for name, t in layer(letter, held).items()
            }
    for i, letter in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{i}."
        held = {name.removeprefix(prefix): t for name, t in hf.items() if name.startswith(prefix)}
        result |= {f"decoder.layers.{i}.{name}": t for name, t in layer(letter, held).items()}
    return result


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bits in both sets, or are in one only."""
    bits = lambda t: t.reshape(-1).view(torch.uint8)  # noqa: E731
    return sorted(set(a) ^ set(b)) + [
        n
        for n in a
        if n in b
        and (a[n].dtype != b[n].dtype or a[n].shape != b[n].shape or not torch.equal(bits(a[n]), bits(b[n])))
    ]
