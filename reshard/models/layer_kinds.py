"""Rules by which configs say of what kind their layers are, for families that share one."""

from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.models.config_fields import whole_number
from reshard.models.numerics_args import linear_pattern, window_pattern


def moe_by_step(config: dict[str, Any], where: str) -> list[str]:
    """Return ``moe`` for every `decoder_sparse_step`-th layer but those of `mlp_only_layers`, and
    ``dense`` for the others. Raises ReshardError if the two fields do not say which."""
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


def moe_by_interval(config: dict[str, Any], where: str) -> list[str]:
    """Return ``moe`` for every `moe_layer_interval`-th layer from `moe_layer_start_index` to
    `moe_layer_end_index`, where -1 is the last, and ``dense`` for the others. Raises ReshardError if the
    three fields do not say which."""
    defaults = {"moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
    given = {name: config.get(name) for name in defaults}
    interval, first, last = (defaults[name] if n is None else n for name, n in given.items())
    if not whole_number(interval) or not whole_number(first, 0) or not whole_number(last, -1):
        shown = listed(f"{name} {value!r:.20}" for name, value in given.items())
        raise ReshardError(f"{where}: {shown} do not say which layers have experts")
    layers = config["num_hidden_layers"]
    last = layers - 1 if last == -1 else last
    return ["moe" if first <= i <= last and (i + 1) % interval == 0 else "dense" for i in range(layers)]


def interval_of_pattern(pattern: list[int]) -> dict[str, Any]:
    """Return the fields that `moe_by_interval` reads for a pattern with 1 for each layer with experts. Raises
    ReshardError for one that they cannot say."""
    experts = [layer for layer, moe in enumerate(pattern) if moe]
    interval = experts[1] - experts[0] if len(experts) > 1 else 1
    fields = {
        "moe_layer_interval": interval,
        "moe_layer_start_index": experts[0],
        "moe_layer_end_index": experts[-1],
    }
    kinds = moe_by_interval(fields | {"num_hidden_layers": len(pattern)}, "the pattern")
    if [kind == "moe" for kind in kinds] != [bool(moe) for moe in pattern]:
        raise ReshardError(
            f"moe_layer_freq {pattern!s:.80}: layers with experts are not a whole interval apart, which "
            "this family's config cannot say"
        )
    return fields


def attention_by_layer_types(config: dict[str, Any], where: str) -> list[str]:
    """Return ``linear`` or ``full`` for each layer's attention: by `layer_types`, else ``full`` for every
    `full_attention_interval`-th. Raises ReshardError if the two do not say which."""
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


def check_layer_types(config: dict[str, Any], kind: str, where: str) -> None:
    """Raise ReshardError if `layer_types` names another kind of layers than this one, which all are."""
    types = config.get("layer_types") or [kind]
    if not isinstance(types, list) or any(each != kind for each in types):
        raise ReshardError(f"{where}: all layers are {kind}, but layer_types is {types!r:.80}")


def window_of_all(config: dict[str, Any], where: str, absent: int | None = None) -> int | None:
    """Return `sliding_window` where all layers attend to it, or None where null says that they do not. Raises
    ReshardError for what is no number of tokens: to transformers it is a window all the same."""
    window = config.get("sliding_window", absent)
    if window is not None and not whole_number(window):
        raise ReshardError(
            f"{where}: sliding_window {window!r:.80} is not a number of tokens from 1 on: set it to null if all "
            f"layers attend to all tokens"
        )
    return window


def check_layer_windows(config: dict[str, Any], window: int | None, where: str) -> None:
    """Raise ReshardError if `layer_types` contradicts the window that all layers attend to, or that none does."""
    check_layer_types(config, "full_attention" if window is None else "sliding_attention", where)


def args_of_window(window: int | None) -> dict[str, Any]:
    """Return Megatron's argument for a window of all layers, which counts a token itself."""
    return {"window_size": None if window is None else (window - 1, 0)}


def window_of_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config field for a window of all layers: the inverse of `args_of_window`."""
    window = args.get("window_size")
    return {"sliding_window": window[0] + 1 if window and window[0] >= 0 else None}


def window_args(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments for `sliding_window`, which counts a token itself, and the layers
    that have it."""
    windows = windows_by_layer_types(config, "config.json")
    if not any(windows):
        return {"window_size": None, "window_attn_skip_freq": None}
    return args_of_window(config["sliding_window"]) | {"window_attn_skip_freq": windows}


def window_fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields for such arguments: the inverse of `window_args`."""
    layers, window = int(args["num_layers"]), args.get("window_size")
    if not window or window[0] < 0:
        return {"layer_types": ["full_attention"] * layers}
    windows = window_pattern(args.get("window_attn_skip_freq"), layers)
    names = ("full_attention", "sliding_attention")
    return {"layer_types": [names[windowed] for windowed in windows], "sliding_window": window[0] + 1}


# Words of `layers_block_type`, as published and as transformers 5 writes them, and letters of
# `hybrid_override_pattern`.
PATTERN_FIELDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
BLOCK_TYPES = {
    "mamba": "mamba", "attention": "full", "mlp": "dense", "moe": "moe",
    "linear_attention": "mamba", "full_attention": "full", "M": "mamba", "*": "full", "-": "dense", "E": "moe",
}  # fmt: skip


def kinds_by_pattern(config: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return ``mamba``, ``full`` (attention), ``dense`` (an MLP) or ``moe`` for each layer: by
    `layers_block_type`, which `layer_types` is too, or by the letters of `hybrid_override_pattern`.

    Raises ReshardError if they do not say which, or say two things.
    """
    given = {name: config[name] for name in PATTERN_FIELDS if config.get(name) is not None}
    kinds = {}
    for name, entries in given.items():
        is_of_type = isinstance(entries, str if name == "hybrid_override_pattern" else list)
        if not is_of_type or not entries or any(entry not in BLOCK_TYPES for entry in entries):
            raise ReshardError(f"{where}: {name} {entries!r:.80} does not say of which kind each layer is")
        kinds[name] = tuple(BLOCK_TYPES[entry] for entry in entries)
    if not kinds:
        raise ReshardError(
            f"{where} has neither {PATTERN_FIELDS[0]} nor {PATTERN_FIELDS[-1]}, which say of which kind each layer is"
        )
    first, *others = kinds
    layers = config.get("num_hidden_layers")
    for other in others:
        if kinds[other] != kinds[first]:
            raise ReshardError(
                f"{where}: {first} and {other} say two things of the layers: correct the one that is wrong"
            )
    if layers is not None and layers != len(kinds[first]):
        raise ReshardError(
            f"{where}: {first} is of {len(kinds[first])} layers, but num_hidden_layers is {layers!r:.20}: correct the "
            f"one that is wrong"
        )
    if "mamba" not in kinds[first]:
        raise ReshardError(
            f"{where}: {first} has no Mamba layer, without which Megatron's pattern is another family's"
        )
    return kinds[first]


def pattern_fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config field for the pattern of a HybridModel's args."""
    return {"hybrid_override_pattern": args["hybrid_layer_pattern"]}
