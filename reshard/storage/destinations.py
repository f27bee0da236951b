"""The files of either format, laid out before a byte is written: where each canonical tensor goes, and all that
stands beside the weights. Who writes the tensors' bytes, one process or the ranks of a trainer, is not said
here: the same weights give the same files."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.placement import Placement
from reshard.core.planner import make_plan
from reshard.formats import safetensors, torch_dist
from reshard.megatron.arguments import arguments, checkpoint_args
from reshard.megatron.checkpoint import chunks_to_write, extra_states_to_write
from reshard.megatron.flags import FLAGS_FILE, command_line
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import expand, padded_vocab_size
from reshard.models.model import Model
from reshard.storage.files import OpenFiles
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import file_entry, manifest_json, printable
from reshard.storage.paths import HF_FILES
from reshard.storage.quantized import Quantized
from reshard.storage.rank_files import RankFiles, file_bytes
from reshard.storage.source import has_tokenizer
from reshard.storage.streams import Strip, TensorInfo, grouped_strips, strip_of
from reshard.storage.workdir import Workdir

# The largest file that transformers wrote for years, unless told otherwise.
MAX_SHARD_BYTES = 5 * 10**9


class Destination(ABC):
    """What is to be written.

    `sizes` are the bytes of the files with weights, `stored` the tensors as they are listed in the manifest
    (codes of weights and their scales apart), `format` the name of the format there.
    """

    format: str
    sizes: dict[str, int]
    stored: dict[str, TensorInfo]

    @cached_property
    @abstractmethod
    def strips(self) -> dict[str, list[Strip]]:
        """Where the rows of each stored tensor go; paths are relative to the destination. What is none of
        these strips is zero, or a frame."""

    @abstractmethod
    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        """Write everything but the tensors' bytes of the named files, below `root`."""

    @abstractmethod
    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        """The head of the manifest."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes | str]:
        """The files without weights, by name."""

    @abstractmethod
    def entries(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of each file with weights."""

    def finish(self, work: Workdir, fields: dict[str, Any], checksums: dict[str, str], sync: bool) -> None:
        """Write the files without weights, and the manifest of all."""
        data = {
            name: text.encode() if isinstance(text, str) else text
            for name, text in self.small_files().items()
        }
        entries = self.entries() | {name: file_entry(len(found), [found]) for name, found in data.items()}
        data[MANIFEST] = manifest_json(fields, self.stored, checksums, entries).encode()
        for name, found in data.items():
            work.write_file(name, found, sync)


class MegatronFiles(Destination):
    """A ``torch_dist`` checkpoint of canonical `tensors` at a layout; `copies` are those that are not stored,
    `beside` the files for its ``hf/``. With `alone` it is the directory of an iteration, which has all of that in itself.

    Raises ReshardError for a layout, or a version of Megatron-LM, that the model does not go with.
    """

    format = "megatron torch_dist"

    def __init__(
        self,
        model: Model,
        layout: MegatronLayout,
        tensors: dict[str, TensorInfo],
        copies: Mapping[str, str],
        beside: Mapping[str, Path],
        *,
        transformer_impl: str,
        make_vocab_size_divisible_by: int,
        iteration: int | None,
        megatron_lm: tuple[int, int],
        alone: bool = False,
    ) -> None:
        layout.check(model)
        self.model, self.layout, self.stored, self.beside = model, layout, tensors, beside
        self.transformer_impl, self.iteration = transformer_impl, iteration
        vocab = padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, layout.tp)
        mapping = expand(model, transformer_impl, vocab)
        chunks = list(chunks_to_write(model, mapping, layout, transformer_impl))
        shapes = {n: t.shape for n, t in tensors.items() if n not in copies}
        self.plan = make_plan(Placement.canonical(shapes), Placement.of(shapes, (c.tensor for c in chunks)))
        self.directory = "release" if iteration is None else f"iter_{iteration:07d}"
        states = extra_states_to_write(model, mapping, layout, transformer_impl)
        self.within = "" if alone else f"{self.directory}/"
        self.rank_files = RankFiles(self.directory, self.within, chunks, states, tensors)
        self.sizes = self.rank_files.sizes()
        self.dtype = tensors[next(iter(tensors))].dtype
        self.args = arguments(
            model, layout, vocab, make_vocab_size_divisible_by, self.dtype, transformer_impl
        )
        self.flags = command_line(self.args, megatron_lm, has_tokenizer(beside))
        # Thousands of objects to pickle, which may be done while tensors are written.
        self.metadata: Callable[[], bytes] = self.rank_files.metadata

    @cached_property
    def strips(self) -> dict[str, list[Strip]]:
        return self.rank_files.strips(self.plan)

    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        self.rank_files.write_containers(root, names, files)

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        return {"format": self.format, "family": family, "source": printable(source), "layout": asdict(self.layout),
                "world_size": self.layout.world_size(self.model), "transformer_impl": self.transformer_impl,
                "iteration": self.directory, "quantized": quantized}  # fmt: skip

    def small_files(self) -> dict[str, bytes | str]:
        iteration = self.iteration or 0
        saved = checkpoint_args(self.args, self.layout.world_size(self.model), self.dtype, iteration)
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        small: dict[str, bytes | str] = {
            f"{self.within}.metadata": self.metadata(),
            f"{self.within}common.pt": torch_dist.common_bytes(saved, iteration, content),
            f"{self.within}metadata.json": json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}),
            FLAGS_FILE: "\n".join(self.flags) + "\n",
        }  # fmt: skip
        if self.within:
            small[torch_dist.TRACKER] = "release" if self.iteration is None else str(iteration)
        return small | {f"{HF_FILES}/{name}": path.read_bytes() for name, path in self.beside.items()}

    def entries(self) -> dict[str, dict[str, Any]]:
        return self.rank_files.entries()


