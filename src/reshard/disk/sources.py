"""Anything that holds a model's weights, read as canonical tensors: a Hugging Face directory or a Megatron
checkpoint."""

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Placement
from reshard.core.planner import PlanError, Transfer, make_plan
from reshard.disk import nvfp4, packed
from reshard.disk.channels import METHOD, SUFFIX
from reshard.disk.compressed import compressed, of_activations
from reshard.disk.dequantised import Codes, Fp4, Words, dequantise, fp8_blocks
from reshard.disk.files import OpenFiles
from reshard.disk.fp8 import SCALE_SUFFIX
from reshard.disk.hub import local_directory
from reshard.disk.locate import (
    HF_FILES,
    ITERATION,
    OF_TRAINERS,
    config_beside,
    config_of_args,
    locate,
    model_named,
)
from reshard.disk.manifest import NAME as MANIFEST
from reshard.disk.manifest import read_manifest
from reshard.disk.modelopt import CONFIG as MODELOPT_CONFIG
from reshard.disk.modelopt import METHOD as MODELOPT
from reshard.disk.modelopt import optimized, quantisation_beside
from reshard.disk.streams import Scratch, Strip, StripReader, TensorInfo, strip_of
from reshard.formats import safetensors, torch_dist, torch_zip
from reshard.formats.small_files import MAX_COPIED_BYTES, read_json
from reshard.megatron.checkpoint import placement_of_keys, refuse_others, vocab_rows
from reshard.megatron.parameters import Mapping, expand
from reshard.models.config_fields import ignored_config_fields
from reshard.models.model import Model

READERS = 16  # of small tensors, which wait for a disk or a network, not for a core
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
    ".distcp",
    ".ckpt",
)


