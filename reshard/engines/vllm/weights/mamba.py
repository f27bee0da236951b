"""What vLLM's loader computes while it loads a Mamba layer: ``A`` of the published ``A_log``.

A refit writes ``A_log`` into a tensor of its own, and vLLM's loader makes ``A`` of that.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reshard.device.memory import same_bits
from reshard.engines.vllm.layers import decays_of
from reshard.engines.vllm.weights.served import Served


class Decay(NamedTuple):
    """The parameter ``A`` of a Mamba layer, and the `log` of it that a refit writes."""

    parameter: Any
    log: torch.Tensor


def decays(model: Served, before: Mapping[str, Decay]) -> dict[str, Decay]:
    """Return the Mamba layers' ``A`` by name, with the logarithms that they had `before`."""
    named = {f"{name}.A": decays_of(module) for name, module in model.named_modules}
    return {
        name: before[name]._replace(parameter=parameter)
        if name in before
        else Decay(parameter, torch.zeros_like(parameter.data))
        for name, parameter in named.items()
        if parameter is not None
    }


def load_decay(decay: Decay, tp: int, into: Any = None) -> None:
    """Let vLLM's loader make ``A`` of what a refit has written. It takes the part of this one of `tp` ranks,
    which is the same from wherever it is taken. It is given one in host memory, as of a file: of Mamba-1 it computes
    before it copies, and a GPU rounds an exponential otherwise."""
    parameter = decay.parameter if into is None else into
    with torch.no_grad():
        decay.parameter.weight_loader(parameter, decay.log.cpu().repeat(tp, *(1,) * (decay.log.ndim - 1)))


def stale_decay(decay: Decay, tp: int) -> bool:
    """Return True if ``A`` is not what vLLM's loader makes of what a refit has written."""
    fresh = torch.nn.Parameter(torch.empty_like(decay.parameter), requires_grad=False)
    load_decay(decay, tp, fresh)
    return not same_bits(fresh.data, decay.parameter.data)
