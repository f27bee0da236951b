"""The scales of the LoRA modules of Megatron-Bridge, mcore-bridge and PEFT, and a check that nothing else is
trained."""

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.lora.scale import Scale
from reshard.trainers.adapter_names import is_of_adapter

WHERE = "the trainer's adapter"


class Alpha(NamedTuple):
    """The numerator of an adapter's scale, and whether its denominator is the rank's square root."""

    alpha: float
    rslora: bool


def alpha_of(module: Any) -> Alpha | None:
    """Return what an adapter module multiplies by; None of any other module.

    Raises ReshardError if it is neither alpha / rank nor alpha / sqrt(rank).
    """
    if hasattr(module, "linear_in") and hasattr(module, "linear_out") and hasattr(module, "alpha"):
        return Alpha(float(module.alpha), False)  # Megatron-Bridge: always alpha / dim
    if not getattr(module, "lora_A", None) or not getattr(module, "scaling", None):
        return None
    name = next(iter(module.lora_A))
    alpha, rank, factor = float(module.lora_alpha[name]), module.r[name], module.scaling[name]
    for rslora in (False, True):
        if Scale(rank, alpha, rslora).factor == factor:
            return Alpha(_of_held_rank(alpha, rank, module, name, rslora), rslora)
    raise ReshardError(
        f"{WHERE} multiplies by {factor:g} at rank {rank} and alpha {alpha:g}, which is neither alpha / rank nor "
        f"alpha / sqrt(rank): a scale that was set by hand is not refitted"
    )


def _of_held_rank(alpha: float, rank: int, module: Any, name: str, rslora: bool) -> float:
    """Return the numerator that gives a module's factor over the rank that its A has: ROLL's experts have fewer
    rows than the rank that they divide by. PEFT's A of all experts in one tensor has those of each."""
    matrix = module.lora_A[name]
    weight = getattr(matrix, "weight", None)
    held = (weight if weight is not None else matrix.weight0).shape[-2] // getattr(module, "num_experts", 1)
    return alpha if held == rank else Scale(rank, alpha, rslora).factor * (sqrt(held) if rslora else held)


# PEFT's variants that are B @ A: they differ in training alone.
_PLAIN_VARIANTS = ("MiCALinearVariant", "VeloraLinearVariant")


def _of_wrapper(module: Any) -> str:
    """Return what a module of Megatron-Bridge around a layer and its adapter does besides adding B @ A; nothing of
    another module."""
    return "is disabled" if not getattr(module, "_adapter_enabled", True) else ""


def _of_adapter(module: Any) -> str:
    """Return what an adapter module does other than adding its B @ A to a layer's output; nothing if that is all."""
    if hasattr(module, "linear_in"):
        activation = getattr(module, "activation", None)
        plain = activation is None or isinstance(activation, torch.nn.Identity)
        return "" if plain else f"has {type(activation).__name__} between A and B"
    names = list(module.lora_A)
    if len(names) > 1:
        return f"is one of {len(names)} ({listed(names)}), of which one at a time is refitted"
    if getattr(module, "merged", False):
        return "is merged into the base's weights"
    if getattr(module, "disable_adapters", False):
        return "is disabled"
    if names[0] not in getattr(module, "active_adapters", names):
        return f"({names[0]}) is not the active one"
    variant = type(getattr(module, "lora_variant", {}).get(names[0])).__name__
    return "" if variant in ("NoneType", *_PLAIN_VARIANTS) else f"is a {variant.removesuffix('Variant')}"


class Factors:
    """The adapter modules of these models, and the factors that they have now.

    Raises ReshardError for one that adds something else than its B @ A, or nothing at all.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        named = [each for model in models for each in model.named_modules()]
        self._wrappers = [(name, module) for name, module in named if hasattr(module, "_adapter_enabled")]
        self._modules: list[tuple[str, Any]] = [(name, module) for name, module in named if alpha_of(module)]
        modules = [module for _, module in self._modules]
        # Hundreds are checked before every refit: what leads to a factor is found once.
        self._bridge = [(m, m.alpha / m.dim) for m in modules if hasattr(m, "linear_in")]
        self._peft = [
            (m.scaling, name, m.scaling[name])
            for m in modules
            if not hasattr(m, "linear_in")
            for name in [next(iter(m.lora_A))]
        ]
        self._check_plain()

    def check(self) -> None:
        """Raise ReshardError if one has changed since, or adds something else than B @ A now."""
        self._check_plain()
        for module, factor in self._bridge:
            _check_factor(module.alpha / module.dim, factor)
        for scaling, name, factor in self._peft:
            _check_factor(scaling[name], factor)

    def _check_plain(self) -> None:
        for say, modules in ((_of_wrapper, self._wrappers), (_of_adapter, self._modules)):
            for name, module in modules:
                what = say(module)
                if what:
                    raise ReshardError(
                        f"{WHERE} of {name} {what}: a refit would make plain W + scale * B @ A of it, which "
                        "is another model"
                    )


def _check_factor(now: float, then: float) -> None:
    if now != then:
        raise ReshardError(
            f"{WHERE} multiplies by {now:g} now, and by {then:g} when it was connected: connect again"
        )


def check_frozen(models: Iterable[torch.nn.Module]) -> None:
    """Raise ReshardError if parameters beside the adapter are trained, which would not reach the engine."""
    trained = [name for name in _trained(models) if not is_of_adapter(name)]
    if trained:
        raise ReshardError(
            f"the trainer trains {len(trained)} parameters beside its adapter ({listed(trained, 3)}), which would "
            f"not reach the engine: freeze them, or connect without adapter="
        )


def _trained(models: Iterable[torch.nn.Module]) -> Iterator[str]:
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name


def without_adapter_error(where: str, names: Iterable[str]) -> ReshardError:
    """Return the error for a refit of the weights alone of a model that has an adapter."""
    return ReshardError(
        f"{where} has LoRA adapters ({listed(sorted(names), 2)}), which a refit of the weights leaves out: "
        f"connect with adapter='NAME', the name by which vLLM serves them"
    )
