"""The scales of the LoRA modules of Megatron-Bridge, mcore-bridge and PEFT, and a check that nothing else is
trained."""

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.lora.scale import Scale
from reshard.megatron.checkpoint import ADAPTER

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


class Factors:
    """The factors of the adapter modules of these models, as they are now."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        modules: list[Any] = [module for model in models for module in model.modules() if alpha_of(module)]
        # Hundreds are checked before every refit: what leads to a factor is found once.
        self._bridge = [(m, m.alpha / m.dim) for m in modules if hasattr(m, "linear_in")]
        self._peft = [
            (m.scaling, name, m.scaling[name])
            for m in modules
            if not hasattr(m, "linear_in")
            for name in [next(iter(m.lora_A))]
        ]

    def check(self) -> None:
        """Raise ReshardError if one has changed since."""
        for module, factor in self._bridge:
            _check_factor(module.alpha / module.dim, factor)
        for scaling, name, factor in self._peft:
            _check_factor(scaling[name], factor)


def _check_factor(now: float, then: float) -> None:
    if now != then:
        raise ReshardError(
            f"{WHERE} multiplies by {now:g} now, and by {then:g} when it was connected: connect again"
        )


def check_frozen(models: Iterable[torch.nn.Module]) -> None:
    """Raise ReshardError if parameters beside the adapter are trained, which would not reach the engine."""
    trained = [name for name in _trained(models) if not ADAPTER.search(name)]
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
