"""The weights that an engine's rank serves, as a holder: what is common to writing and to reading them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Placement
from reshard.device.cuda import device_of_process
from reshard.device.memory import Region
from reshard.models.model import Model, different_fields
from reshard.models.without_table import any_model, check_tower
from reshard.refit.guard import Guard
from reshard.refit.holder import Holder

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Scales(NamedTuple):
    """The scales of a local tensor ``[rows, columns]`` whose region holds codes in blocks.

    `region` holds the fp32 scale of each block, in rows and columns of blocks, the last cut off where the tensor ends;
    `rounding` names how these are rounded (`reshard.refit.codecs.BlockCodec`).
    """

    region: Region
    rounding: str


class ServedWeights(Holder):
    """The weights of one rank of an engine: which boxes of canonical tensors it serves, and from where.

    Ids of local tensors are the keys of `regions`, whose order does not change; if a tensor has moved, `regions` and
    `scales` are other mappings, and if it holds other boxes, `placement` is another one, so that this is seen. As the
    source of a refit it is read while it serves, so it has to hold whole weights as they were published, not quantized.
    """

    hf_config: dict[str, Any]
    placement: Placement
    regions: Mapping[Any, Region]
    guard: Guard

    # Quantized local tensors, by id: where their scales lie, and how these are rounded.
    scales: Mapping[Any, Scales] = NOTHING
    # Local tensors that only pass through their regions, by id: the index of their round. The
    # regions of all rounds may be the same memory.
    staged_rounds: Mapping[Any, int] = NOTHING

    # The tensors of `written_tensors`, behind the mappings that they are of.
    _written: tuple[Mapping[Any, Region], Mapping[Any, Scales], list[torch.Tensor]] | None = None

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes; where it holds no tensor, that of its process, as all members have to
        compute on one kind."""
        return next((region.tensor.device for region in self.regions.values()), device_of_process())

    @property
    def memory(self) -> list[Region]:
        return list(self.regions.values())

    def written_regions(self) -> list[Region]:
        """Return all that a refit writes into: the regions, and those of the scales."""
        return [*self.regions.values(), *(scales.region for scales in self.scales.values())]

    def transposes(self) -> Mapping[Any, Region]:
        """Return, by id, the regions of local tensors whose transposes are served: each has a row for each column."""
        return NOTHING

    def not_as_published(self) -> list[str]:
        """Return the names of local tensors that do not hold what was published: they are quantized, or only
        pass through."""
        return [_name(identity) for identity in {**self.scales, **self.staged_rounds}]

    def refresh_regions(self) -> None:
        """Update `regions` and `scales` for tensors that the engine has moved, and `placement` where it has put other
        weights into them, as it does with experts.

        Called at connect and before each refit. Raises ReshardError if a tensor has no memory, or
        another layout than at connect.
        """

    def written_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a refit writes into, each once."""
        if (
            self._written is None
            or self._written[0] is not self.regions
            or self._written[1] is not self.scales
        ):
            tensors = {id(region.tensor): region.tensor for region in self.written_regions()}
            self._written = self.regions, self.scales, [*tensors.values()]
        return self._written[2]

    def written_addresses(self) -> list[int]:
        """Return the addresses now of the tensors that a refit writes into."""
        return list(map(torch.Tensor.data_ptr, self.written_tensors()))

    # As the source of a refit

    def publish(self, model: Model) -> list[LocalTensor]:
        """Return the placement, as the engine's own loader gave it."""
        self.check_as_published()
        return [
            self.placement.tensors[identity]._replace(id=index) for index, identity in enumerate(self.regions)
        ]

    def held_still(self) -> "ServedWeights":
        """Return this rank's weights as a source that another thread may read while the engine serves. Raises
        ReshardError if the engine may move them unseen."""
        return self

    def check_as_published(self) -> None:
        """Raise ReshardError if what this rank serves was quantized."""
        if others := self.not_as_published():
            raise ReshardError(
                f"{self.guard.engine} serves {len(others)} tensors as something else than what was published "
                f"({listed(others, 2)}), which no refit reads: give a trainer, or an engine without quantization"
            )

    def check_model(self, model: Model) -> None:
        """Raise ReshardError if the published config that the engine serves is of another model."""
        own = any_model(self.hf_config, f"{self.guard.engine}'s config")
        check_tower(self.hf_config, model, own.where)
        for name, (ours, theirs) in different_fields(own, model).items():
            raise ReshardError(
                f"{own.where} has {name} {ours}, but the served model's is {theirs} ({model.where})"
            )

    def name_of(self, index: int) -> str:
        """Return the engine's own name of a region's tensor."""
        return _name([*self.regions][index])

    def check_current(self) -> None:
        """Raise ReshardError unless this rank holds whole weights."""
        if not self.guard.ready:
            raise ReshardError(
                f"this {self.guard.engine} holds {self.guard.reason}, and nothing is read from it: refit it first"
            )

    def addresses(self) -> list[int]:
        """Return the addresses now, after following what the engine has moved."""
        self.refresh_regions()
        return super().addresses()


def _name(identity: Any) -> str:
    """Return the parameter's name in an id, which may have more beside it."""
    return str(identity[0] if isinstance(identity, tuple) else identity)