class Source(ABC):
    """A model's weights as canonical tensors.

    `tensors` are shapes and dtypes by published name (quantised ones already as what they dequantise to),
    `copies` the names in it that repeat another tensor, `mapping` the expanded table, `notices` what a user
    should be told.
    """

    kind: str
    path: Path
    model: Model
    mapping: Mapping
    tensors: dict[str, TensorInfo]
    copies: dict[str, str]
    notices: list[str]
    files: OpenFiles

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` .. `stop` of a canonical tensor, ``[rows, columns]``; valid until the thread's next
        call."""

    @abstractmethod
    def strips(self, name: str) -> list[Strip] | None:
        """Where the rows of a canonical tensor lie; None where they are made of what is stored (codes and scales)."""

    def row_multiple(self, name: str) -> int:
        """How many rows are best read together."""
        return 1

    @abstractmethod
    def hf_directory(self) -> Path | None:
        """Where config, tokenizer and generation config are."""

    def hf_files(self) -> dict[str, Path]:
        """The files beside the weights of a Hugging Face checkpoint, by name: config, tokenizer, generation
        config, chat template."""
        return {p.name: p for p in self._beside() if p.stat().st_size <= MAX_COPIED_BYTES}

    @abstractmethod
    def read_files(self) -> list[Path]:
        """Every file that a conversion of this source reads, or would if it were there: weights, indexes,
        configs, manifest."""

    def _beside(self) -> list[Path]:
        directory = self.hf_directory()
        return [] if directory is None else files_beside(directory)

    def _note_large_files(self) -> None:
        """Say which files beside the weights are too large for a config or a tokenizer, and are left
        behind."""
        large = [
            f"{p.name} ({p.stat().st_size:,} bytes)"
            for p in self._beside()
            if p.stat().st_size > MAX_COPIED_BYTES
        ]
        if large:
            self.notices.append(f"not copied, larger than any tokenizer: {listed(large, 3)}")

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, where there is one."""
        return None

    def describe(self) -> dict[str, Any]:
        """What `inspect` shows of this format only."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


def files_beside(directory: Path) -> list[Path]:
    """The files of a Hugging Face directory that are no weights: config, tokenizer, whatever else but how weights are quantised, which
    vLLM would take for that of the next weights."""
    apart = (MANIFEST, MODELOPT_CONFIG, *OF_TRAINERS)
    files = [p for p in sorted(directory.iterdir()) if p.is_file() and p.name not in apart]
    return [p for p in files if not p.name.startswith(".") and not p.name.endswith(WEIGHT_SUFFIXES)]


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face ``config.json``. Raises ReshardError where it is missing or not a JSON object."""
    return read_json(path)


class HuggingFaceSource(Source):
    """A Hugging Face directory. Weights that are stored as codes with scales read as `dequantize_to`; without it fp8 with
    128x128 block scales as bf16, and what compressed-tensors or modelopt has quantised in the config's dtype."""

    kind = "huggingface"

    def __init__(self, path: Path, dequantize_to: Dtype | None = None) -> None:
        self.path, self.notices = path, []
        self.config = read_config(path / "config.json")
        with ignored_as_recorded(path):
            self.model = Model.from_hf(self.config, str(path / "config.json"))
        self.notices += self.model.ignored.values()
        self.stored = safetensors.read_directory(path)
        self.files, self.scratch = OpenFiles(), Scratch()
        self.paths = {tensor.file: path / tensor.file for tensor in self.stored.values()}
        prefix = f"model.layers.{self.model.num_layers}."
        if self.model.mtp_layers and not any(name.startswith(prefix) for name in self.stored):
            self.notices.append(
                f"config.json announces {self.model.mtp_layers} MTP layers, but the files "
                f"have none; converted without"
            )
            self.model = replace(self.model, mtp_layers=0)
        self._count()
        self.mapping = expand(self.model)
        self._quantization(dequantize_to)
        self._check()
        self._note_large_files()

    def _count(self) -> None:
        """Raise ReshardError where the config speaks of more layers or experts than there are tensors, before
        they are listed."""
        model = self.model
        for what, n in (
            ("layers", model.num_layers + model.mtp_layers),
            ("experts in all layers", model.num_experts * len(model.moe_layers)),
        ):
            if n > len(self.stored):
                raise ReshardError(
                    f"{self.path}/config.json says {n:,} {what}, but the files hold only "
                    f"{len(self.stored):,} tensors"
                )

    def _quantization(self, dequantize_to: Dtype | None) -> None:
        """Find weights that are stored as codes, and their scales."""
        config = self.config.get("quantization_config") or quantisation_beside(self.path, self.stored)
        if not isinstance(config, dict):
            raise ReshardError(f"{self.path}: quantization_config is {config!r:.80}, not an object")
        method = config.get("quant_method")
        self.compressed, self.optimized = method == METHOD, method == MODELOPT
        self.left, dtype = list[str](), "bfloat16"
        if self.compressed or self.optimized:
            if self.compressed:
                self.codes = compressed(config, self.stored, str(self.path), self._numbers)
            else:
                self.codes = optimized(config, self.stored, str(self.path))
            self.left = of_activations(self.stored)
            named = self.config.get("dtype") or self.config.get("torch_dtype")
            dtype = named if named in ("float16", "float32") else dtype
        elif method in (None, "fp8"):
            self.codes = fp8_blocks(config, self.stored, str(self.path))
        else:
            raise ReshardError(
                f"{self.path}: weights quantised as {method!r:.80} are not supported, only "
                f"fp8 with block scales, and fp8, int8, int4 and nvfp4 by {METHOD}, and nvfp4 by {MODELOPT}"
            )
        self.dequantize_to = dequantize_to or DTYPES[dtype]
        if self.left:
            self.notices.append(
                "left behind, since only weights are converted: scales of activations and of the key-value cache, "
                f"{listed(self.left, 3)}"
            )

    def _check(self) -> None:
        """Raise ReshardError unless the files hold exactly the table's tensors, with its shapes."""
        apart = {name for codes in self.codes.values() for name in codes.stored} | {*self.left}
        expected, found = self.mapping.shapes, {n: t for n, t in self.stored.items() if n not in apart}
        found |= {name: self._codes_of(name) for name in self.codes}
        missing = [n for n in expected if n not in found and n not in self.mapping.optional]
        extra = [n for n in found if n not in expected and n not in self.mapping.ignored]
        family = self.model.family.name
        if missing or extra:
            parts = [f"lacks {len(missing)} of {family}'s tensors: {listed(missing)}"] if missing else []
            parts += [f"holds {len(extra)} that {family} does not have: {listed(extra)}"] if extra else []
            raise ReshardError(f"{self.path} {'; it '.join(parts)}")
        self.tensors = {}
        for name, shape in expected.items():
            if name not in found:
                continue
            tensor = found[name]
            if tensor.shape != shape:
                raise ReshardError(
                    f"{self.path}: {name} has shape {list(tensor.shape)}, expected "
                    f"{list(shape)} from config.json"
                )
            dtype = tensor.dtype
            coded = dtype.name.startswith("float8") or (self.compressed and dtype.name == "int8")
            if coded and name not in self.codes:
                suffix = SUFFIX if self.compressed or self.optimized else SCALE_SUFFIX
                raise ReshardError(f"{self.path}: {name} is {dtype.name} without {name}{suffix}")
            if not dtype.floating and name not in self.codes:
                raise ReshardError(f"{self.path}: {name} has dtype {dtype.name}, which is not a weight's")
            self.tensors[name] = TensorInfo(shape, self.dequantize_to if name in self.codes else dtype)
        self.copies = {name: primary for name, primary in self.mapping.copies.items() if name in self.tensors}
        ignored = sorted(self.mapping.ignored & set(found))
        if ignored:
            self.notices.append(f"ignored on purpose: {listed(ignored, 3)}")

    def _codes_of(self, name: str) -> safetensors.Tensor:
        """The stored codes of a weight, with the shape that they have once they are unpacked."""
        codes = self.codes[name]
        stored = self.stored[codes.stored[0]]
        return stored if codes.packed is None else replace(stored, shape=codes.packed.shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        columns, codes = self.tensors[name].columns, self.codes.get(name)
        if codes is None:
            return self._rows(self.stored[name], start, stop, columns)
        stored, scales = (self.stored[part] for part in codes.stored[:2])
        weight = self.scratch.array("dequantised", stop - start, columns * self.dequantize_to.size)
        weight = weight.view(self.dequantize_to.numpy())
        first, last = start // codes.block[0], -(-stop // codes.block[0])
        factors = self._rows(scales, first, last, codes.columns(columns), "scales")
        if isinstance(codes.packed, Fp4):
            self._fp4(name, codes, codes.packed.divides, start, factors, weight)
            return weight
        self._check_scales(codes, factors.astype(np.float32))
        if isinstance(codes.packed, Words):
            self._unpack(codes, codes.packed, start, factors, weight)
        else:
            quantised = self._rows(stored, start, stop, columns).view(np.uint8)
            row = start - first * codes.block[0]
            dequantise(quantised, factors, codes.block, row, weight, stored.dtype)
        # fp16 alone has less room than the products.
        if "float16" in (scales.dtype.name, self.dequantize_to.name) and np.isinf(weight).any():
            self._too_large(name, "float16")
        return weight

    def _check_scales(self, codes: Codes, scales: Any) -> None:
        if not np.isfinite(scales).all():
            raise ReshardError(f"{self.path}: {codes.stored[1]} holds infinities or NaN, which are no scales")

    def _too_large(self, name: str, dtype: str) -> NoReturn:
        raise ReshardError(f"{self.path}: {name} has numbers that are too large for {dtype} once dequantised")

    def _unpack(
        self, codes: Codes, words: Words, start: int, factors: np.ndarray, weight: np.ndarray
    ) -> None:
        """Write rows of a weight whose codes are packed in words, from row `start` on."""
        bits, stop, zeros = words.bits, start + len(weight), None
        stored, together = self.stored[codes.stored[0]], 32 // bits
        if words.zeros is not None:
            points = self.stored[words.zeros]
            zeros = self._rows(points, start // together, -(-stop // together), factors.shape[1], "zeros")
        found = self._rows(stored, start, stop, packed.words(weight.shape[1], bits))
        packed.dequantise(found, factors, bits, weight, zeros, start % together)

    def _fp4(
        self, name: str, codes: Codes, divides: bool, start: int, factors: np.ndarray, weight: np.ndarray
    ) -> None:
        """Write rows of a weight that is nvfp4, from row `start` on."""
        largest = nvfp4.largest(factors)
        self._check_scales(codes, largest)
        number = self._rows(self.stored[codes.stored[2]], 0, 1, 1, "number")[0, 0]
        if not (np.isfinite(number) and number > 0):
            raise ReshardError(
                f"{self.path}: {codes.stored[2]} is {number}, and what {'divides' if divides else 'multiplies'} all scales of a weight "
                f"is a positive number: take the checkpoint from where it came once more"
            )
        stored, stop = self.stored[codes.stored[0]], start + len(weight)
        found = self._rows(stored, start, stop, weight.shape[1] // 2)
        nvfp4.dequantise(found, factors, number, divides, weight)
        with np.errstate(over="ignore"):
            largest = (largest / number if divides else largest * number) * nvfp4.LARGEST
        if not np.isfinite(largest.astype(weight.dtype)) and not np.isfinite(weight).all():
            self._too_large(name, self.dequantize_to.name)

    def row_multiple(self, name: str) -> int:
        codes = self.codes.get(name)
        if codes is None or codes.columns(self.tensors[name].columns) == 1:
            return 1
        # Some of a block's rows: its numbers are looked up, and all of them would not stay in the cache.
        return -(-codes.block[0] // 4)

    def strips(self, name: str) -> list[Strip] | None:
        if name in self.codes:
            return None
        info, stored = self.tensors[name], self.stored[name]
        return [Strip(0, info.rows, 0, info.columns, self.paths[stored.file], stored.offset, info.columns)]

    def _numbers(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """The whole numbers that small tensors hold; many are read at once, since they lie all over the files."""

        def read(some: list[str]) -> list[tuple[str, tuple[int, ...]]]:
            tensors = [(name, self.stored[name]) for name in some]
            return [
                (name, tuple(self._rows(tensor, 0, tensor.shape[0], 1)[:, 0].tolist()))
                for name, tensor in tensors
            ]

        names = sorted(names, key=lambda name: (self.stored[name].file, self.stored[name].offset))
        step = -(-len(names) // READERS) or 1
        runs = [names[start : start + step] for start in range(0, len(names), step)]
        try:
            with ThreadPoolExecutor(READERS, "reshard-read") as pool:
                return dict(found for run in pool.map(read, runs) for found in run)
        finally:
            self.files.close()  # nobody else would, where the source is refused by what was found

    def _rows(
        self, stored: safetensors.Tensor, start: int, stop: int, columns: int, use: str = ""
    ) -> np.ndarray:
        """Rows of a stored tensor, valid until the thread asks for others of its dtype and `use`."""
        width = columns * stored.dtype.size
        rows = self.scratch.array(use + stored.dtype.name, stop - start, width)
        self.files.read_into(
            self.paths[stored.file], stored.offset + start * width, memoryview(rows.reshape(-1))
        )
        return rows.view(stored.dtype.numpy())

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """The tensors as the files have them: fp8 weights as fp8, and their scales."""
        return {name: TensorInfo(t.shape, t.dtype) for name, t in self.stored.items()}

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor as the files have it."""
        stored = self.stored[name]
        return self._rows(stored, start, stop, TensorInfo(stored.shape, stored.dtype).columns)

    def hf_directory(self) -> Path | None:
        return self.path

    def read_files(self) -> list[Path]:
        small = [self.path / n for n in ("config.json", MODELOPT_CONFIG, safetensors.INDEX, MANIFEST)]
        return [*small, *self.paths.values(), *self._beside()]

    def manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.path)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"files": len({t.file for t in self.stored.values()})}
        what = "compressed" if self.compressed else MODELOPT if self.optimized else "fp8_blocks"
        return described | ({what: len(self.codes)} if self.codes else {})

    def close(self) -> None:
        self.files.close()


class MegatronSource(Source):
    """A ``torch_dist`` checkpoint of Megatron-Core, whoever wrote it, by its own directory or one that a trainer
    has put it in (`reshard.disk.locate`)."""

    kind = "megatron"

    def __init__(self, path: Path, hf_config: Path | None = None, family: str | None = None) -> None:
        found = locate(path)
        if found is None:
            raise ReshardError(
                f"{path} is no Megatron torch_dist checkpoint: it has neither "
                f"{torch_dist.TRACKER} nor .metadata"
            )
        self.path, self.located = path, found
        self.hf_config, self.root, directory = hf_config, found.root, found.directory
        self.alone = self.root == directory  # an iteration that has all that belongs to it in itself
        self.checkpoint = torch_dist.read(directory, found.iteration)
        refuse_others(self.checkpoint.keys, directory)
        taken = list(found.notices)
        self.config_directory: Path | None = None
        own = hf_config is None or hf_config == found.root / HF_FILES
        with ignored_as_recorded(found.root if own else None):
            self.model, self.config_from = self._model(family, taken)
        self.files = OpenFiles()
        self.mapping = expand(
            self.model, padded_vocab=vocab_rows(self.checkpoint.keys, directory, self.model)
        )
        placed = placement_of_keys(
            self.checkpoint.keys, self.checkpoint.objects, directory, self.model, self.mapping
        )
        manifest = self.manifest()
        recorded = set((manifest or {}).get("tensors", {}))
        # what this tool wrote holds weights and empty states only
        self.notices = taken + (placed.notices if manifest is None else [])
        self.notices += self.model.ignored.values()
        canonical = {n: s for n, s in self.mapping.shapes.items() if n not in self.mapping.copies}
        try:
            self.plan = make_plan(placed.placement, Placement.canonical(canonical))
        except PlanError as error:
            raise ReshardError(
                f"{directory} does not hold every element of the model's tensors: {error}"
            ) from error
        self.transfers = self.plan.by_canonical_tensor()
        self.tensors = {}
        for name, transfers in self.transfers.items():
            dtypes = {self.checkpoint.keys[t.src[0]].dtype.name for t in transfers}
            if len(dtypes) > 1:
                raise ReshardError(
                    f"{directory}: {name} lies in chunks of different dtypes: {listed(sorted(dtypes))}"
                )
            self.tensors[name] = TensorInfo(self.mapping.shapes[name], DTYPES[dtypes.pop()])
        self.copies = {
            n: p for n, p in self.mapping.copies.items() if n not in self.mapping.optional or n in recorded
        }
        self.tensors |= {name: self.tensors[primary] for name, primary in self.copies.items()}
        self.tensors = {name: self.tensors[name] for name in self.mapping.shapes if name in self.tensors}
        self.paths: dict[str, Path] = {}
        self.known_frames: dict[int, list[tuple[bytes, bytes, torch_zip.StoredTensor]]] = defaultdict(list)
        self._note_large_files()
        self.reader = StripReader(self.tensors, self.files)
        self.strip_cache: dict[str, list[Strip]] = {}

    def _model(self, family: str | None, taken: list[str]) -> tuple[Model, str]:
        """The model, and where its config stands; `taken` gets what a user should be told of that."""
        if self.hf_config is not None:
            config = self.hf_config / "config.json" if self.hf_config.is_dir() else self.hf_config
            fields, where = read_config(config), str(config)
        else:
            beside = config_beside(self.located)
            args = dict(self.checkpoint.common().get("args") or {}) if beside is None else {}
            if beside is None:
                beside = config_of_args(args)
            if beside is None:
                return self._model_of_args(args, family)
            fields, where, self.config_directory = beside.fields, beside.where, beside.directory
            taken += [beside.notice] if beside.notice else []
        model = Model.from_hf(fields, where)
        if family not in (None, model.family.name):
            raise ReshardError(
                f"--family {family} contradicts {where}, which is of a {model.family.name}: leave it out"
            )
        args = self.checkpoint.common().get("args") or {}
        model.check_args(
            args,
            f"{self.checkpoint.directory} (args)",
            "pass --hf-config with the config.json that it was trained with",
        )
        if model.mtp_layers and not any(key.startswith("mtp.") for key in self.checkpoint.keys):
            model = replace(model, mtp_layers=0)
        return model, where

    def _model_of_args(self, args: dict[str, Any], family: str | None) -> tuple[Model, str]:
        where, named = f"{self.checkpoint.directory} (args)", model_named(self.located)
        hint = f", such as {named}, with which its training began" if named else ""
        if not args:
            raise ReshardError(
                f"{self.checkpoint.directory} has no args and no {HF_FILES}/config.json: pass "
                f"--hf-config with the model's config.json{hint}"
            )
        if args.get("vocab_size") is None:
            raise ReshardError(
                f"{where} do not say the vocabulary size without padding: pass "
                f"--hf-config with the model's config.json{hint}"
            )
        return Model.from_megatron_args(args, where, family), "args"

    def strips(self, name: str) -> list[Strip]:
        return [self._strip(transfer) for transfer in self.transfers[self.copies.get(name, name)]]

    def _strip(self, transfer: Transfer) -> Strip:
        key, offsets, sizes, before = transfer.src
        stored = self.checkpoint.keys[key].chunks[offsets, sizes]
        tensor, expected = self.tensor_at(stored), self.checkpoint.keys[key].dtype
        path, dtype = self.paths[stored.file], tensor.dtype
        if dtype != expected or [n for n in tensor.shape if n != 1] != [n for n in sizes if n != 1]:
            raise ReshardError(
                f"{path} at byte {stored.offset} holds {dtype.name} {list(tensor.shape)}, .metadata says "
                f"{expected.name} {list(sizes)}: {key}"
            )
        local = self.plan.src.tensors[transfer.src].shape
        return strip_of(transfer.box.offsets, transfer.box.lengths, transfer.src_at, local, path,
                        tensor.offset + before * dtype.size, dtype.size)  # fmt: skip

    def tensor_at(self, stored: torch_dist.Stored) -> torch_zip.StoredTensor:
        """A container's tensor; its offset counts from the start of the file. A container whose bytes around
        the data were seen before is not parsed again."""
        path = self.paths.setdefault(stored.file, self.checkpoint.directory / stored.file)
        head = self.files.read(path, stored.offset, min(1024, stored.length))
        for known, tail, tensor in self.known_frames[stored.length]:
            if (
                head.startswith(known)
                and self.files.read(path, stored.offset + stored.length - len(tail), len(tail)) == tail
            ):
                return replace(tensor, offset=stored.offset + tensor.offset)
        tensor = self.checkpoint.tensor_at(stored)
        relative = replace(tensor, offset=tensor.offset - stored.offset)
        end = relative.offset + prod(tensor.shape) * tensor.dtype.size
        # Containers with checksums in them are all different: a few are remembered, not thousands to look
        # through.
        if (
            relative.offset <= len(head)
            and stored.length - end <= 4096
            and len(self.known_frames[stored.length]) < 16
        ):
            tail = self.files.read(path, stored.offset + end, stored.length - end)
            self.known_frames[stored.length].append((head[: relative.offset], tail, relative))
        return tensor

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        name = self.copies.get(name, name)
        strips = self.strip_cache.get(name)
        if strips is None:
            strips = self.strip_cache[name] = self.strips(name)
        return self.reader.read_rows(name, start, stop, strips)

    def hf_directory(self) -> Path | None:
        if self.hf_config is not None and self.hf_config.is_dir():
            return self.hf_config
        beside = self.config_directory or self.root / HF_FILES
        return beside if beside.is_dir() else None

    def read_files(self) -> list[Path]:
        found, config = self.checkpoint, [] if self.hf_config is None else [self.hf_config]
        chunks = (stored for key in found.keys.values() for stored in key.chunks.values())
        names = {
            ".metadata",
            "metadata.json",
            "common.pt",
            *(stored.file for stored in (*chunks, *found.objects.values())),
        }
        small = [
            self.root / torch_dist.TRACKER,
            self.root / MANIFEST,
            (self.config_directory or self.root / HF_FILES) / "config.json",
            *config,
        ]
        return [*small, *(found.directory / name for name in sorted(names)), *self._beside()]

    def hf_files(self) -> dict[str, Path]:
        files = super().hf_files()
        if self.hf_config is not None and self.hf_config.is_file():
            files["config.json"] = self.hf_config
        return files

    def manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.root)

    def describe(self) -> dict[str, Any]:
        files = {stored.file for key in self.checkpoint.keys.values() for stored in key.chunks.values()}
        return {
            "iteration": self.checkpoint.iteration,
            "files": len(files),
            "keys": len(self.checkpoint.keys),
            "config": self.config_from,
        }

    def close(self) -> None:
        self.files.close()


@contextlib.contextmanager
def ignored_as_recorded(directory: Path | None) -> Iterator[None]:
    """Inside, the fields of a config are ignored that were when this directory was written: its weights
    belong to the model without them."""
    manifest = None if directory is None else read_manifest(directory)
    with ignored_config_fields(*(manifest or {}).get("ignored_config_fields", ()), recorded=True):
        yield


def open_source(
    path: Path,
    hf_config: Path | None = None,
    family: str | None = None,
    dequantize_to: Dtype | None = None,
) -> Source:
    """Open a directory of either format. Raises ReshardError where it is none."""
    if not path.exists():
        raise ReshardError(f"{path} does not exist")
    if not path.is_dir():
        raise ReshardError(f"{path} is not a directory")
    if locate(path) is not None:
        return MegatronSource(path, hf_config, family)
    check_huggingface(path)
    return HuggingFaceSource(path, dequantize_to)


def check_huggingface(path: Path) -> None:
    """Raise ReshardError where a directory that is no Megatron checkpoint is none of Hugging Face's either."""
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return
    if ITERATION.fullmatch(path.name) or any(path.glob("*.distcp")):
        raise ReshardError(f"{path} has no .metadata: it is no torch_dist checkpoint, or is not complete")
    raise ReshardError(
        f"{path} is neither a Hugging Face directory (config.json) nor a Megatron torch_dist checkpoint "
        f"({torch_dist.TRACKER})"
    )


def read_model(path: str) -> Model:
    """The model that a config describes: a ``config.json``, a directory of either format, or a hub id, of
    which only the config is fetched. Raises ReshardError where it cannot be read."""
    if Path(path).is_file():
        return Model.from_hf(read_config(Path(path)), path)
    directory = local_directory(path, ["config.json"])
    if (directory / "config.json").is_file():
        with ignored_as_recorded(directory):
            return Model.from_hf(read_config(directory / "config.json"), str(directory / "config.json"))
    source = open_source(directory)
    try:
        return source.model
    finally:
        source.close()
