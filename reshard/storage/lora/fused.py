"""A LoRA adapter with the matrices of all experts of a layer in one, as PEFT has them for transformers 5."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.core.errors import ReshardError
from reshard.lora.experts import ExpertsParameter, experts_parameter
from reshard.lora.names import PEFT_PREFIX, A, B, peft_name
from reshard.lora.parameters import Adapter
from reshard.lora.scale import Scale
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.lora.source import AdapterSource


class FusedMatrix(NamedTuple):
    """A matrix of all experts: by expert the names of its parts, which lie one above the other, or a row of each
    in turn."""

    matrix: str
    parts: list[list[str]]
    interleaved: bool


class FusedExpertsSource(AdapterSource):
    """The tensors of an `adapter`, with A ``[experts * rank, in]`` and B ``[out, rank * experts]`` of the layers
    with experts: A expert by expert, B with the experts of one rank side by side.

    Raises ReshardError if experts, or gate and up, differ in what PEFT has once: rank, alpha or A.
    """

    kind = "fused experts"

    def __init__(self, adapter: AdapterSource) -> None:
        self.adapter, self.path, self.model, self.mapping = (
            adapter, adapter.path, adapter.model, adapter.mapping,
        )  # fmt: skip
        self.base, self.adapters, self.scales, self.base_name = (
            adapter.base, adapter.adapters, adapter.scales, adapter.base_name,
        )  # fmt: skip
        self.notices, self.copies, self.files, self.versions = (
            adapter.notices, {}, adapter.files, adapter.versions,
        )  # fmt: skip
        self.parameters: dict[str, Scale] = {}
        self.fused: dict[str, FusedMatrix] = {}
        self.tensors = dict(adapter.tensors)
        of_experts = [one for one in self.adapters if one.layer.of_experts]
        places = [experts_parameter(one.layer, self.model) for one in of_experts]
        modules = [place.module for place in places]
        for one, place in zip(of_experts, places, strict=True):
            # PEFT wraps the module once for each of its parameters, gate and up first.
            self._fuse(one, place, place.is_first and modules.count(place.module) > 1)

    def _fuse(self, adapter: Adapter, place: ExpertsParameter, below: bool) -> None:
        layer = adapter.layer
        weights = [layer.published(expert) for expert in range(len(layer.weights))]
        scales = {self.scales.get(name) for of_expert in weights for name in of_expert}
        if len(scales) > 1 or None in scales:
            raise ReshardError(
                f"--experts together: the experts in {place.module} differ in rank or alpha, or some have no adapter"
            )
        [scale] = scales
        assert scale is not None
        self.parameters[f"{place.module}.{place.name}"] = scale
        for of_expert in weights:
            self._check_common(of_expert)
        (out, columns), experts = layer.first.shape, len(weights)
        dtype = self.adapter.tensors[peft_name(weights[0][0], A)].dtype
        shapes = {A: (experts * scale.rank, columns), B: (out, scale.rank * experts)}
        for matrix, shape in shapes.items():
            name = f"{PEFT_PREFIX}{place.module}{'.base_layer' * below}.lora_{matrix}.weight"
            parts = [[peft_name(part, matrix) for part in of_expert] for of_expert in weights]
            for of_expert in parts:
                for part in of_expert:
                    del self.tensors[part]
            self.fused[name] = FusedMatrix(matrix, parts, place.interleaved and matrix == B)
            self.tensors[name] = TensorInfo(shape, dtype)

    def _check_common(self, weights: list[str]) -> None:
        """Raise ReshardError if an expert's weights have different A."""
        first, *others = (self._whole(peft_name(weight, A)) for weight in weights)
        for weight, other in zip(weights[1:], others, strict=True):
            if not np.array_equal(first.view(np.uint8), other.view(np.uint8)):
                raise ReshardError(
                    f"--experts together: {weights[0]} and {weight} have different A, and PEFT has one for both"
                )

    def _whole(self, name: str) -> np.ndarray:
        return np.array(self.adapter.read_rows(name, 0, self.adapter.tensors[name].shape[0]))

    def compute(self, name: str, start: int, stop: int) -> np.ndarray:
        """Put rows of a matrix of all experts together."""
        fused = self.fused.get(name)
        if fused is None:
            return self.adapter.compute(name, start, stop)
        if fused.matrix == B:
            read = self._in_turn if fused.interleaved else self._stacked
            by_expert = [read(parts, start, stop) for parts in fused.parts]
            return np.stack(by_expert, 2).reshape(stop - start, -1)
        return self._stacked([parts[0] for parts in fused.parts], start, stop)

    def _stacked(self, names: list[str], start: int, stop: int) -> np.ndarray:
        """Return rows `start` .. `stop` of tensors that lie one above the other."""
        pieces, before = [], 0
        for name in names:
            rows = self.adapter.tensors[name].shape[0]
            first, last = max(start - before, 0), min(stop - before, rows)
            if first < last:
                pieces.append(np.array(self.adapter.read_rows(name, first, last)))
            before += rows
        return np.concatenate(pieces)

    def _in_turn(self, names: list[str], start: int, stop: int) -> np.ndarray:
        """Return rows `start` .. `stop` of tensors of which one row of each lies below the other in turn."""
        first, last = start // len(names), -(-stop // len(names))
        pieces = [np.array(self.adapter.read_rows(name, first, last)) for name in names]
        rows = np.stack(pieces, 1).reshape((last - first) * len(names), -1)
        return rows[start - first * len(names) :][: stop - start]

    def strips(self, name: str) -> list[Strip] | None:
        return None if name in self.fused else self.adapter.strips(name)

    def spans(self, file: str) -> list[tuple[int, int]]:
        return self.adapter.spans(file)

    def hf_directory(self) -> Path | None:
        return self.adapter.hf_directory()

    def hf_files(self) -> dict[str, Path]:
        return self.adapter.hf_files()

    def read_files(self) -> list[Path]:
        return self.adapter.read_files()

    def identity(self) -> tuple[list[Any], list[Any]]:
        contents, places = self.adapter.identity()
        return [*contents, self.kind], places

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with self.adapter.unchanged():
            yield

    def close(self) -> None:
        self.adapter.close()
