"""Layers that attend to the tokens which the indexer of an earlier layer has chosen, as configs and
Megatron's arguments say it."""

from typing import Any

from reshard.core.errors import ReshardError
from reshard.models.config_fields import whole_number
from reshard.models.numerics_args import indexer_pattern

LETTERS = {"F": "full", "S": "shared"}


def indexer_layers(config: dict[str, Any], where: str) -> list[int]:
    """Return a 1 for each layer that has an indexer, and a 0 for each that shares one.

    Raises ReshardError if the fields disagree, as transformers and vLLM read different ones, or
    if Megatron has no arguments for it.
    """
    layers = int(config["num_hidden_layers"])
    patterns = {}
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types is not None:
        patterns["indexer_types"] = _pattern(types, layers, f"{where}: indexer_types")
    if pattern is not None:
        patterns["index_topk_pattern"] = _pattern(pattern, layers, f"{where}: index_topk_pattern")
    elif config.get("index_topk_freq") is not None or not patterns:
        patterns["index_topk_freq"] = _by_frequency(config, layers, where)
    (name, layers_with_indexer), *others = patterns.items()
    for other, different in others:
        if different != layers_with_indexer:
            raise ReshardError(
                f"{where}: {name} and {other} disagree about the layers that have an indexer: correct the "
                "one that is wrong"
            )
    if not layers_with_indexer[0]:
        raise ReshardError(f"{where}: {name} gives the first layer no indexer, and none is before it")
    frequency, offset = _arguments(layers_with_indexer)
    if indexer_pattern(frequency, offset, layers) != layers_with_indexer:
        raise ReshardError(
            f"{where}: {name} has indexers at no regular distance, and Megatron's --dsa-indexer-topk-freq "
            "takes only that"
        )
    return layers_with_indexer


def sharing_args(config: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments for the layers of a config that share an indexer; empty without any."""
    frequency, offset = _arguments(indexer_layers(config, "config.json"))
    return (
        {"dsa_indexer_topk_freq": frequency, "dsa_indexer_skip_topk_offset": offset} if frequency > 1 else {}
    )


def sharing_fields(args: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields for such arguments: the inverse of `sharing_args`."""
    frequency, offset = args.get("dsa_indexer_topk_freq") or 1, args.get("dsa_indexer_skip_topk_offset") or 0
    return {"index_topk_freq": frequency, "index_skip_topk_offset": max(offset, 1)} if frequency > 1 else {}


def _by_frequency(config: dict[str, Any], layers: int, where: str) -> list[int]:
    frequency, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    if not whole_number(frequency) or not whole_number(offset, 0):
        raise ReshardError(
            f"{where}: index_topk_freq is {frequency!r:.60} and index_skip_topk_offset {offset!r:.60}, "
            f"which are not whole numbers"
        )
    return [int(max(layer - offset + 1, 0) % frequency == 0) for layer in range(layers)]


def _pattern(types: Any, layers: int, where: str) -> list[int]:
    if not isinstance(types, (list, str)) or len(types) != layers:
        raise ReshardError(f"{where} is {types!r:.60}, which has no entry for each of {layers} layers")
    words = [LETTERS.get(word, word) if isinstance(word, str) else word for word in types]
    strange = [word for word in words if word not in LETTERS.values()]
    if strange:
        raise ReshardError(f"{where} has {strange[0]!r:.60}, which is neither full nor shared")
    return [int(word == "full") for word in words]


def _arguments(layers_with_indexer: list[int]) -> tuple[int, int]:
    """Return frequency and offset of the layers with an indexer; (1, 0) where all have one."""
    if all(layers_with_indexer):
        return 1, 0
    offset = layers_with_indexer.index(0)
    later = layers_with_indexer[offset:]
    return (later.index(1) if 1 in later else len(later)) + 1, offset
