"""A run of what transformers does to tensors as it saves them, with tensors that have shapes, but no bytes: which rows
of a model's tensors it joins to one."""

from collections.abc import Iterable
from math import prod
from typing import Any

from reshard.core.extras import importing

with importing("parity"):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

from reshard.models.row_runs import runs_of_rows, storage_id

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class Saving(TorchDispatchMode):
    """Inside, a copy of one of these `tensors` without memory is a view of it. What is joined of rows of several, or of
    one in another order, is a tensor of its own, whose `runs` are known."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._shapes = {storage_id(tensor): tuple(tensor.shape) for tensor in tensors}
        self._joined: dict[int, list[torch.Tensor]] = {}
        self._kept: list[torch.Tensor] = []  # since tensors are known by their storage

    def runs(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of the tensors that lie one after the other along the first dim of this one; none if it is
        not made of whole rows of joined ones."""
        parts = self._joined.get(storage_id(tensor))
        if parts is None:
            return [tensor]
        width = prod(parts[0].shape[1:])
        first, inside = divmod(int(tensor.storage_offset()), width)
        if inside or not tensor.is_contiguous() or tensor.shape[1:] != parts[0].shape[1:]:
            return []
        runs, end = [], first + tensor.shape[0]
        for part in parts:
            start, stop = max(first, 0), min(end, part.shape[0])
            if start < stop:
                runs.append(part if stop - start == part.shape[0] else part[start:stop])
            first, end = first - part.shape[0], end - part.shape[0]
        return runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(f"{func} changes a tensor in place")
        if func in _COPIES and kwargs.get("dtype") in (None, args[0].dtype):
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten._unsafe_view.default and not args[0].is_contiguous():
            runs = runs_of_rows(args[0], self._shapes.get(storage_id(args[0]), ()), args[1])
            if runs:
                return self._join(runs)
        if func is torch.ops.aten.cat.default and self._joins_rows(*args, **kwargs):
            return self._join([run for tensor in args[0] for run in self.runs(tensor)])
        return func(*args, **kwargs)

    def _joins_rows(self, tensors: list[torch.Tensor], dim: int = 0) -> bool:
        return dim == 0 and all(map(self._is_rows, tensors))

    def _is_rows(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is whole rows, following one another, of a tensor or of joined ones."""
        if storage_id(tensor) in self._joined:
            return bool(self.runs(tensor))
        shape = self._shapes.get(storage_id(tensor), ())
        is_like = bool(shape) and tensor.ndim == len(shape) and tuple(tensor.shape[1:]) == shape[1:]
        return is_like and tensor.is_contiguous() and int(tensor.storage_offset()) % prod(shape[1:]) == 0

    def _join(self, runs: list[torch.Tensor]) -> torch.Tensor:
        rows = sum(run.shape[0] for run in runs)
        joined = torch.empty((rows, *runs[0].shape[1:]), dtype=runs[0].dtype, device="meta")
        self._joined[storage_id(joined)] = runs
        self._kept.append(joined)
        return joined
