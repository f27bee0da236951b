"""The config of a chain's base: a chain has weights only, and what `apply` writes has that config. So the versions of a
chain are of one model by their configs, too."""

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from reshard.core.errors import ReshardError
from reshard.delta.manifests import Base
from reshard.megatron.configs import config_differences
from reshard.megatron.towers import takes_tower
from reshard.models.config_fields import ignored_config_fields
from reshard.models.model import Model, different_fields, why_named_otherwise
from reshard.models.published import own_fields
from reshard.models.without_table import any_model, different_beside
from reshard.storage.sources.base import Source, read_config
from reshard.storage.sources.opening import read_model


def check_same_config(old: Model, new: Model, old_name: str, new_name: str) -> None:
    """Raise ReshardError if two checkpoints, or a trainer's model, of the same tensors are two models by their
    configs."""
    for name, (had, has) in _differences(old, new).items():
        raise ReshardError(
            f"{new_name} is not a new version of {old_name}: its config has {name} {has!r:.80}, and had "
            f"{had!r:.80}; begin a new chain, with {new_name} as its base"
        )


def _differences(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    have_tables = a.family.has_megatron_names and b.family.has_megatron_names
    return (config_differences if have_tables else different_fields)(a, b) | different_beside(a, b)


def check_named_alike(
    old: tuple[Model, Collection[str]], new: tuple[Model, Collection[str]], old_name: str, new_name: str
) -> None:
    """Raise ReshardError if two models, with the names of their tensors, have other names since their configs were
    read in two ways."""
    why = why_named_otherwise(old[0], new[0])
    if why and {*old[1]} != {*new[1]}:
        raise ReshardError(f"{new_name} cannot be compared with {old_name}: {why}")


def recorded(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return what a base says of its config (the fields of `Base`), which was read as this model."""
    kept = json.loads(json.dumps(own_fields(config), default=str))  # a config in memory may have dtypes
    return {"config": kept, "ignored_config_fields": sorted(model.ignored)}


def recorded_of_source(source: Source) -> dict[str, Any]:
    """Return the same of a checkpoint; nothing of a Megatron one that has no published config."""
    path = source.hf_files().get("config.json")
    return {} if path is None else recorded(read_config(path), source.model)


def check_config_of_chain(base: Base, model: Model, name: str, chain: str) -> None:
    """Raise ReshardError if a model is another one, by its config, than the base of a chain: by what the chain says of
    that, or, of a chain that is older than that, by the base's directory where it is there."""
    begun, begun_name = model_of_base(base, chain), f"the base of {chain}"
    if begun is None and os.path.isdir(base.name):
        with suppress(ReshardError):  # something else may lie there by now
            begun, begun_name = read_model(base.name), base.name
    if begun is not None:
        check_same_config(begun, model, begun_name, name)


def check_config_of_base(base: Base, model: Model, name: str, chain: str) -> None:
    """Raise ReshardError if what is given as the base of a chain is another model by its config than what the chain
    says of that."""
    begun = model_of_base(base, chain)
    for field, (had, has) in (_differences(begun, model) if begun else {}).items():
        raise ReshardError(
            f"{name} is not the base of {chain}: its config has {field} {has!r:.80}, and the chain was begun with "
            f"{had!r:.80}; give the checkpoint with which it was begun ({base.name})"
        )


def model_of_base(base: Base, chain: str) -> Model | None:
    """Return the model of a base by what the chain says of its config; None if it says nothing."""
    if base.config is None:
        return None
    with ignored_config_fields(*base.ignored_config_fields, recorded=True):
        return takes_tower(any_model(base.config, f"the config in {chain}/base.json"), base.config)
