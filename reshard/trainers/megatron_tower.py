"""The check of a tower in a live Megatron model against the one that is served, saved or loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.megatron.towers import HOLDERS
from reshard.models.model import Model
from reshard.models.numerics_args import same_value
from reshard.models.towers import TAKES_TOWER, TOWERS, vision_of
from reshard.models.without_table import different_towers

# By the activation that a config names: the function, and its arguments.
_ACTIVATIONS = {
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "gelu": ("gelu", {}),
    "silu": ("silu", {}),
}


def check_towers(chunk: torch.nn.Module, model: Model) -> None:
    """Raise ReshardError, with both values, if the tower of a chunk computes something else than the one that `model`
    takes; of a chunk without one, as of all stages but the first, nothing is said."""
    theirs = model.config.get(TAKES_TOWER)
    if theirs is None or not model.family.tower:
        return
    kind = TOWERS[model.family.tower]
    needed = {name for name, default in kind.sizes.values() if default is None}
    for name, tower in _towers_of(chunk):
        described = False
        for config in _configs_of(chunk, tower, theirs, needed):
            described = True
            for field, (own, other) in different_towers(config, theirs, kind).items():
                raise _different(f"{name}: {field}", own, other, model)
        settings = getattr(tower, "config", None)
        if hasattr(settings, "num_layers"):
            described = True
            _check_layers(name, settings, model)
        if not described:
            raise ReshardError(
                f"the trainer's {name} has no config by which to tell whether it computes what that of {model.where} "
                f"does: give it transformers' as `config`"
            )


def _towers_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a chunk that are towers, by name, the innermost of those that a trainer may have."""
    found: dict[str, torch.nn.Module] = {}
    for name in (own.rstrip(".") for holder in HOLDERS for own, _ in holder.names):
        module: Any = chunk
        for part in name.split("."):
            module = getattr(module, part, None)
        if isinstance(module, torch.nn.Module) and not any(other.startswith(f"{name}.") for other in found):
            found[name] = module
    yield from found.items()


def _configs_of(
    chunk: Any, tower: Any, theirs: Mapping[str, Any], needed: set[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the configs of larger models that a trainer has of its own: the whole one of mcore-bridge, and those that
    the tower was made of, in place of what the config says that it is compared with."""
    for holder in (getattr(chunk, "visual", None), getattr(chunk, "config", None)):
        whole = _fields(getattr(holder, "hf_config", None))
        if whole is not None:
            yield whole
            break
    of_chunk = getattr(getattr(chunk, "config", None), "vision_config", None)
    for config in (
        getattr(tower, "config", None),
        getattr(chunk, "vision_transformer_config", None),
        of_chunk,
    ):
        vision = _fields(config)
        if vision is not None and needed <= vision.keys():
            yield {**theirs, "vision_config": vision}


def _fields(config: Any) -> dict[str, Any] | None:
    """Return the fields of a config of transformers; None for what is none."""
    return config.to_dict() if hasattr(config, "to_dict") and hasattr(config, "model_type") else None


def _check_layers(name: str, settings: Any, model: Model) -> None:
    """Raise ReshardError if Megatron's layers of a tower have other settings than the served one's config says."""
    tower, vision = TOWERS[model.family.tower], vision_of(model.config[TAKES_TOWER])
    defaults = dict(tower.sizes.values())
    expected = {field: vision.get(of, defaults.get(of)) for field, of in tower.megatron.items()}
    for field, value in (expected | dict(tower.always)).items():
        own = getattr(settings, field, None)
        if value is None and isinstance(own, list):
            value = []
        if not same_value(own, value):
            raise _different(f"{name}: {field}", own, value, model)
    activation = getattr(settings, "activation_func", None)
    called = getattr(activation, "func", activation)
    own = getattr(called, "__name__", str(called)), dict(getattr(activation, "keywords", {}))
    named = vision.get("hidden_act", "gelu_pytorch_tanh")
    if own != _ACTIVATIONS.get(named):
        raise _different(f"{name}: activation_func", own, named, model)


def _different(what: str, own: object, other: object, model: Model) -> ReshardError:
    known = (
        "" if None not in (own, other) else ", or write it into the config that lacks it if it means the same"
    )
    return ReshardError(
        f"the trainer's {what} is {own!r:.80}, but that of {model.where} is {other!r:.80}: it would be another tower; "
        f"train and serve the same one{known}"
    )
