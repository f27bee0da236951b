"""A live Megatron as a stream of whole tensors under their published names, for consumers that take such a
stream."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line
from reshard.core.gc import gc_paused
from reshard.core.limits import check_number
from reshard.megatron.live.agreement import Agreed, WriteAssignment, agree
from reshard.megatron.live.config import Published
from reshard.megatron.live.memory import bytes_of
from reshard.megatron.live.ranks import Models, Rank, box_of, check_alike, decide, keyword_style_errors, meet
from reshard.storage.io.boxes import Rows

MAX_BUFFER_BYTES = 1 << 40


def export(
    models: Models,
    hf_config: str | Path | Published,
    *,
    buffer_bytes: int = 128 << 20,
    to: int | None = None,
    copy: bool = True,
    make_vocab_size_divisible_by: int = 128,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every published tensor of a live Megatron-Core model, whole, as (name, tensor): those that
    `save(format="hf")` would write, in the order of the family's table.

    All ranks of torch's default process group call it and iterate to the end, where they use no group of it
    meanwhile. Every rank is given every tensor, or, with `to`, that rank all of them and the others none. Tensors
    come in batches of at most `buffer_bytes`, each in one exchange between all ranks; a rank that is given them
    needs twice that memory besides the model, others what they send. A larger tensor comes by itself, and needs its
    own memory once, twice where columns of it lie on several ranks. Tensors lie on the model's device, have the
    parameters' dtypes, and are the caller's to keep; one that repeats another is that one, and follows it. With
    `copy` False a tensor that lies whole on a rank, row after row, is given there as it lies: to be read before the
    model is trained on, and not written to.

    Raises ReshardError on every rank, before the first tensor, where the models are not that of `hf_config` or
    lack a part of it.
    """
    with keyword_style_errors(), gc_paused(), meet("export") as team:
        described: list[tuple[Published, Rank]] = []

        def describe() -> None:
            check_number(buffer_bytes, "buffer_bytes", MAX_BUFFER_BYTES)
            if to is not None:
                check_number(to, "to", team.size - 1, 0)
            published = Published.read(hf_config)
            rank = Rank(models, metadata)
            rank.describe(published.model, make_vocab_size_divisible_by)
            described.append((published, rank))

        team.together(describe)
        [(published, rank)] = described
        mine = {"the digest of the config": published.digest, "buffer_bytes": buffer_bytes, "to": to}
        check_alike(team, "exports", mine)
        agreed = agree(team, rank, published)
        given = decide(team, lambda: _told(agreed.given))
        team.together(rank.trainer.sync_params)
        takers = list(range(team.size)) if to is None else [to]
        return _Stream(rank, agreed, given, buffer_bytes, team.process, takers, copy).tensors()


def _told(given: dict[str, list[WriteAssignment]]) -> dict[str, list[list[int]]]:
    return {
        name: [[one.rank, one.number, *one.box.offsets, *one.box.lengths] for one in several]
        for name, several in given.items()
    }


