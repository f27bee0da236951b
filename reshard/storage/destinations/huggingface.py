"""A Hugging Face directory, laid out before a byte is written."""

import json
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import OptionError
from reshard.core.views import tensor_of, tensor_shapes
from reshard.formats import safetensors
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file
from reshard.models.family import architectures
from reshard.models.model import Model
from reshard.models.without_table import single_numbers
from reshard.storage.destinations.base import Destination
from reshard.storage.destinations.rank_files import file_bytes
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, largest_matrix, strips_of_view
from reshard.storage.manifest import file_entry, printable
from reshard.storage.quantized import Quantized

# The largest file that transformers wrote for years, unless told otherwise.
MAX_SHARD_BYTES = 5 * 10**9


class HuggingFaceFiles(Destination):
    """A Hugging Face directory of canonical `tensors`.

    `quantized` says which are stored as codes, and how; `beside` are config, tokenizer and
    generation config. `shard_bytes` None is 5 GB, or less where a model would not fill 16 files,
    which are written at once, but not less than 1 GB. `packed` has the parts of tensors that canonical ones
    become.
    """

    format = "huggingface"

    def __init__(
        self,
        model: Model,
        fp32: frozenset[str],
        tensors: dict[str, TensorInfo],
        quantized: Quantized,
        shard_bytes: int | None,
        beside: Mapping[str, Path],
        packed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.places = {name: packed.get(name, name) for name in tensors}
        self.model, self.fp32, self.tensors, self.quantized, self.beside = (
            model,
            fp32,
            tensors,
            quantized,
            beside,
        )
        laid_out: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
        views = {name: info for name, info in tensors.items() if tensor_of(self.places[name]) != name}
        shapes = tensor_shapes({self.places[name]: info.shape for name, info in views.items()})
        singles = single_numbers(model)
        for name, info in tensors.items():
            if name in singles:
                laid_out[name] = (info.dtype, ())
            elif name in views:
                tensor = tensor_of(self.places[name])
                laid_out[tensor] = (info.dtype, shapes[tensor])
            else:
                laid_out |= quantized.stored(name, info)
        if shard_bytes is None:
            total = sum(prod(shape) * dtype.size for dtype, shape in laid_out.values())
            shard_bytes = min(MAX_SHARD_BYTES, file_bytes(total))
        self.shard_bytes = shard_bytes
        self.new_files = self._plan_files(laid_out)
        self.placed = {name: tensor for file in self.new_files for name, tensor in file.tensors.items()}
        self.sizes = {file.name: file.size_bytes for file in self.new_files}
        whole = {n: TensorInfo(t.shape, t.dtype) for n, t in self.placed.items() if n not in shapes}
        self.stored = whole | {name: tensors[name] for name in singles} | views

    def _plan_files(self, tensors: dict[str, tuple[Dtype, tuple[int, ...]]]) -> list[safetensors.NewFile]:
        return safetensors.plan_files(tensors, self.shard_bytes)

    @cached_property
    def strips(self) -> dict[str, list[Strip]]:
        paths = {name: Path(name) for name in self.sizes}
        strips = {}
        for name in self.stored:
            place = self.places.get(name, name)
            tensor = self.placed[tensor_of(place)]
            where = (paths[tensor.file], tensor.offset, tensor.dtype.size)
            strips[name] = strips_of_view(place, tensor.shape, *where)
        return strips

    def matrix_bytes(self) -> int:
        return largest_matrix(self.places.values(), self.placed)

    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        for file in self.new_files:
            if file.name in names:
                files.write(root / file.name, 0, file.head)

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        return {"format": self.format, "family": family, "source": printable(source), "quantized": quantized}

    def small_files(self) -> dict[str, bytes | str]:
        small: dict[str, bytes | str] = {
            name: read_file(path, MAX_COPIED_BYTES) for name, path in self.beside.items()
        }
        small["config.json"] = self._config_json(small.get("config.json"))
        index = safetensors.index_json(self.new_files)
        return small if index is None else small | {safetensors.INDEX: index}

    def entries(self) -> dict[str, dict[str, Any]]:
        return {
            file.name: file_entry(file.size_bytes, [file.head], around_tensors=True)
            for file in self.new_files
        }

    def _config_json(self, original: bytes | str | None) -> bytes | str:
        """Return config.json as it was, but for dtype and quantization where those changed, and the names of
        classes that FSDP has made, which no engine knows."""
        config = dict(self.model.config) if original is None else json.loads(original)
        before = json.dumps(config)
        # Kimi-K2.5 has the language model's quantization in its part of the config.
        text = config.get("text_config") if self.model.wrapped else None
        inner = text if isinstance(text, dict) and "quantization_config" in text else config
        if config.get("architectures"):
            config["architectures"] = architectures(config)
        key = "dtype" if "dtype" in config else "torch_dtype"
        weights = [t.dtype for n, t in self.tensors.items() if n not in self.fp32]
        dtypes = [dtype.name for dtype in weights if dtype.floating]
        dtype = config.get(key) if config.get(key) in dtypes else max(sorted({*dtypes}), key=dtypes.count)
        if self.quantized.names:
            matrices = [name for name, info in self.tensors.items() if len(info.shape) == 2]
            unquantized = {tensor_of(name) for name in matrices if name not in self.quantized.names}
            kept = {name.removesuffix(".weight") for name in unquantized}
            original_config = inner.get("quantization_config")
            inner["quantization_config"] = self.quantized.config(original_config, sorted(kept | {"lm_head"}))
        else:
            inner.pop("quantization_config", None)
            config.pop("quantization_config", None)
        config.pop("compression_config", None)
        if config.get(key) != dtype:
            config[key] = dtype
        if original is not None and json.dumps(config) == before:
            return original
        return json.dumps(config, indent=2) + "\n"


def parse_size(size: str | int) -> int:
    """Return the bytes of ``5GB``, ``500MB`` or ``1.5GiB``, or an int as it is. Raises ReshardError
    for anything else, also for text without a unit."""
    if isinstance(size, int) and not isinstance(size, bool):
        size = f"{size}b"
    units = {
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
    }
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    try:
        value = int(float(number) * units[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError) as error:
        raise OptionError(f"--max-shard-size {size} is not a size such as 5GB or 500MB") from error
    if value < 1:
        raise OptionError(f"--max-shard-size {size} is less than a byte")
    return value
