"""Export a live Megatron as a stream of whole tensors under their published names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line
from reshard.core.gc import gc_paused
from reshard.core.limits import check_number
from reshard.device.staging import byte_view
from reshard.device.stored import published, stored_tensors
from reshard.live.collective import check_same_options, keyword_style_errors, open_team, run_on_first
from reshard.live.inventory import Inventory, WriteAssignment, take_inventory
from reshard.live.local_boxes import box_of
from reshard.live.local_model import LocalModel, Models
from reshard.live.published_model import PublishedModel
from reshard.storage.io.boxes import Rows

MAX_BUFFER_BYTES = 1 << 40


def export(
    models: Models,
    hf_config: str | Path | PublishedModel,
    *,
    buffer_bytes: int = 128 << 20,
    to: int | None = None,
    copy: bool = True,
    make_vocab_size_divisible_by: int = 128,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every published tensor of a live Megatron-Core model, whole, as (name, tensor): those that
    `save(format="hf")` would write, in the order of the family's table.

    All ranks of torch's default process group call it, iterate to the end, and use no group of it
    meanwhile. Tensors lie on the model's device, have the parameters' dtypes, and are the caller's
    to keep. One that repeats another is the same tensor, and follows it.

    Args:
        buffer_bytes: the most bytes of a batch, which takes one exchange between all ranks. A rank that gets the
            tensors needs twice that memory, others what they send. A larger tensor is a batch by itself; it
            needs its own memory once, twice where columns of it lie on several ranks.
        to: the only rank that gets the tensors; by default every rank gets them.
        copy: False to get a tensor that lies whole on a rank, row after row, where it lies: read it before the model
            is trained on, and do not write to it.

    Raises ReshardError on every rank, before the first tensor, where the models are not that of
    `hf_config` or lack a part of it.
    """
    with keyword_style_errors(), gc_paused(), open_team("export") as team:
        described: list[tuple[PublishedModel, LocalModel]] = []

        def describe() -> None:
            check_number(buffer_bytes, "buffer_bytes", MAX_BUFFER_BYTES)
            if to is not None:
                check_number(to, "to", team.size - 1, 0)
            published = PublishedModel.read(hf_config)
            local = LocalModel(models, metadata)
            local.find_boxes(published.model, make_vocab_size_divisible_by)
            described.append((published, local))

        team.together(describe)
        [(published, local)] = described
        options = {"the digest of the config": published.digest, "buffer_bytes": buffer_bytes, "to": to}
        check_same_options(team, "exports", options)
        inventory = take_inventory(team, local, published)
        assignments = run_on_first(team, lambda: _as_numbers(inventory.assignments))
        team.together(local.trainer.sync_params)
        takers = list(range(team.size)) if to is None else [to]
        stream = _Stream(local, inventory, assignments, buffer_bytes, team.process, takers, copy).tensors()
        shapes = {name: info.shape for name, info in inventory.tensors.items()}
        return stored_tensors(stream, shapes, inventory.packed)


def _as_numbers(assignments: dict[str, list[WriteAssignment]]) -> dict[str, list[list[int]]]:
    """Return assignments as the first process sends them to the others."""
    return {
        name: [[each.rank, each.number, *each.box.offsets, *each.box.lengths] for each in of_name]
        for name, of_name in assignments.items()
    }


