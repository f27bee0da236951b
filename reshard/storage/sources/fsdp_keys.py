"""Which keys of a checkpoint of ``torch.distributed.checkpoint`` are a model's weights.

A trainer saves its state dicts in one: the model's, under a name that it chooses, the optimizer's beside it, and
whatever else it resumes from. The model's keys are the names of its parameters in memory.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from reshard.core.errors import ReshardError, listed
from reshard.models.model import Model
from reshard.storage.sources.spellings import published_names

# What the names of a trainer's other states begin with, where its weights begin with nothing.
OTHER_STATES = (
    "optimizer", "optimizers", "optim", "opt", "state", "param_groups", "lr_scheduler", "lr_schedulers", "scheduler",
    "dataloader", "train_state", "rng", "rng_state",
)  # fmt: skip
_OF_OPTIMIZER = re.compile(r"(?:^|\.)(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)(?:\.|$)")
# Roots under which an average, or weights in fp32, may lie beside the weights.
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_ADAPTER = re.compile(
    r"\.lora_[AB]\b|\.lora_(?:embedding|magnitude)|\.base_layer\.|\bprompt_encoder\."
    r"|\.modules_to_save\.|\.original_module\."
)


class Weights(NamedTuple):
    """The keys of a model's weights, by the names of its parameters, which follow `prefix` in them, and how many
    entries of which other states are `left`."""

    prefix: str
    keys: dict[str, str]
    left: dict[str, int]


def weights_among(keys: Iterable[str], objects: Iterable[str], model: Model, where: object) -> Weights:
    """Find the weights of a model among the keys of a checkpoint's tensors. Raises ReshardError, with what to do, if
    there are none, or those of two models."""
    keys = list(keys)
    found = _prefixes(keys, model)
    if not found:
        raise ReshardError(f"{where} {_why_none(keys, model)}")
    if len(found) > 1:
        found = {prefix for prefix in found if prefix.partition(".")[0] not in _OPTIMIZERS}
    elif next(iter(found)).partition(".")[0] in _OPTIMIZERS:
        raise ReshardError(
            f"{where} has states of an optimizer only ({min(found)}*): name the directory of the weights"
        )
    if len(found) != 1:
        names = listed([repr(prefix) for prefix in sorted(found)], 3)
        raise ReshardError(
            f"{where} has the weights of several models, under {names}: save the one that you mean in a checkpoint of "
            "its own"
        )
    [prefix] = found
    own = _under(keys, prefix)
    adapters = [key for key in keys if _ADAPTER.search(key) and not _OF_OPTIMIZER.search(key)]
    if adapters:
        raise ReshardError(
            f"{where} has a model with an adapter of PEFT on it ({adapters[0]}): save it after merge_and_unload(), or "
            "save the adapter with its save_pretrained and merge that with reshard lora-merge"
        )
    taken = {*own.values()}
    left = Counter(_root(key, prefix) for key in (*keys, *objects) if key not in taken)
    return Weights(prefix, own, dict(left))


def _prefixes(keys: list[str], model: Model) -> set[str]:
    """Return what the names of the model's parameters follow, for each set of them."""
    first, needed = _names(model)
    found: set[str] = set()
    for key in keys:
        passing = (prefix for prefix in _possible(key, first) if not _lacks(keys, prefix, needed, model))
        found |= {prefix for prefix in [next(passing, None)] if prefix is not None}
    return found


def _possible(key: str, first: set[str]) -> list[str]:
    """Return what the names of a model's parameters may follow if this is the key of its first one, the shortest
    first; nothing if it cannot be."""
    parts = key.split(".")
    if _OF_OPTIMIZER.search(key) or not any(parts[-2:] == name.split(".")[-2:] for name in first):
        return []
    return [".".join((*parts[:n], "")) if n else "" for n in range(len(parts) - 1)]


def _names(model: Model) -> tuple[set[str], list[str]]:
    """Return the names that the first parameter of a model may have, and published ones without which it is none."""
    saved = getattr(model.family, "saved", None)
    if saved is not None:
        needed = sorted({part.parameter for tensor in saved.values() for part in tensor.parts})
        return {needed[0]}, needed
    needed = [f"{model.published_name(module)}.weight" for _, module, _ in model.family.ends]
    needed = needed[:2] if model.tied else needed
    in_memory = {name for name, published in model.names_in_memory().items() if published == needed[0]}
    return {needed[0], *in_memory}, needed


def _lacks(keys: list[str], prefix: str, needed: list[str], model: Model) -> list[str]:
    """Return which of the names that a model needs do not follow a prefix."""
    names = _under(keys, prefix)
    has_table = getattr(model.family, "saved", None) is None
    has = {*published_names(names, model).values()} if has_table else names.keys()
    return [name for name in needed if name not in has]


def _under(keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the keys that begin with a prefix, by what follows it, without other states."""
    names = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
    return {name: key for name, key in names.items() if name.partition(".")[0] not in OTHER_STATES}


def _root(key: str, prefix: str) -> str:
    """Return the beginning of a key by which it differs from those of the weights."""
    parts, own = key.split("."), prefix.split(".")
    common = next((n for n, (a, b) in enumerate(zip(parts, own, strict=False)) if a != b), 0)
    return ".".join(parts[: common + 1])


def _why_none(keys: list[str], model: Model) -> str:
    """Return why these are no weights of the model, and what to do."""
    if any(key.endswith("tok_embeddings.weight") for key in keys):
        return (
            "has torchtitan's own names, whose rows of queries and keys may be in another order: convert it with "
            "torchtitan's scripts/checkpoint_conversion/convert_to_hf.py, or save it with "
            "checkpoint.last_save_in_hf"
        )
    if any("_flat_param" in key for key in keys):
        return (
            "has flattened parameters of FSDP1 (_flat_param), which do not say whose they are: save it with "
            "StateDictType.SHARDED_STATE_DICT"
        )
    if keys and all(_OF_OPTIMIZER.search(key) or key.startswith(("state.", "param_groups.")) for key in keys):
        return f"has states of an optimizer only ({keys[0]}): name the directory of the weights"
    if any(_ADAPTER.search(key) for key in keys):
        return (
            f"has a model with an adapter of PEFT on it ({next(key for key in keys if _ADAPTER.search(key))}): save it "
            "after merge_and_unload(), or save the adapter with its save_pretrained"
        )
    first, needed = _names(model)
    lacking = [_lacks(keys, prefix, needed, model) for key in keys for prefix in _possible(key, first)]
    fewest = min(lacking, key=len, default=needed)
    if len(fewest) < len(needed):
        return f"lacks {listed(fewest, 3)} of {model.family.architecture}'s tensors ({model.where})"
    return (
        f"holds no {listed(sorted(first), 2)}, by which the weights of {model.family.architecture} "
        f"({model.where}) are found: it has {listed(sorted(keys), 3) or 'no tensors'}"
    )
