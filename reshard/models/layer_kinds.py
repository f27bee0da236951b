"""Rules by which configs say of what kind their layers are, for families that share one."""

from typing import Any

from reshard.core.errors import ReshardError
from reshard.models.config_fields import whole_number
from reshard.models.numerics_args import linear_pattern, window_pattern


def moe_by_step(config: dict[str, Any], where: str) -> list[str]:
    """Return ``moe`` for every `decoder_sparse_step`-th layer but those of `mlp_only_layers`, and
    ``dense`` for the others. Raises ReshardError where the two fields do not say which."""
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers") or []
    step = 1 if step is None else step
    are_layers = isinstance(dense, list) and all(whole_number(layer, 0) for layer in dense)
    if not whole_number(step) or not are_layers:
        raise ReshardError(
            f"{where}: decoder_sparse_step {step!r} and mlp_only_layers {dense!r} do not say which layers are dense"
        )
    layers = range(config["num_hidden_layers"])
    return ["moe" if (layer + 1) % step == 0 and layer not in dense else "dense" for layer in layers]


def step_of_pattern(pattern: list[int]) -> dict[str, Any]:
    """Return the fields that `moe_by_step` reads for a pattern with 1 for each layer with experts:
    every layer in turn, and the dense ones by name."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, moe in enumerate(pattern) if not moe],
    }


def attention_by_layer_types(config: dict[str, Any], where: str) -> list[str]:
    """Return ``linear`` or ``full`` for each layer's attention: by `layer_types`, else ``full`` for every
    `full_attention_interval`-th. Raises ReshardError where the two do not say which."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    interval = config.get("full_attention_interval")
    interval = 4 if interval is None else interval
    if types is None and whole_number(interval):
        return ["linear" if (layer + 1) % interval else "full" for layer in range(layers)]
    known = {"linear_attention": "linear", "full_attention": "full"}
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ReshardError(
            f"{where}: layer_types {types!r:.80} and full_attention_interval {interval!r:.20} do not say which of "
            f"{layers} layers have linear attention"
        )
    return [known[kind] for kind in types]


def linear_args(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's argument for the layers that `attention_by_layer_types` calls linear."""
    kinds = attention_by_layer_types(config, "config.json")
    return {"linear_attention_freq": [int(kind == "linear") for kind in kinds]}


def linear_fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields for such an argument: the inverse of `linear_args`."""
    if args.get("linear_attention_freq") is None:
        return {}
    pattern = linear_pattern(args["linear_attention_freq"], int(args["num_layers"]))
    return {"layer_types": ["linear_attention" if linear else "full_attention" for linear in pattern]}


def windows_by_layer_types(config: dict[str, Any], where: str) -> list[int]:
    """Return a 1 for each layer that attends to a window and a 0 for each that attends to all
    before it: by `layer_types`, else a window in every second layer, the first among them. Raises
    ReshardError where the field does not say which."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        return [int(layer % 2 == 0) for layer in range(layers)]
    known = {"sliding_attention": 1, "full_attention": 0}
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ReshardError(
            f"{where}: layer_types {types!r:.80} does not say which of {layers} layers attend to a window"
        )
    return [known[kind] for kind in types]


def window_args(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments for `sliding_window`, which counts a token itself, and the layers
    that have it."""
    windows = windows_by_layer_types(config, "config.json")
    if not any(windows):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": (config["sliding_window"] - 1, 0), "window_attn_skip_freq": windows}


def window_fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields for such arguments: the inverse of `window_args`."""
    layers, window = int(args["num_layers"]), args.get("window_size")
    if not window or window[0] < 0:
        return {"layer_types": ["full_attention"] * layers}
    windows = window_pattern(args.get("window_attn_skip_freq"), layers)
    names = ("full_attention", "sliding_attention")
    return {"layer_types": [names[windowed] for windowed in windows], "sliding_window": window[0] + 1}
