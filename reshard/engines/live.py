"""What engines have in common whose model is a torch module of this process: its tensors by name, and
following them when the engine replaces or moves them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.engines.placing.accounts import Account, summary
from reshard.engines.placing.turned import TurnedMatrices
from reshard.refit.engine import Engine


class LiveEngine(Engine):
    """An engine whose `tensors`, parameters and buffers by name, belong to torch modules; `owners` are
    these modules, and the tensors' names there. `accounts` says what a refit does to each tensor, `turned` are the
    matrices whose transposes are served."""

    engine: str  # its own name, for errors
    module: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    owners: dict[str, tuple[torch.nn.Module, str]]
    accounts: dict[str, Account]
    turned: TurnedMatrices
    _addresses: list[int] | None = None  # when `tensors_moved` was last called

    def tensor_addresses(self) -> list[int]:
        """Return the current addresses of all parameters and buffers."""
        return list(map(torch.Tensor.data_ptr, self.tensors.values()))

    def written(self) -> set[int]:
        """Return the identities of the tensors that a refit writes into."""
        return {id(region.tensor) for region in self.written_regions()}

    def written_regions(self) -> list[Region]:
        """Return all that a refit writes into, with what the transposes are served from."""
        return [*super().written_regions(), *self.transposes().values()]

    def transposes(self) -> dict[Any, Region]:
        """Return the regions of the matrices that are turned; none before it is known which are."""
        return {identity: matrix.served for identity, matrix in self.turned.matrices.items()}

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """Return what a refit does to the tensors, counted; see `Engine.tensor_accounts`."""
        return summary(self.accounts)

    def still_serves(self, module: torch.nn.Module) -> bool:
        """Return True if this is the side of an engine that has the same model as at connect, in the same order."""
        if self.module is not module:
            return False
        try:
            self.refresh_regions()
        except ReshardError:
            return False
        return True

    def refresh_regions(self) -> None:
        """Find the tensors that the engine has replaced or moved.

        Raises ReshardError if one has no memory, as in sleep, or another shape, dtype or order than
        at connect.
        """
        for name, before in self.tensors.items():
            module, key = self.owners[name]
            current = module._parameters.get(key, module._buffers.get(key))
            if current is not before:
                self._replace(name, current)
        addresses = self.tensor_addresses()
        self.check_awake()
        moved, self._addresses = addresses != self._addresses, addresses
        if moved:
            self.tensors_moved()

    def process_round(self, index: int) -> None:
        """Write the transposes of the matrices of a round."""
        self.turned.write(index)

    def mismatches(self, index: int) -> list[Any]:
        """Return the ids of this round's matrices whose transposes are not what is served."""
        return self.turned.mismatches(index)

    def check_awake(self) -> None:
        """Raise ReshardError if the tensors have no memory, as in sleep."""

    def tensors_moved(self) -> None:
        """Find anew what follows from where the tensors lie."""

    def _replace(self, name: str, current: torch.Tensor | None) -> None:
        before = self.tensors[name]
        same = current is not None and all(
            getattr(current, what) == getattr(before, what) for what in ("shape", "dtype", "device")
        )
        if current is None or not same or current.stride() != before.stride():
            raise ReshardError(
                f"{self.engine}'s {name} has been replaced by one of another shape, dtype or order "
                f"since connect: connect again"
            )
        self.tensors[name] = current
        self.regions = {
            identity: region._replace(tensor=current) if region.tensor is before else region
            for identity, region in self.regions.items()
        }
        self.turned = self.turned.replaced(before, current)
        self.scales = {
            identity: scales._replace(region=scales.region._replace(tensor=current))
            if scales.region.tensor is before
            else scales
            for identity, scales in self.scales.items()
        }


def check_towers_loaded(towers: Collection[str], load_format: str, otherwise: str = "") -> None:
    """Raise ReshardError if tensors outside of the language model, which no trainer has, are dummy weights.
    `otherwise` says what a user may do other than load a checkpoint."""
    if towers and load_format == "dummy":
        raise ReshardError(
            f"{min(towers)} and {len(towers) - 1} tensors beside the language model are dummy weights "
            f"(load_format='dummy'), and no refit brings them: load a checkpoint{otherwise}"
        )


def owners_of(
    modules: Mapping[str, torch.nn.Module], names: Iterable[str]
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the modules that hold parameters and buffers of these names, and their names there."""
    owners = {}
    for name in names:
        path, _, key = name.rpartition(".")
        owners[name] = modules[path], key
    return owners