class _Stream:
    """Batches of tensors, and the boxes that each rank sends of each."""

    def __init__(
        self,
        local: LocalModel,
        inventory: Inventory,
        assignments: dict[str, list[list[int]]],
        buffer_bytes: int,
        process: int,
        takers: list[int],
        copy: bool,
    ) -> None:
        self.inventory, self.process, self.takers, self.device = inventory, process, takers, local.device
        self.copy = copy
        self.boxes = local.by_name()
        self.assignments = {
            name: [WriteAssignment(rank, number, box_of(box)) for rank, number, *box in of_name]
            for name, of_name in assignments.items()
        }
        self.batches: list[list[str]] = [[]]
        size = 0
        for name in self.assignments:
            tensor_size = inventory.tensors[name].size_bytes
            if self.batches[-1] and size + tensor_size > buffer_bytes:
                self.batches.append([])
                size = 0
            self.batches[-1].append(name)
            size += tensor_size
        self.copies_of: dict[str, list[str]] = {}
        for copy_name, primary in inventory.copies.items():
            self.copies_of.setdefault(primary, []).append(copy_name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, on the ranks that take them."""
        for names in self.batches:
            for name, tensor in (
                self._exchange_directly(names[0]) if len(names) == 1 else self._exchange_packed(names)
            ):
                yield name, tensor
                for copy in self.copies_of.get(name, ()):
                    yield copy, tensor

    def _exchange_directly(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Send a tensor that fills a batch from where it lies to where it belongs, without a buffer
        where its rows follow one another."""
        takes = self.process in self.takers
        tensor = self._whole(name) if takes else None
        exchanges, copies = [], []
        for assignment in self.assignments[name]:
            own_bytes = self._own_bytes(name, assignment) if assignment.rank == self.process else None
            target = None if tensor is None else self._within(tensor, assignment)
            if own_bytes is not None:
                if target is not None:
                    _copy(own_bytes, target)
                sent = own_bytes.contiguous() if self._others() else own_bytes
                exchanges += [dist.P2POp(dist.isend, sent, taker) for taker in self._others()]
            elif target is not None:
                received = target if target.is_contiguous() else torch.empty_like(target)
                exchanges.append(dist.P2POp(dist.irecv, received, assignment.rank))
                copies += [] if received is target else [(target, received)]
        _wait(exchanges)
        for target, received in copies:
            target.copy_(received)
        if tensor is not None:
            yield name, tensor

    def _exchange_packed(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Send the tensors of a batch: the boxes of all of them go from a rank to each other one in
        one message."""
        received = self._exchange(names)
        if self.process not in self.takers:
            return
        position = dict.fromkeys(received, 0)
        for name in names:
            tensor = self._whole(name)
            for assignment in self.assignments[name]:
                target = self._within(tensor, assignment)
                if assignment.rank == self.process:
                    _copy(self._own_bytes(name, assignment), target)
                    continue
                start = position[assignment.rank]
                position[assignment.rank] = start + target.numel()
                target.copy_(received[assignment.rank][start : position[assignment.rank]].view(target.shape))
            yield name, tensor

    def _exchange(self, names: list[str]) -> dict[int, torch.Tensor]:
        """Send this rank's boxes of these tensors to all others that take them. Return the bytes
        that came from each of the others, where this rank takes tensors."""
        sizes: dict[int, int] = {}
        own_bytes = []
        for name in names:
            for assignment in self.assignments[name]:
                if assignment.rank != self.process:
                    sizes[assignment.rank] = sizes.get(assignment.rank, 0) + self._bytes(name, assignment)
                elif self._others():
                    own_bytes.append(self._own_bytes(name, assignment).reshape(-1))
        exchanges, received = [], {}
        if own_bytes:
            out = torch.cat(own_bytes)
            exchanges += [dist.P2POp(dist.isend, out, taker) for taker in self._others()]
        if self.process in self.takers:
            for rank, size in sizes.items():
                received[rank] = torch.empty(size, dtype=torch.uint8, device=self.device)
                exchanges.append(dist.P2POp(dist.irecv, received[rank], rank))
        _wait(exchanges)
        return received

    def _others(self) -> list[int]:
        """Return the ranks besides this one that take tensors."""
        return [taker for taker in self.takers if taker != self.process]

    def _bytes(self, name: str, assignment: WriteAssignment) -> int:
        return assignment.box.volume * self.inventory.tensors[name].dtype.size

    def _own_bytes(self, name: str, assignment: WriteAssignment) -> torch.Tensor:
        """View the box that this rank sends, where it lies, as bytes ``[rows, bytes of a row]``."""
        live = self.boxes[name][assignment.number]
        held = byte_view(live.region, live.local)
        if live.dtype == live.dtype.published:
            return held
        numbers = held.contiguous().view(getattr(torch, live.dtype.name))
        return published(numbers, live.dtype).view(torch.uint8)

    def _whole(self, name: str) -> torch.Tensor:
        """Return memory to put a tensor together in, or the tensor where it lies already, if no
        copy is asked for."""
        info, assignments = self.inventory.tensors[name], self.assignments[name]
        dtype = getattr(torch, info.dtype.name)
        if not self.copy and len(assignments) == 1 and assignments[0].rank == self.process:
            own_bytes = self._own_bytes(name, assignments[0])
            if own_bytes.is_contiguous():
                return own_bytes.view(dtype).view(info.shape)
        return torch.empty(info.shape, dtype=dtype, device=self.device)

    def _within(self, tensor: torch.Tensor, assignment: WriteAssignment) -> torch.Tensor:
        """View the bytes ``[rows, bytes of a row]`` of a whole tensor that a rank sends."""
        rows, size = Rows.of(assignment.box), tensor.element_size()
        matrix = tensor.view(tensor.shape[0] if tensor.ndim else 1, -1).view(torch.uint8)
        return matrix[rows.start : rows.stop, rows.column * size : (rows.column + rows.columns) * size]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def _wait(exchanges: list[dist.P2POp]) -> None:
    try:
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
    except RuntimeError as error:
        raise ReshardError(
            "the export ended early, since another rank was ended, or has not iterated to the end as all "
            f"have to ({first_line(error)})"
        ) from error
