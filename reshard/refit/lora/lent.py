"""An adapter that an engine serves, as the source of refits of other engines."""

from collections.abc import Callable, Mapping, Sequence

import torch

from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.lora.scale import Scale
from reshard.models.model import Model
from reshard.refit.holder import Holder
from reshard.refit.lora.scales import encode_scales


class LentAdapter(Holder):
    """A copy of what one rank of an engine serves of a `version` of an adapter, of this `origin`
    (`reshard.refit.options.ConnectOptions`): whatever the engine takes meanwhile, this stays.

    `held` are the matrices with their places in the copy, B times its scale as the engine has it: so the scales that
    go with them are 1, by the rank of each published weight's adapter in `ranks`.
    """

    def __init__(
        self,
        version: int,
        origin: str,
        held: Sequence[tuple[LocalTensor, Region]],
        ranks: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.version, self.origin, self.ranks, self._device = version, origin, ranks, device
        self._tensors = [tensor._replace(id=index) for index, (tensor, _) in enumerate(held)]
        self._regions = [region for _, region in held]
        self.check_below: Callable[[], None] = lambda: (
            None
        )  # raises ReshardError once the weights below have changed

    @property
    def memory(self) -> list[Region]:
        return self._regions

    @property
    def device(self) -> torch.device:
        """The device of the copy."""
        return self._device

    def publish(self, model: Model) -> list[LocalTensor]:
        """Return what the copy holds."""
        return self._tensors

    def facts(self) -> bytes:
        """Return the scales."""
        return encode_scales({weight: Scale(rank, float(rank)) for weight, rank in self.ranks.items()})

    def check_model(self, model: Model) -> None:
        """Nothing: the connection of the weights below has compared the models."""

    def check_current(self) -> None:
        """Raise ReshardError once anything may have written into the weights below, with which it belongs."""
        self.check_below()

    def name_of(self, index: int) -> str:
        """Return the published name of a matrix."""
        return self._tensors[index].parts[0].name