class _Stream:
    """Batches of tensors, and what each rank gives of each."""

    def __init__(
        self,
        rank: Rank,
        agreed: Agreed,
        given: dict[str, list[list[int]]],
        buffer_bytes: int,
        process: int,
        takers: list[int],
        copy: bool,
    ) -> None:
        self.agreed, self.process, self.takers, self.device = agreed, process, takers, rank.device
        self.copy = copy
        self.pieces = rank.by_name()
        self.given = {
            name: [WriteAssignment(number, piece, box_of(box)) for number, piece, *box in several]
            for name, several in given.items()
        }
        self.batches: list[list[str]] = [[]]
        size = 0
        for name in self.given:
            more = agreed.tensors[name].size_bytes
            if self.batches[-1] and size + more > buffer_bytes:
                self.batches.append([])
                size = 0
            self.batches[-1].append(name)
            size += more
        self.repeated: dict[str, list[str]] = {}
        for again, primary in agreed.copies.items():
            self.repeated.setdefault(primary, []).append(again)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, on the ranks that take them."""
        for names in self.batches:
            for name, tensor in self._straight(names[0]) if len(names) == 1 else self._packed(names):
                yield name, tensor
                for copy in self.repeated.get(name, ()):
                    yield copy, tensor

    def _straight(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor that fills a batch: from where it lies to where it belongs, without a buffer where its rows
        follow one another."""
        takes = self.process in self.takers
        tensor = self._whole(name) if takes else None
        exchanges, later = [], []
        for given in self.given[name]:
            mine = self._mine(name, given) if given.rank == self.process else None
            into = None if tensor is None else self._within(tensor, given)
            if mine is not None:
                if into is not None:
                    _copy(mine, into)
                sent = mine.contiguous() if self._others() else mine
                exchanges += [dist.P2POp(dist.isend, sent, taker) for taker in self._others()]
            elif into is not None:
                received = into if into.is_contiguous() else torch.empty_like(into)
                exchanges.append(dist.P2POp(dist.irecv, received, given.rank))
                later += [] if received is into else [(into, received)]
        _wait(exchanges)
        for into, received in later:
            into.copy_(received)
        if tensor is not None:
            yield name, tensor

    def _packed(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a batch: what a rank gives of all of them goes to each of the others in one piece."""
        received = self._exchange(names)
        if self.process not in self.takers:
            return
        at = dict.fromkeys(received, 0)
        for name in names:
            tensor = self._whole(name)
            for given in self.given[name]:
                into = self._within(tensor, given)
                if given.rank == self.process:
                    _copy(self._mine(name, given), into)
                    continue
                start = at[given.rank]
                at[given.rank] = start + into.numel()
                into.copy_(received[given.rank][start : at[given.rank]].view(into.shape))
            yield name, tensor

    def _exchange(self, names: list[str]) -> dict[int, torch.Tensor]:
        """Send what this rank gives of these tensors to all others that take them; what came from each of those, as
        bytes, where this one takes them."""
        sizes: dict[int, int] = {}
        mine = []
        for name in names:
            for given in self.given[name]:
                if given.rank != self.process:
                    sizes[given.rank] = sizes.get(given.rank, 0) + self._bytes(name, given)
                elif self._others():
                    mine.append(self._mine(name, given).reshape(-1))
        exchanges, received = [], {}
        if mine:
            out = torch.cat(mine)
            exchanges += [dist.P2POp(dist.isend, out, taker) for taker in self._others()]
        if self.process in self.takers:
            for rank, size in sizes.items():
                received[rank] = torch.empty(size, dtype=torch.uint8, device=self.device)
                exchanges.append(dist.P2POp(dist.irecv, received[rank], rank))
        _wait(exchanges)
        return received

    def _others(self) -> list[int]:
        """The ranks besides this one that take tensors."""
        return [taker for taker in self.takers if taker != self.process]

    def _bytes(self, name: str, given: WriteAssignment) -> int:
        return given.box.volume * self.agreed.tensors[name].dtype.size

    def _mine(self, name: str, given: WriteAssignment) -> torch.Tensor:
        """What this rank gives, where it lies: bytes ``[rows, bytes of a row]``."""
        piece = self.pieces[name][given.number]
        return bytes_of(piece.region, piece.local)

    def _whole(self, name: str) -> torch.Tensor:
        """Where a tensor is put together, or where it lies already if no copy is asked for."""
        info, given = self.agreed.tensors[name], self.given[name]
        dtype = getattr(torch, info.dtype.name)
        if not self.copy and len(given) == 1 and given[0].rank == self.process:
            mine = self._mine(name, given[0])
            if mine.is_contiguous():
                return mine.view(dtype).view(info.shape)
        return torch.empty(info.shape, dtype=dtype, device=self.device)

    def _within(self, tensor: torch.Tensor, given: WriteAssignment) -> torch.Tensor:
        """The bytes ``[rows, bytes of a row]`` of a whole tensor that a rank gives."""
        rows, size = Rows.of(given.box), tensor.element_size()
        matrix = tensor.view(tensor.shape[0] if tensor.ndim else 1, -1).view(torch.uint8)
        return matrix[rows.start : rows.stop, rows.column * size : (rows.column + rows.columns) * size]


def _copy(mine: torch.Tensor, into: torch.Tensor) -> None:
    if mine.data_ptr() != into.data_ptr():
        into.copy_(mine)


def _wait(exchanges: list[dist.P2POp]) -> None:
    try:
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
    except RuntimeError as error:
        raise ReshardError(
            f"the export ended early, since another rank was ended, or has not iterated to the end as all have to ({first_line(error)})"
        ) from error
