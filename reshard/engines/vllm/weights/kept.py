"""Tensors that a refit leaves alone: kept on the host, since vLLM may lose them in sleep, and no
trainer has them."""

from collections.abc import Collection, Mapping

import torch

from reshard.engines.placing.accounts import LEFT_ALONE, Account
from reshard.engines.vllm.guard import VllmGuard
from reshard.engines.vllm.weights.served import DRAFT


class KeptTensors:
    """Copies on the host of the tensors that a refit leaves alone.

    A tensor that vLLM has lost is written again from its copy. Which ones may be lost, the guard's
    counts tell: buffers when vLLM discards buffers too, parameters whenever it discards weights.
    """

    def __init__(self, guard: VllmGuard) -> None:
        self.guard = guard
        self.has_parameters = False  # copied while all weights were whole
        self._copies: dict[str, torch.Tensor] = {}
        self._losses, self._buffer_losses = guard.losses, guard.buffer_losses

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        buffers: frozenset[str],
        drafter: Collection[str],
        accounts: Mapping[str, Account],
        is_drafter_whole: bool,
    ) -> None:
        """Copy the tensors that are left alone by their accounts, as far as they have a meaning.

        `buffers` are the names of those that are buffers, `drafter` of those of a drafter that no
        refit brings. Buffers have a meaning until they are lost for the first time, the drafter while it is whole,
        other parameters while the weights are.
        """
        for name, tensor in tensors.items():
            never_lost = not self._is_lost(name, buffers, 0, 0)
            if name in drafter:
                has_meaning = is_drafter_whole
            else:
                has_meaning = never_lost if name in buffers else self.guard.ready
            if accounts[name].what == LEFT_ALONE and has_meaning:
                self._copies[name] = tensor.detach().cpu().clone()
        self.has_parameters = self.guard.ready

    def forget(self, names: Collection[str]) -> None:
        """Forget the copies of tensors that a refit is about to write."""
        for name in names:
            self._copies.pop(name, None)

    def has(self, names: Collection[str]) -> bool:
        """Return True if there are copies of all of these tensors."""
        return all(name in self._copies for name in names)

    def restore(
        self, tensors: Mapping[str, torch.Tensor], buffers: frozenset[str], accounts: Mapping[str, Account]
    ) -> None:
        """Write what vLLM has lost since the last call back into the model, but for what a refit brings now."""
        for name, copy in self._copies.items():
            is_left = name in tensors and accounts[name].what == LEFT_ALONE
            if is_left and self._is_lost(name, buffers, self._losses, self._buffer_losses):
                tensors[name].data.copy_(copy)
        self._losses, self._buffer_losses = self.guard.losses, self.guard.buffer_losses

    def restore_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write those of these tensors that have copies."""
        for name in tensors.keys() & self._copies.keys():
            tensors[name].data.copy_(self._copies[name])

    def _is_lost(self, name: str, buffers: frozenset[str], losses: int, buffer_losses: int) -> bool:
        """Tell whether vLLM may have lost a tensor since the guard had counted so many losses."""
        # While vLLM sleeps it keeps the model's buffers itself, but not, before 0.32, those of the
        # drafter.
        if name in buffers and not name.startswith(DRAFT):
            return buffer_losses != self.guard.buffer_losses
        return losses != self.guard.losses
