"""A policy of NeMo-RL's with the EAGLE drafter that it trains beside its model (``policy.draft``), as one source.

NeMo-RL keeps the drafter as a module of Megatron's in one of the model's chunks, and exports it under its published
names itself: all of it on each rank that has it, which is small beside the model. That copy is what engines get.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.trainers.drafter import WithDrafter
from reshard.trainers.megatron import MegatronModel

NAME = "draft_model"  # of the drafter in the module that has it, and in the worker
TESTED = "tested with NeMo-RL at 7ea279abf"
Exported = Iterable[tuple[str, torch.Tensor]]


class PolicyModel(MegatronModel):
    """The chunk of a policy without the drafter in its module `owner`."""

    def __init__(self, chunk: torch.nn.Module, owner: torch.nn.Module) -> None:
        self._owner = owner
        with without_drafter(owner):
            super().__init__(chunk)

    def check_model(self, model: Model, without: frozenset[str] = frozenset()) -> None:
        """Compare the model with the served one; see `MegatronModel.check_model`."""
        with without_drafter(self._owner):
            super().check_model(model, without)


class ExportedDrafter(torch.nn.Module):
    """A drafter's tensors under their published names, as they were when they were taken last."""

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self._taken: dict[str, torch.Tensor] = {}
        for name, tensor in exported:
            *path, key = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            if copy.is_floating_point():
                module.register_parameter(key, torch.nn.Parameter(copy, requires_grad=False))
            else:
                module.register_buffer(key, copy)
            self._taken[name] = copy

    def take(self, exported: Exported) -> None:
        """Copy the tensors as they are now. Raises ReshardError if they are others, or have other shapes or dtypes."""
        tensors = dict(exported)
        if {name: (t.shape, t.dtype) for name, t in tensors.items()} != {
            name: (t.shape, t.dtype) for name, t in self._taken.items()
        }:
            raise ReshardError(
                "the drafter's tensors are others than when it was connected, or have other shapes or dtypes"
            )
        for name, tensor in tensors.items():
            self._taken[name].copy_(tensor.detach())


class PolicyWithDrafter(WithDrafter):
    """One rank of a policy that has the drafter: the `worker`'s chunk, and what `export` returns of its drafter, which
    gathers that from the ranks of its tensor parallel group. `update` takes the drafter's weights as they are now, on
    all these ranks, before each refit."""

    def __init__(self, worker: Any, export: Callable[[Any], Exported]) -> None:
        self._module, self._export = worker.draft_model, export
        model = PolicyModel(worker.model, _owner_of(worker.model, self._module))
        _gather(model)
        self._exported = ExportedDrafter(export(self._module))
        super().__init__(model, self._exported)

    def update(self) -> None:
        """Take the drafter's weights as they are now; a collective of its tensor parallel group."""
        _gather(self.trainer)
        self._exported.take(self._export(self._module))


def source_of(worker: Any) -> MegatronModel | PolicyWithDrafter:
    """Return the source of a rank of a policy, with its drafter if it has one.

    Raises ReshardError if NeMo-RL trains a drafter and keeps it elsewhere.
    """
    is_trained = bool((worker.cfg.get("draft") or {}).get("enabled"))
    if is_trained and not hasattr(worker, "draft_model"):
        raise ReshardError(f"NeMo-RL's worker has no {NAME}, and policy.draft is enabled: {TESTED}")
    if getattr(worker, "draft_model", None) is None:  # as in all pipeline stages but one
        return MegatronModel(worker.model)
    from nemo_rl.models.megatron.draft.utils import export_eagle_weights_to_hf

    return PolicyWithDrafter(worker, export_eagle_weights_to_hf)


def update(source: Any) -> None:
    """Have a source take what it copies, before each refit."""
    if isinstance(source, PolicyWithDrafter):
        source.update()


def _gather(model: Any) -> None:
    """Have parameters that the optimizer has stepped on other ranks, where Megatron gathers them later."""
    if model.has_pending_sync:
        model.sync_params()


def _owner_of(chunk: torch.nn.Module, drafter: torch.nn.Module) -> torch.nn.Module:
    """Return the module of a chunk in which NeMo-RL has put its drafter. Raises ReshardError if there is none."""
    for module in chunk.modules():
        if module._modules.get(NAME) is drafter:
            return module
    raise ReshardError(f"NeMo-RL's drafter is not in the model as {NAME}: {TESTED}")


@contextmanager
def without_drafter(owner: torch.nn.Module) -> Iterator[None]:
    """Take the drafter out of its module for as long as this lasts."""
    modules = {**owner._modules}
    del owner._modules[NAME]
    try:
        yield
    finally:
        owner._modules.clear()  # so that it is where it was
        owner._modules.update(modules)
