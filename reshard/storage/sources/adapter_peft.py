"""A PEFT directory: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.core.views import tensor_of
from reshard.formats import safetensors
from reshard.formats.small_files import read_json
from reshard.lora.names import A, B, peft_name
from reshard.lora.parameters import Adapter, linear_layers
from reshard.lora.peft_config import CONFIG, WEIGHTS, check_plain, scales_of
from reshard.megatron.parameters import ModelParameters, expand
from reshard.models.model import Model
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, StripReader, TensorInfo, strips_of_view
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.adapter import AdapterSource
from reshard.storage.sources.base import read_config
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.versions import FileVersions


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
        self.stored = safetensors.read_header(path / WEIGHTS)
        self.files = OpenFiles()
        self.base = expand(self.model)
        self.adapters = self._adapters()
        self.mapping = ModelParameters(
            {n: i.shape for n, i in self.tensors.items()}, [], {}, frozenset(), frozenset(), frozenset()
        )
        ranks = {name: rank for adapter in self.adapters for name, rank in adapter.ranks.items()}
        self.scales = scales_of(self.config, ranks, path / CONFIG)
        self.reader = StripReader(self.tensors, self.files)

    def _model(self) -> Model:
        assert self.config_path is not None
        self.versions.record(self.config_path)
        return Model.from_hf(read_config(self.config_path), str(self.config_path))

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
        """Return the layers that have an adapter, and note their tensors. Raises ReshardError where A and B
        do not fit one another or the model, or where tensors are left over."""
        self.tensors: dict[str, TensorInfo] = {}
        adapters, wrong = [], []
        for layer in linear_layers(self.base):
            ranks: dict[str, int] = {}
            for weight in (name for expert in range(len(layer.weights)) for name in layer.published(expert)):
                name_a, name_b = peft_name(weight, A), peft_name(weight, B)
                a, b = (self.stored.get(tensor_of(name)) for name in (name_a, name_b))
                if a is None or b is None:
                    continue
                out, columns = self.base.shapes[weight]
                rank = a.shape[0] if a.shape else 0
                of_tensor = b.shape[0] if "[" in weight else out
                if a.shape != (rank, columns) or b.shape != (of_tensor, rank) or rank < 1:
                    wrong.append(
                        f"{tensor_of(name_a)} {list(a.shape)} and B {list(b.shape)} for [{out}, {columns}]"
                    )
                    continue
                ranks[weight] = rank
                self.tensors[name_a] = TensorInfo((rank, columns), a.dtype)
                self.tensors[name_b] = TensorInfo((out, rank), b.dtype)
            if ranks:
                adapters.append(Adapter(layer, ranks))
        if wrong:
            raise ReshardError(f"{self.path}: A and B do not fit {self.model.where}: {listed(wrong, 2)}")
        left = set(self.stored) - {tensor_of(name) for name in self.tensors}
        if left:
            raise ReshardError(
                f"{self.path} holds {len(left)} tensors that are no A or B of a linear layer of "
                f"{self.model.family.name}: {listed(sorted(left), 3)}"
            )
        if not adapters:
            raise ReshardError(f"{self.path} holds no adapter")
        return adapters

    def strips(self, name: str) -> list[Strip]:
        tensor = self.stored[tensor_of(name)]
        return strips_of_view(name, tensor.shape, self.path / tensor.file, tensor.offset, tensor.dtype.size)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.reader.read_rows(name, start, stop, self.strips(name))

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
