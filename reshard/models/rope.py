"""Rotary embeddings, in a Hugging Face config and in Megatron's arguments.

Two spellings of the config are read: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling`` (before). What a field means where it is absent is what transformers makes of it.
"""

import math
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.models.config_fields import ignore_hint
from reshard.models.field_tables import ROPE_FIELDS
from reshard.models.numerics_args import same_value

# What Megatron's RotaryEmbedding._apply_scaling has as constants that nothing changes.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Fields of MLATransformerConfig, with their defaults, that Megatron-LM has no flag for. The defaults are also
# those of YaRN as published.
MLA_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}

# What transformers reads of each type besides the base; all are numbers, but for the last.
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor", "truncate"),
}  # fmt: skip
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def rope_of(
    config: dict[str, Any], where: str = "config.json", share: float = 1.0, theta: float = 10000.0
) -> dict[str, Any]:
    """Return the rotary settings of a config as one dict with at least ``rope_type``, ``rope_theta`` and
    ``partial_rotary_factor``; absent ones as transformers fills them in, null ones left out. `share` is the
    part of a head's dims that turns, and `theta` the base, where nothing says so.

    Raises ReshardError if they are no numbers that could be meant, or two spellings of the same thing
    differ.
    """
    spelled = [config.get("rope_parameters"), config.get("rope_scaling")]
    for name, value in zip(ROPE_FIELDS, spelled):
        if value is not None and not isinstance(value, dict):
            raise ReshardError(f"{where}: {name} is {value!r:.60}, which is not an object")
    rope: dict[str, Any] = {}
    outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    for spelling in (*(_typed(value, where) for value in spelled if value), outside):
        for name, value in spelling.items():
            if value is None or rope.setdefault(name, value) is value:
                continue
            if not same_value(rope[name], value):
                raise ReshardError(
                    f"{where} says {name} = {rope[name]!s:.60} and {name} = {value!s:.60} for its rotary "
                    f"embedding: keep one of them"
                )
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share} | rope
    if rope["rope_type"] in ("llama3", "yarn") and config.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    _check_numbers(rope, where)
    return rope


def _typed(scaling: dict[str, Any], where: str) -> dict[str, Any]:
    """Return rotary settings with the type under ``rope_type``, of its two spellings."""
    types = {scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None}
    if scaling.get("mrope_section") is not None:  # as Qwen2.5-VL is published
        types = {"default" if kind == "mrope" else kind for kind in types}
    if len(types) > 1:
        raise ReshardError(
            f"{where}: the rotary embedding has two types: "
            f"{listed(f'{kind!s:.60}' for kind in sorted(types))}"
        )
    return {name: value for name, value in scaling.items() if name != "type"} | {
        "rope_type": types.pop() if types else "default"
    }


def _check_numbers(rope: dict[str, Any], where: str) -> None:
    for name in ("rope_theta", "partial_rotary_factor", *PARAMETERS.get(rope["rope_type"], ())):
        value = rope.get(name)
        if value is None or name == "truncate":
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        may_be_zero = name in ("mscale", "mscale_all_dim")
        if not number or value < 0 or (value == 0 and not may_be_zero):
            raise ReshardError(
                f"{where}: {name} of the rotary embedding is {value!r:.60}, which is not a positive number"
            )
    if rope["partial_rotary_factor"] > 1:
        raise ReshardError(
            f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']}, which is "
            f"more than a whole head"
        )


def megatron_rope(rope: dict[str, Any], latent: bool, where: str) -> dict[str, Any]:
    """Megatron's rotary arguments for the settings of `rope_of`; `latent` says whether they are of
    multi-latent attention.

    Raises ReshardError, by name, if Megatron has no setting for what they ask for.
    """
    name, theta = rope["rope_type"], rope["rope_theta"]
    strange = [
        key
        for key in rope
        if key not in ("rope_type", "rope_theta", "partial_rotary_factor", "finetuned", *PARAMETERS[name])
        and not (key in ("attn_factor", "factor") and same_value(rope[key], 1.0))
        and key != "original_max_position_embeddings"  # which matters to scaling alone
    ]
    if strange:
        values = listed((f"{key} = {rope[key]}"[:60] for key in strange), 3)
        meaning = "which only vLLM reads" if strange == ["attn_factor"] else "whose meaning is not known"
        raise ReshardError(
            f"{where}: rope type {name!r:.60} has {values}, {meaning}; {ignore_hint(strange)} goes on without it"
        )
    for key in NEEDED.get(name, ()):
        if rope.get(key) is None:
            raise ReshardError(f"{where}: rope type {name!r:.60} has no {key}")
    if float(theta) != int(theta):
        raise ReshardError(
            f"{where}: rope_theta {theta} is not a whole number, and Megatron's "
            f"--rotary-base takes only those"
        )
    args: dict[str, Any] = {
        "rotary_base": int(theta),
        "rotary_percent": float(rope["partial_rotary_factor"]),
    }
    if latent:
        args["rope_type"] = "yarn" if name == "yarn" else "rope"
    if name == "llama3":
        _same_constants(rope, LLAMA3_CONSTANTS, where)
        args |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    elif name == "linear":
        if not float(rope["factor"]).is_integer():
            raise ReshardError(f"{where}: rope type 'linear' has factor {rope['factor']}, and Megatron's "
                               "--rotary-seq-len-interpolation-factor takes only whole numbers")  # fmt: skip
        args["rotary_seq_len_interpolation_factor"] = int(rope["factor"])
    elif name == "yarn":
        args |= _megatron_yarn(rope, latent, where)
    return args


