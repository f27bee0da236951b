"""Rotary embeddings: how a Hugging Face config and Megatron's arguments say the same thing.

Two spellings of the config are read: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (before).
"""

from reshard.errors import ReshardError

# What Megatron's RotaryEmbedding._apply_scaling and MLATransformerConfig have as constants that no flag changes.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN_CONSTANTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def rope_of(config: dict) -> dict:
    """The rotary settings of a config as one dict with at least ``rope_type`` and ``rope_theta``."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    rope["rope_type"] = scaling.get("rope_type") or scaling.get("type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope


def megatron_rope(config: dict, kind: str, where: str) -> dict:
    """Megatron's rotary arguments for a config of a family whose table says ROPE = `kind` (``default``, ``llama3``, ``yarn``).

    Raises ReshardError, by name, where Megatron has no setting for what the config asks for.
    """
    rope = rope_of(config)
    name, theta = rope["rope_type"], rope["rope_theta"]
    args: dict = {"rotary_base": int(theta), "rotary_percent": 1.0}
    if float(theta) != int(theta):
        raise ReshardError(f"{where}: rope_theta {theta} is not a whole number, and Megatron's --rotary-base takes only those")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ReshardError(f"{where}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported, only 1.0")
    if kind == "yarn":
        args["rope_type"] = "yarn" if name == "yarn" else "rope"
    if name == "default":
        return args
    if name == "llama3" == kind:
        _same_constants(rope, LLAMA3_CONSTANTS, where)
        return args | {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if name == "linear" and kind != "yarn" and float(rope["factor"]).is_integer():
        return args | {"rotary_seq_len_interpolation_factor": int(rope["factor"])}
    if name == "yarn" == kind:
        _same_constants(rope, YARN_CONSTANTS, where)
        scaling = {"rotary_scaling_factor": float(rope["factor"])}
        return args | scaling | {key: float(rope.get(key) or default) for key, default in (("mscale", 1.0), ("mscale_all_dim", 0.0))}
    raise ReshardError(f"{where}: rope type {name!r} has no counterpart in Megatron for this family (it has {kind!r} and 'default')")


def _same_constants(rope: dict, constants: dict, where: str) -> None:
    for key, value in constants.items():
        if float(rope.get(key, value)) != float(value):
            raise ReshardError(f"{where}: rope {key} is {rope[key]}, but Megatron has {value} built in")


def hf_rope(args: dict) -> dict:
    """The inverse of `megatron_rope`: ``rope_theta`` and ``rope_scaling`` from Megatron's arguments."""
    config: dict = {"rope_theta": float(args.get("rotary_base", 10000)), "rope_scaling": None}
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor", 8.0))
        config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    elif args.get("multi_latent_attention") and args.get("rope_type") == "yarn":
        scaling = {key: float(args[arg]) for key, arg in (("factor", "rotary_scaling_factor"), ("mscale", "mscale"),
                                                          ("mscale_all_dim", "mscale_all_dim"))}  # fmt: skip
        config["rope_scaling"] = {"rope_type": "yarn", **scaling, **YARN_CONSTANTS}
    elif args.get("rotary_seq_len_interpolation_factor"):
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(args["rotary_seq_len_interpolation_factor"])}
    return config
