"""A Hugging Face directory of safetensors files, read as canonical tensors: weights that are stored
as codes are what those stand for."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError, listed
from reshard.formats import safetensors
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.storage import nvfp4, packed
from reshard.storage.channels import METHOD, SUFFIX
from reshard.storage.compressed import compressed, of_activations
from reshard.storage.dequantized import Codes, Fp4, Words, dequantize, fp8_blocks
from reshard.storage.fp8 import SCALE_SUFFIX
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Scratch, Strip, TensorInfo
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import read_manifest
from reshard.storage.modelopt import CONFIG as MODELOPT_CONFIG
from reshard.storage.modelopt import METHOD as MODELOPT
from reshard.storage.modelopt import optimized, quantization_beside
from reshard.storage.sources.base import Source, ignored_as_recorded, read_config
from reshard.storage.sources.paths import check_config
from reshard.storage.sources.versions import FileVersions

READERS = 16  # of small tensors, which wait for a disk or a network, not for a core


class HuggingFaceSource(Source):
    """A Hugging Face directory. Weights that are stored as codes with scales read as
    `dequantize_to`; without it fp8 with 128x128 block scales as bf16, and what
    compressed-tensors or modelopt has quantized in the config's dtype."""

    kind = "huggingface"

    def __init__(self, path: Path, dequantize_to: Dtype | None = None) -> None:
        self.path, self.notices, self.versions = path, [], FileVersions(path)
        check_config(path)
        self.config = read_config(path / "config.json")
        with ignored_as_recorded(path):
            self.model = Model.from_hf(self.config, str(path / "config.json"))
        self.notices += self.model.notices
        self.stored = safetensors.read_directory(path)
        self.files, self.scratch = OpenFiles(), Scratch()
        self.paths = {tensor.file: path / tensor.file for tensor in self.stored.values()}
        unread = sorted(p.name for p in path.glob("*.safetensors") if p.name not in self.paths)
        if unread:
            self.notices.append(f"not read, as transformers and vLLM do not: {listed(unread, 3)}")
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
        """Raise ReshardError where the config speaks of more layers or experts than there are
        tensors, before they are listed."""
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
        config = self.config.get("quantization_config") or quantization_beside(self.path, self.stored)
        if not isinstance(config, dict):
            raise ReshardError(f"{self.path}: quantization_config is {config!r:.80}, not an object")
        self.quantization_config, method = config, config.get("quant_method")
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
                f"{self.path}: weights quantized as {method!r:.80} are not supported, only "
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
        expected, stored = self.mapping.shapes, {n: t for n, t in self.stored.items() if n not in apart}
        stored |= {name: self._codes_of(name) for name in self.codes}
        missing = [n for n in expected if n not in stored and n not in self.mapping.optional]
        extra = [n for n in stored if n not in expected and n not in self.mapping.ignored]
        family = self.model.family.name
        if missing or extra:
            parts = [f"lacks {len(missing)} of {family}'s tensors: {listed(missing)}"] if missing else []
            parts += [f"holds {len(extra)} that {family} does not have: {listed(extra)}"] if extra else []
            raise ReshardError(f"{self.path} {'; it '.join(parts)}")
        self.tensors = {}
        for name, shape in expected.items():
            if name not in stored:
                continue
            tensor = stored[name]
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
        ignored = sorted(self.mapping.ignored & set(stored))
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
        weight = self.scratch.array("dequantized", stop - start, columns * self.dequantize_to.size)
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
            quantized = self._rows(stored, start, stop, columns).view(np.uint8)
            row = start - first * codes.block[0]
            dequantize(quantized, factors, codes.block, row, weight, stored.dtype)
        # fp16 alone has less room than the products.
        if "float16" in (scales.dtype.name, self.dequantize_to.name) and np.isinf(weight).any():
            self._too_large(name, "float16")
        return weight

    def _check_scales(self, codes: Codes, scales: Any) -> None:
        if not np.isfinite(scales).all():
            raise ReshardError(f"{self.path}: {codes.stored[1]} holds infinities or NaN, which are no scales")

    def _too_large(self, name: str, dtype: str) -> NoReturn:
        raise ReshardError(f"{self.path}: {name} has numbers that are too large for {dtype} once dequantized")

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
        packed.dequantize(found, factors, bits, weight, zeros, start % together)

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
        nvfp4.dequantize(found, factors, number, divides, weight)
        with np.errstate(over="ignore"):
            largest = (largest / number if divides else largest * number) * nvfp4.LARGEST
        if not np.isfinite(largest.astype(weight.dtype)) and not np.isfinite(weight).all():
            self._too_large(name, self.dequantize_to.name)

    def row_multiple(self, name: str) -> int:
        codes = self.codes.get(name)
        if codes is None or codes.columns(self.tensors[name].columns) == 1:
            return 1
        # Some of a block's rows: its numbers are looked up, and all of them would not stay in the
        # cache.
        return -(-codes.block[0] // 4)

    def strips(self, name: str) -> list[Strip] | None:
        if name in self.codes:
            return None
        info, stored = self.tensors[name], self.stored[name]
        return [Strip(0, info.rows, 0, info.columns, self.paths[stored.file], stored.offset, info.columns)]

    def dequantized_names(self) -> list[str]:
        return sorted(self.codes)

    def _numbers(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the whole numbers that small tensors hold. Many are read at once, since they lie
        all over the files."""

        def read(names_of_run: list[str]) -> list[tuple[str, tuple[int, ...]]]:
            tensors = [(name, self.stored[name]) for name in names_of_run]
            return [
                (name, tuple(self._rows(tensor, 0, tensor.shape[0], 1)[:, 0].tolist()))
                for name, tensor in tensors
            ]

        names = sorted(names, key=lambda name: (self.stored[name].file, self.stored[name].offset))
        step = -(-len(names) // READERS) or 1
        runs = [names[start : start + step] for start in range(0, len(names), step)]
        try:
            with ThreadPoolExecutor(READERS, "reshard-read") as pool:
                return dict(entry for run in pool.map(read, runs) for entry in run)
        finally:
            self.files.close()  # nobody else would, where the source is refused by what was found

    def _rows(
        self, stored: safetensors.Tensor, start: int, stop: int, columns: int, use: str = ""
    ) -> np.ndarray:
        """Read rows of a stored tensor, valid until the thread asks for others of its dtype and
        `use`."""
        width = columns * stored.dtype.size
        rows = self.scratch.array(use + stored.dtype.name, stop - start, width)
        self.files.read_into(
            self.paths[stored.file], stored.offset + start * width, memoryview(rows.reshape(-1))
        )
        return rows.view(stored.dtype.numpy())

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors as the files have them: codes and scales apart."""
        return {name: TensorInfo(t.shape, t.dtype) for name, t in self.stored.items()}

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a tensor as the files have it."""
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
        return described | ({"quantized": self._describe_quantization()} if self.codes else {})

    def _describe_quantization(self) -> dict[str, Any]:
        """Return which method has quantized how many weights, and the formats that its config names."""
        config = self.quantization_config
        groups = config.get("config_groups")
        groups = groups.values() if isinstance(groups, dict) else ()
        named = [group.get("format") for group in groups if isinstance(group, dict)] + [config.get("format")]
        named.append(config.get("quantization", config).get("quant_algo"))
        formats = sorted({name for name in named if isinstance(name, str)} - {"mixed-precision"})
        return {"method": config.get("quant_method") or "fp8", "formats": formats, "weights": len(self.codes)}

    def close(self) -> None:
        self.files.close()
