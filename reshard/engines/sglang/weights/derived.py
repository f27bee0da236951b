"""Tensors that SGLang makes of weights and keeps beside them: the matrices that latent attention (MLA)
splits ``kv_b_proj`` into, copies of a router's weights in fp32, and a norm's weights with 1 added."""

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import same_bits
from reshard.engines.sglang import compat
from reshard.engines.sglang.compat import OF_ATTENTION, OF_NORM, OF_ROUTER


class DerivedTensors:
    """The derived tensors of a model. It looks for the modules that have some once: each refit makes them anew,
    and to look at all modules takes as long as a small refit."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.places: list[tuple[str, torch.nn.Module, str]] = []
        for path, module in model.named_modules():
            others = [key for key in (OF_ROUTER, OF_NORM) if hasattr(module, key)]
            keys = OF_ATTENTION if hasattr(module, "kv_b_proj") else others
            self.places += [(f"{path}.{key}", module, key) for key in keys]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the derived tensors by name, as far as the model has made them."""
        named = ((name, getattr(module, key, None)) for name, module, key in self.places)
        return {name: tensor for name, tensor in named if isinstance(tensor, torch.Tensor)}

    def numbers(self) -> dict[str, str]:
        """Return what the model has derived that is no tensor, by name, as text."""
        named = ((name, getattr(module, key, None)) for name, module, key in self.places)
        return {name: repr(value) for name, value in named if isinstance(value, int | float)}

    def update(self) -> None:
        """Make them anew, where they are: CUDA graphs hold their addresses.

        Raises ReshardError if SGLang puts one elsewhere.
        """
        before = self.tensors()
        compat.derive(self.model)
        with torch.no_grad():
            for name, module, key in self.places:
                if name in before and key == OF_ROUTER:
                    before[name].copy_(module.weight)  # type: ignore[arg-type]
                elif name in before and key == OF_NORM:
                    torch.add(module.weight, 1.0, out=before[name])  # type: ignore[arg-type]
        after = self.tensors()
        moved = [name for name, tensor in before.items() if after[name].data_ptr() != tensor.data_ptr()]
        if moved:
            raise ReshardError(
                f"SGLang puts {moved[0]} elsewhere when it derives it once more: connect again"
            )

    def stale(self) -> list[str]:
        """Make them anew, and return the names of those that were different before."""
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        self.update()
        after = self.tensors()
        return [name for name, tensor in before.items() if not same_bits(tensor, after[name])]