class HuggingFaceFiles(Destination):
    """A Hugging Face directory of canonical `tensors`; `quantized` says which are, and how, `beside` are config,
    tokenizer and generation config. `shard_bytes` None is 5 GB, or less where a model would not fill 16 files,
    which are written at once, but not less than 1 GB."""

    format = "huggingface"

    def __init__(
        self,
        model: Model,
        fp32: frozenset[str],
        tensors: dict[str, TensorInfo],
        quantized: Quantized,
        shard_bytes: int | None,
        beside: Mapping[str, Path],
    ) -> None:
        self.model, self.fp32, self.tensors, self.quantized, self.beside = (
            model,
            fp32,
            tensors,
            quantized,
            beside,
        )
        laid_out: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
        for name, info in tensors.items():
            laid_out |= quantized.stored(name, info)
        if shard_bytes is None:
            total = sum(prod(shape) * dtype.size for dtype, shape in laid_out.values())
            shard_bytes = min(MAX_SHARD_BYTES, file_bytes(total))
        self.shard_bytes = shard_bytes
        self.new_files = safetensors.plan_files(laid_out, shard_bytes)
        self.placed = {name: tensor for file in self.new_files for name, tensor in file.tensors.items()}
        self.sizes = {file.name: file.size_bytes for file in self.new_files}
        self.stored = {name: TensorInfo(t.shape, t.dtype) for name, t in self.placed.items()}

    @cached_property
    def strips(self) -> dict[str, list[Strip]]:
        paths = {name: Path(name) for name in self.sizes}
        zero = {name: (0,) * len(t.shape) for name, t in self.placed.items()}
        return grouped_strips(
            (n, strip_of(zero[n], t.shape, zero[n], t.shape, paths[t.file], t.offset, t.dtype.size))
            for n, t in self.placed.items()
        )

    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        for file in self.new_files:
            if file.name in names:
                files.write(root / file.name, 0, file.head)

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        return {"format": self.format, "family": family, "source": printable(source), "quantized": quantized}

    def small_files(self) -> dict[str, bytes | str]:
        small: dict[str, bytes | str] = {name: path.read_bytes() for name, path in self.beside.items()}
        small["config.json"] = self._config_json(small.get("config.json"))
        index = safetensors.index_json(self.new_files)
        return small if index is None else small | {safetensors.INDEX: index}

    def entries(self) -> dict[str, dict[str, Any]]:
        return {
            file.name: file_entry(file.size_bytes, [file.head], around_tensors=True)
            for file in self.new_files
        }

    def _config_json(self, original: bytes | str | None) -> bytes | str:
        """config.json: as it was, but for dtype and quantization where those changed."""
        config = dict(self.model.config) if original is None else json.loads(original)
        before = json.dumps(config)
        key = "dtype" if "dtype" in config else "torch_dtype"
        dtype = next(t.dtype.name for n, t in self.tensors.items() if n not in self.fp32)
        if self.quantized.names:
            matrices = [name for name, info in self.tensors.items() if len(info.shape) == 2]
            kept = {name.removesuffix(".weight") for name in matrices if name not in self.quantized.names}
            original_config = config.get("quantization_config")
            config["quantization_config"] = self.quantized.config(original_config, sorted(kept | {"lm_head"}))
        else:
            config.pop("quantization_config", None)
        if config.get(key) != dtype:
            config[key] = dtype
        if original is not None and json.dumps(config) == before:
            return original
        return json.dumps(config, indent=2) + "\n"


def parse_size(size: str | int) -> int:
    """Bytes of ``5GB``, ``500MB``, ``1.5GiB`` or a number. Raises ReshardError for anything else."""
    units = {
        "": 1,
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
        raise ReshardError(f"--max-shard-size {size} is not a size such as 5GB or 500MB") from error
    if value < 1:
        raise ReshardError(f"--max-shard-size {size} is less than a byte")
    return value