def _megatron_yarn(rope: dict[str, Any], latent: bool, where: str) -> dict[str, Any]:
    factor = float(rope["factor"])
    mscale, all_dim = (
        float(rope.get(key) or default) for key, default in (("mscale", 1.0), ("mscale_all_dim", 0.0))
    )
    if not latent:  # engines read neither there
        mscale, all_dim = 1.0, 0.0
    megatron_scale, hf_scale = (
        yarn_scale(factor, mscale) / yarn_scale(factor, all_dim),
        attention_factor(rope),
    )
    if not math.isclose(megatron_scale, hf_scale, rel_tol=1e-6):
        names = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
        raise ReshardError(
            f"{where}: with {listed(names)} the rotary embedding is scaled by {hf_scale:.6g} in "
            f"transformers, by {megatron_scale:.6g} in Megatron and in vLLM"
        )
    args = {"rotary_scaling_factor": factor, "mscale": mscale, "mscale_all_dim": all_dim}
    if latent:
        if rope.get("truncate") is False:
            raise ReshardError(
                f"{where}: rope truncate is false, but Megatron's multi-latent attention always rounds"
            )
        values = {name: rope.get(name) or default for name, default in MLA_YARN.items()}
        return args | {name: value for name, value in values.items() if value != MLA_YARN[name]}
    return args | {
        "position_embedding_type": "yarn",
        "yarn_original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": rope.get("truncate") is not False,
    }


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of attention at a factor of the context, as published."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: dict[str, Any]) -> float:
    """Return the factor by which transformers multiplies the cosines and sines of a rotary embedding."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return yarn_scale(factor)


def inverse_frequencies(rope: dict[str, Any], dim: int) -> list[float]:
    """Return the ``dim / 2`` angles, in radians, by which a rotary embedding of `rope_of` turns
    from one position to the next.

    >>> inverse_frequencies({"rope_type": "default", "rope_theta": 10000.0}, 4)
    [1.0, 0.01]
    """
    plain = [rope["rope_theta"] ** -(i / dim) for i in range(0, dim, 2)]
    if rope["rope_type"] == "linear":
        return [angle / rope["factor"] for angle in plain]
    if rope["rope_type"] == "llama3":
        return [_llama3(angle, rope) for angle in plain]
    if rope["rope_type"] == "yarn":
        low, high = _yarn_range(rope, dim)
        kept = [1.0 - min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
        return [angle * keep + angle / rope["factor"] * (1.0 - keep) for angle, keep in zip(plain, kept)]
    return plain


def _llama3(angle: float, rope: dict[str, Any]) -> float:
    """High frequencies stay, low ones are divided, those between are mixed."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * angle / (2 * math.pi)
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return angle * keep + angle / rope["factor"] * (1.0 - keep)


def _yarn_range(rope: dict[str, Any], dim: int) -> tuple[float, float]:
    """The first and the last pair of dims that are neither kept nor divided, but mixed."""
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _same_constants(rope: dict[str, Any], constants: dict[str, float], where: str) -> None:
    for key, value in constants.items():
        given_value = rope.get(key) or value
        if float(given_value) != float(value):
            raise ReshardError(f"{where}: rope {key} is {given_value}, but Megatron has {value} built in")


def hf_rope(args: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `megatron_rope`: ``rope_theta`` and ``rope_scaling`` from Megatron's arguments."""
    config: dict[str, Any] = {"rope_theta": float(args.get("rotary_base", 10000)), "rope_scaling": None}
    if args.get("multi_latent_attention"):
        # Without --rope-type Megatron takes YaRN, which at a factor of 1 changes nothing.
        factor = float(args.get("rotary_scaling_factor") or 1.0)
        if (args.get("rope_type") or "yarn") == "yarn" and factor != 1.0:
            config["rope_scaling"] = {
                "rope_type": "yarn",
                "factor": factor,
                **_mscales(args),
                **_values_or(args, MLA_YARN),
            }
    elif args.get("position_embedding_type") == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": float(args.get("rotary_scaling_factor") or 1.0),
        }
        scaling |= _values_or({key: args.get(f"yarn_{key}") for key in MLA_YARN}, MLA_YARN)
        if args.get("yarn_correction_range_round_to_int") is False:
            scaling["truncate"] = False
        above, below = (yarn_scale(scaling["factor"], mscale) for mscale in _mscales(args).values())
        if above / below != yarn_scale(scaling["factor"]):
            scaling["attention_factor"] = above / below
        config["rope_scaling"] = scaling
    elif args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor", 8.0))
        config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    elif args.get("rotary_seq_len_interpolation_factor"):
        config["rope_scaling"] = {
            "rope_type": "linear",
            "factor": float(args["rotary_seq_len_interpolation_factor"]),
        }
    return config


def _mscales(args: dict[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in _values_or(args, {"mscale": 1.0, "mscale_all_dim": 0.0}).items()
    }


def _values_or(args: dict[str, Any], defaults: dict[str, float]) -> dict[str, float]:
    return {name: default if args.get(name) is None else args[name] for name, default in defaults.items()}
