"""A model with a LoRA adapter added to its weights, read as one source."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError, listed
from reshard.lora.names import A, B, peft_name
from reshard.storage.io.streams import SLAB_BYTES
from reshard.storage.lora.source import AdapterSource
from reshard.storage.sources.base import Source
from reshard.storage.sources.derived import DerivedSource
from reshard.storage.sources.verify import SourceChecks, check_listed


class _LastA(threading.local):
    """The A that a thread has read last, in float32: rows of a weight are asked for a slab at a time."""

    name = ""
    a = np.empty((0, 0), np.float32)


class MergedSource(DerivedSource):
    """The tensors of `base` with ``scale * B @ A`` of the adapter added to each weight that has one.

    The sum is computed in float32 and rounded once: to `dtype`, or to the weight's. Raises ReshardError
    if the base has not the weights of the adapter.
    """

    kind = "merged"

    def __init__(self, base: Source, adapter: AdapterSource, dtype: Dtype | None = None) -> None:
        super().__init__(base)
        self.adapter = adapter
        missing = [name for name in adapter.scales if name not in base.tensors]
        wrong = [
            n for n in adapter.scales if n in base.tensors and base.tensors[n].shape != adapter.base.shapes[n]
        ]
        if missing or wrong:
            raise ReshardError(
                f"{base.path} does not have the weights of the adapter: {listed(missing + wrong, 3)}"
            )
        self.tensors = {
            name: replace(info, dtype=dtype or info.dtype) if name in adapter.scales else info
            for name, info in base.tensors.items()
        }
        adapter.note_untrained()
        self.notices = list(dict.fromkeys([*base.notices, *adapter.notices]))
        self.last = _LastA()
        for weight in adapter.copies_of_base.keys() & base.tensors.keys():
            self._check_copy(weight)

    def _check_copy(self, weight: str) -> None:
        """Raise ReshardError if the adapter's copy of a weight has other numbers than the base, as far as the
        narrower dtype of both holds them: PEFT would put it in the place of the base's."""
        rows, columns = self.base.tensors[weight].shape
        step = max(1, SLAB_BYTES // (4 * columns))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            held = self.base.read_rows(weight, start, stop)
            copy = self.adapter.read_copy_of_base(weight, start, stop)
            dtype = min(held.dtype, copy.dtype, key=lambda dtype: dtype.itemsize)
            if held.astype(dtype).tobytes() != copy.astype(dtype).tobytes():
                raise ReshardError(
                    f"{self.adapter.path} holds another {weight} than {self.base.path}: give the model on "
                    "which the adapter was trained"
                )

    def changes(self, name: str) -> bool:
        return name in self.adapter.scales

    def check_read(self, part: int, parts: int, workers: int | None) -> None:
        check_listed(self.adapter, part, parts, workers, SourceChecks(self.adapter).entries)
        unwatched = SourceChecks(self.base).unwatched()
        check_listed(self.base, part, parts, workers, {*self.adapter.scales, *unwatched})

    def changed_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        scale = self.adapter.scales[name]
        if self.last.name != name:
            self.last.a = self.adapter.read_rows(peft_name(name, A), 0, scale.rank).astype(np.float32)
            self.last.name = name
        b = self.adapter.read_rows(peft_name(name, B), start, stop).astype(np.float32)
        merged = self.base.read_rows(name, start, stop).astype(np.float32)
        added = np.matmul(b, self.last.a)
        added *= np.float32(scale.factor)
        merged += added
        rounded = merged.astype(self.tensors[name].dtype.numpy())
        if not np.isfinite(rounded.astype(np.float32)).all():
            beyond = f"numbers that {self.tensors[name].dtype.name} cannot hold"
            raise ReshardError(
                f"{name} with its adapter has {beyond if np.isfinite(merged).all() else 'NaN or infinity in it'}"
            )
        return rounded

    def read_files(self) -> list[Path]:
        return [*self.base.read_files(), *self.adapter.read_files()]

    def identity(self) -> tuple[list[Any], list[Any]]:
        (contents, places), (own_contents, own_places) = self.base.identity(), self.adapter.identity()
        scales = [[name, scale.rank, scale.factor] for name, scale in self.adapter.scales.items()]
        return [*contents, own_contents, scales], [*places, *own_places]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with self.base.unchanged(), self.adapter.unchanged():
            yield

    def close(self) -> None:
        self.base.close()
        self.adapter.close()
