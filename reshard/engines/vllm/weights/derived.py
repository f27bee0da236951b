"""Tensors that vLLM makes of weights and keeps beside them: the matrices of latent attention (MLA), fp32 copies of
sinks, and ``A`` of Mamba layers."""

from collections.abc import Mapping

import torch

from reshard.engines.vllm.weights.mamba import Decay, decays, load_decay, stale_decay
from reshard.engines.vllm.weights.mla import (
    DerivingAttention,
    derive_in_place,
    derived_tensors,
    deriving_attentions,
    stale_matrices,
)
from reshard.engines.vllm.weights.served import Served
from reshard.engines.vllm.weights.sinks import WidenedSinks, are_stale, widen_in_place, widened_sinks


class DerivedWeights:
    """The derived tensors of a model, by the names of their layers. None until it has looked for them."""

    def __init__(self) -> None:
        self.attentions: dict[str, DerivingAttention] = {}
        self.sinks: dict[str, WidenedSinks] = {}
        self.decays: dict[str, Decay] = {}

    def find(self, model: Served, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look for them, also once vLLM has put others in their places. Decays keep their logarithms."""
        self.decays = decays(model, self.decays)
        self.attentions = deriving_attentions(model)
        self.sinks = widened_sinks(model, tensors)

    def logarithms(self) -> dict[str, torch.Tensor]:
        """Return what a refit writes in place of decays, by their names."""
        return {name: decay.log for name, decay in self.decays.items()}

    def update(self, tp: int) -> None:
        """Let vLLM derive all from the weights that it has now, where they are; `tp` ranks split a layer."""
        for attention in self.attentions.values():
            derive_in_place(attention)
        for widened in self.sinks.values():
            widen_in_place(widened)
        for decay in self.decays.values():
            load_decay(decay, tp)

    def stale(self, tp: int) -> list[str]:
        """Return the names of tensors that are not what vLLM derives from the weights that it has now."""
        matrices = [
            f"{name}.{key}"
            for name, attention in self.attentions.items()
            for key in stale_matrices(attention)
        ]
        sinks = [f"{name}.sinks" for name, widened in self.sinks.items() if are_stale(widened)]
        return matrices + sinks + self.stale_decays(tp)

    def stale_decays(self, tp: int) -> list[str]:
        """Return the names of decays that are not what vLLM's loader makes of their logarithms."""
        return [name for name, decay in self.decays.items() if stale_decay(decay, tp)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are no parameters, and the logarithms of decays, by name."""
        tensors = {
            f"{name}.{key}": tensor
            for name, attention in self.attentions.items()
            for key, tensor in derived_tensors(attention.module).items()
        }
        tensors |= {f"{name}.sinks in fp32": sinks.widened for name, sinks in self.sinks.items()}
        return tensors | {f"{name} as its logarithm": log for name, log in self.logarithms().items()}
