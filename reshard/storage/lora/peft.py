"""A PEFT directory: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.core.views import tensor_of, tensor_shapes
from reshard.formats import safetensors
from reshard.formats.small_files import read_json
from reshard.lora.checkpoint import check_supported
from reshard.lora.experts import ExpertsParameter, experts_parameter
from reshard.lora.names import PEFT_PREFIX, A, B, module_of, peft_name
from reshard.lora.parameters import (
    Adapter,
    LinearLayer,
    linear_layers,
    other_layers,
    output_layers,
    published_layers,
)
from reshard.lora.peft_config import CONFIG, WEIGHTS, check_plain, scales_of
from reshard.megatron.parameters import ModelParameters, expand
from reshard.models.model import Model
from reshard.models.without_table import ClassFamily, any_model
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, strips_of_view
from reshard.storage.lora.names import module_in_file, peft_names
from reshard.storage.lora.source import AdapterSource
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.base import read_config
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.versions import FileVersions


class ExpertMatrix(NamedTuple):
    """The place of an expert's matrix in the one of all experts: the stored `tensor`, its first `row` there, and the
    rows from one of its own to the next."""

    tensor: str
    expert: int
    row: int
    step: int = 1


class PeftSource(AdapterSource):
    """A LoRA adapter in PEFT's files, of `model`, or of the one that `hf_config` describes: by default the one
    in the directory that the adapter's config names.

    Raises ReshardError, naming it, for what is more than A and B of linear layers of that model.
    """

    kind = "peft"

    def __init__(self, path: Path, hf_config: Path | None = None, model: Model | None = None) -> None:
        self.path, self.notices, self.copies = path, [], {}
        self.versions = FileVersions(path)
        self.config = read_json(path / CONFIG)
        check_plain(self.config, path / CONFIG)
        named = self.config.get("base_model_name_or_path")
        self.base_name = named if isinstance(named, str) and named else None
        self.config_path = None if model is not None else self._config_path(hf_config)
        self.model = self._model() if model is None else model
        self.notices += self.model.notices
        if not (path / WEIGHTS).is_file() and (path / "adapter_model.bin").is_file():
            raise ReshardError(
                f"{path} has its adapter as a pickle (adapter_model.bin), which is not read: save it with "
                f"save_pretrained(safe_serialization=True) first"
            )
        self.base = expand(self.model)
        self.stored = self._as_peft_names(safetensors.read_header(path / WEIGHTS))
        self.files = OpenFiles()
        self.adapters = self._adapters()
        self.mapping = ModelParameters(
            {n: i.shape for n, i in self.tensors.items()}, [], {}, frozenset(), frozenset(), frozenset()
        )
        ranks = {name: rank for adapter in self.adapters for name, rank in adapter.ranks.items()}
        of_modules = {
            name: f"{module}.weight" for name in ranks if (module := self._in_file.get(module_of(name)))
        }
        self.scales = scales_of(self.config, ranks, path / CONFIG, of_modules | self.scale_names)

    def _as_peft_names(self, stored: dict[str, safetensors.Tensor]) -> dict[str, safetensors.Tensor]:
        """Return the tensors of the file under PEFT's names, and note those that had others."""
        experts = [experts_parameter(layer, self.model) for layer in self._layers() if layer.of_experts]
        names = peft_names(stored, self.base, self.model, experts)
        # Patterns of the config are of the names that whoever wrote it knows.
        self._in_file = {module_in_file(named): module_in_file(name) for name, named in names.items()}
        others = sorted(name for name, named in names.items() if name != named)
        if others:
            self.notices.append(
                f"read under PEFT's names: {len(others)} tensors such as {others[0]}, which is {names[others[0]]}"
            )
        return {names[name]: tensor for name, tensor in stored.items()}

    def _model(self) -> Model:
        assert self.config_path is not None
        self.versions.record(self.config_path)
        return any_model(read_config(self.config_path), str(self.config_path))

    def _config_path(self, hf_config: Path | None) -> Path:
        directory = hf_config or self._named_directory()
        if directory is not None and directory.is_file():
            return directory
        if directory is None or not (directory / "config.json").is_file():
            named = (
                f"names {self.base_name}, which is neither a directory here nor a model of the hub"
                if self.base_name
                else "names no model"
            )
            raise ReshardError(
                f"{self.path / CONFIG} {named}: pass --hf-config with the config.json of the model, or its directory"
            )
        return directory / "config.json"

    def _named_directory(self) -> Path | None:
        """Return the directory of the model that the config names, a path or a hub id."""
        if self.base_name is None or os.path.isdir(self.base_name):
            return None if self.base_name is None else Path(self.base_name)
        try:
            return local_directory(self.base_name, ["config.json"])
        except ReshardError:
            return None

    def _adapters(self) -> list[Adapter]:
        """Return the layers that have an adapter, and note their tensors. Raises ReshardError if A and B
        do not fit one another or the model, or if tensors are left over."""
        check_supported(self.stored, self.path)
        matrices = {name: shape for name, shape in self.base.shapes.items() if len(shape) == 2}
        self._rows_of_tensors = {name: shape[0] for name, shape in tensor_shapes(matrices).items()}
        self.tensors: dict[str, TensorInfo] = {}
        self.of_all_experts: dict[str, ExpertMatrix] = {}
        self.scale_names: dict[str, str] = {}
        adapters = []
        for layer in self._layers():
            ranks = self._of_all_experts(layer) if layer.of_experts else {}
            weights = (name for expert in range(len(layer.weights)) for name in layer.published(expert))
            for weight in () if ranks else weights:
                rank = self._pair(weight)
                if rank is not None:
                    ranks[weight] = rank
            if ranks:
                adapters.append(Adapter(layer, ranks))
        used = {tensor_of(name) for name in self.tensors} | {m.tensor for m in self.of_all_experts.values()}
        left = sorted(set(self.stored) - used - self._of_base())
        if left:
            self._check_tied(left)
            raise ReshardError(
                f"{self.path} holds {len(left)} tensors that are not A or B of a linear layer of "
                f"{self.model.family.name}: {listed(left, 3)}"
            )
        if not adapters:
            raise ReshardError(f"{self.path} holds no adapter")
        return adapters

    def _layers(self) -> Iterator[LinearLayer]:
        if isinstance(self.model.family, ClassFamily):
            taking = self.model.family.taking_adapters
            yield from published_layers({n: s for n, s in self.base.shapes.items() if n in taking})
            return
        yield from linear_layers(self.base)
        yield from other_layers(self.base)
        yield from output_layers(self.base)

    def _check_tied(self, left: list[str]) -> None:
        """Raise ReshardError if the adapter is of an output layer that is the embedding's weight: adding it would
        change what the model reads, too."""
        for copy, primary in self.base.copies.items():
            if any(name.startswith(f"{PEFT_PREFIX}{module_of(copy)}.") for name in left):
                raise ReshardError(
                    f"{self.path} has an adapter of {copy}, which in this model is {primary} "
                    "(tie_word_embeddings): a merge would change the embedding too, and is refused"
                )

    def _of_base(self) -> set[str]:
        """Return the tensors that are the model's own: PEFT saves the frozen weight of an output layer beside its
        adapter, and embedding and output layer where `save_embedding_layers` says so. Whether they have the
        model's numbers is seen where these are (`MergedSource`). Raises ReshardError for those of another
        vocabulary."""
        self.copies_of_base = {}
        left_out = set()
        for weight, shape in self.base.shapes.items():
            module = f"{PEFT_PREFIX}{module_of(weight)}"
            for name in (f"{module}.base_layer.weight", f"{module}.weight"):
                stored = self.stored.get(name)
                if stored is not None and stored.shape == shape:
                    self.copies_of_base[weight] = name
                    left_out.add(name)
                elif stored is not None and stored.shape[1:] == shape[1:]:
                    raise ReshardError(
                        f"{self.path} holds {name} with {stored.shape[0]} rows, and the model's has "
                        f"{shape[0]}: its vocabulary was resized for the training; give the resized model"
                    )
        if left_out:
            self.notices.append(
                f"left out, as a copy of the model's own, which a merge compares: {listed(sorted(left_out), 2)}"
            )
        return left_out

    def read_copy_of_base(self, weight: str, start: int, stop: int) -> np.ndarray:
        return self._rows(self.copies_of_base[weight], start, stop)

    def _pair(self, weight: str) -> int | None:
        """Keep the matrices of a weight and return their rank; None if there are none. Raises ReshardError
        for matrices that do not fit it."""
        name_a, name_b = peft_name(weight, A), peft_name(weight, B)
        a, b = (self.stored.get(tensor_of(name)) for name in (name_a, name_b))
        if a is None or b is None:
            if a is not b:
                present, missing = (name_a, name_b) if b is None else (name_b, name_a)
                raise ReshardError(f"{self.path} has {tensor_of(present)}, and lacks {tensor_of(missing)}")

            return None
        out, columns = self.base.shapes[weight]
        rank = a.shape[0] if a.shape else 0
        rows = self._rows_of_tensors[tensor_of(weight)]
        for matrix, name in ((a, name_a), (b, name_b)):
            if not matrix.dtype.floating:
                raise ReshardError(
                    f"{self.path}: {tensor_of(name)} is {matrix.dtype.name}, which an adapter is not"
                )
        if a.shape != (rank, columns) or b.shape != (rows, rank) or rank < 1:
            raise ReshardError(
                f"{self.path}: {tensor_of(name_a)} {a.dtype.name} {list(a.shape)} and B {list(b.shape)} do "
                f"not fit the weight [{out}, {columns}] of {self.model.where}"
            )
        self.tensors[name_a] = TensorInfo((rank, columns), a.dtype)
        self.tensors[name_b] = TensorInfo((out, rank), b.dtype)
        return rank

    def _of_all_experts(self, layer: LinearLayer) -> dict[str, int]:
        """Note the matrices of a layer that has those of all experts in one tensor each, as PEFT has them for
        a parameter of transformers 5 (``target_parameters``); return the ranks by weight, none if it has not.

        A is ``[experts * rank, in]``; B is ``[out, rank * experts]``, with the experts of one rank side by side.
        """
        experts, (out, columns) = len(layer.weights), layer.first.shape
        parameter = experts_parameter(layer, self.model)
        for name_a, name_b in self._names_of_all_experts(parameter):
            a, b = self.stored[name_a], self.stored[name_b]
            if not self._check_form(name_a, (a.shape, b.shape), (out, columns), parameter):
                continue
            rank = a.shape[0] // experts
            if rank < 1 or a.shape != (rank * experts, columns) or b.shape != (out, rank * experts):
                raise ReshardError(
                    f"{self.path}: {name_a} {list(a.shape)} and B {list(b.shape)} are not of {experts} experts"
                )
            ranks = {}
            for expert, weight in enumerate(layer.weights):
                for number, part in enumerate(weight.parts):
                    rows = part.box.lengths[0]
                    ranks[part.name] = rank
                    self.scale_names[part.name] = f"{parameter.module}.{parameter.name}.weight"
                    own_a, own_b = peft_name(part.name, A), peft_name(part.name, B)
                    self.tensors[own_a], self.tensors[own_b] = (
                        TensorInfo((rank, columns), a.dtype), TensorInfo((rows, rank), b.dtype)
                    )  # fmt: skip
                    first, step = (number, len(weight.parts)) if parameter.interleaved else (part.at[0], 1)
                    self.of_all_experts[own_a] = ExpertMatrix(name_a, expert, expert * rank)
                    self.of_all_experts[own_b] = ExpertMatrix(name_b, expert, first, step)
            return ranks
        return {}

    def _names_of_all_experts(self, parameter: ExpertsParameter) -> list[tuple[str, str]]:
        """Return the names of the matrices in the file that may be those of a parameter of all experts: of both that a
        module has where it has one pair alone, else by the order in which PEFT wraps them."""
        for module in parameter.modules:
            pairs = {
                below: tuple(f"{PEFT_PREFIX}{module}{'.base_layer' * below}.lora_{m}.weight" for m in (A, B))
                for below in (True, False)
            }
            held = {below: (a, b) for below, (a, b) in pairs.items() if a in self.stored and b in self.stored}
            if len(held) == 2:
                return [held[parameter.is_first]]
            if held:
                return list(held.values())
        return []

    def _check_form(
        self,
        name: str,
        held: tuple[tuple[int, ...], ...],
        weight: tuple[int, int],
        parameter: ExpertsParameter,
    ) -> bool:
        """Return True if matrices are of a weight of this shape. Raises ReshardError for those of PEFT before 0.19,
        which has A where B is for parameters ``[experts, out, in]``."""
        a, b = held
        if len(a) != 2 or len(b) != 2:
            return False
        fits, swapped = ((a[1], b[0]) == shape for shape in (weight[::-1], weight))
        version = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version") or ""))
        old = tuple(map(int, version.groups())) < (0, 19) if version else self.manifest() is None
        if swapped and not parameter.interleaved and (old or not fits):
            raise ReshardError(
                f"{self.path}: {name} and its B are as PEFT before 0.19 has those of {parameter.name}, with in and out "
                f"exchanged, or may be: merge it with the PEFT that saved it"
            )
        return fits

    def strips(self, name: str) -> list[Strip] | None:
        if name in self.of_all_experts:
            return None
        tensor = self.stored[tensor_of(name)]
        return strips_of_view(name, tensor.shape, self.path / tensor.file, tensor.offset, tensor.dtype.size)

    def compute(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of one expert's part of a matrix of all experts."""
        matrix = self.of_all_experts[name]
        first, last = (matrix.row + row * matrix.step for row in (start, stop - 1))
        rows = self._rows(matrix.tensor, first, last + 1)[:: matrix.step]
        rank, width = self.tensors[name].shape[1], rows.shape[1]
        if width == rank or matrix.tensor.endswith(f"lora_{A}.weight"):
            return rows
        return np.ascontiguousarray(rows.reshape(stop - start, rank, width // rank)[:, :, matrix.expert])

    def spans(self, file: str) -> list[tuple[int, int]]:
        return safetensors.spans(t for t in self.stored.values() if t.file == file)

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors of the file: those of all experts as they are stored."""
        apart = {name: info for name, info in self.tensors.items() if name not in self.of_all_experts}
        together = {matrix.tensor: self.stored[matrix.tensor] for matrix in self.of_all_experts.values()}
        return apart | {name: TensorInfo(stored.shape, stored.dtype) for name, stored in together.items()}

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a tensor of `stored_tensors`."""
        return self.read_rows(name, start, stop) if name in self.tensors else self._rows(name, start, stop)

    def every_b(self) -> Iterator[np.ndarray]:
        """Read the B's as they are stored: those of all experts once."""
        for name, info in self.stored_tensors().items():
            if f".lora_{B}." in name:
                yield self.read_stored_rows(name, 0, info.shape[0])

    def _rows(self, tensor: str, start: int, stop: int) -> np.ndarray:
        stored = self.stored[tensor]
        rows = np.empty((stop - start, stored.shape[1] * stored.dtype.size), np.uint8)
        offset = stored.offset + start * rows.shape[1]
        self.files.read_into(self.path / stored.file, offset, memoryview(rows.reshape(-1)))
        return rows.view(stored.dtype.numpy())

    def hf_directory(self) -> Path | None:
        return None

    def hf_files(self) -> dict[str, Path]:
        return {} if self.config_path is None else {"config.json": self.config_path}

    def read_files(self) -> list[Path]:
        own = [self.path / name for name in (CONFIG, WEIGHTS, MANIFEST)]
        return own if self.config_path is None else [*own, self.config_path]

    def manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.path)

    def describe(self) -> dict[str, Any]:
        return self.described_adapter()

    def close(self) -> None:
        self.files.close()
