"""A Hugging Face directory of safetensors files, read as canonical tensors: weights that are stored
as codes are what those stand for."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError, listed
from reshard.core.scratch import Scratch
from reshard.core.views import tensor_of, tensor_shapes
from reshard.formats import safetensors
from reshard.formats.small_files import read_json
from reshard.megatron.parameters import ModelParameters, expand
from reshard.models.model import Model
from reshard.models.without_table import repeated_in_files, single_numbers, whole_dtypes
from reshard.quantization import channels, compressed_tensors, fp8_blocks, fp8_scales, modelopt, mxfp4
from reshard.quantization.scheme import StoredWeight
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, largest_matrix, strips_of_view
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.base import Source, ignored_as_recorded, read_config
from reshard.storage.sources.paths import ADAPTER, ADAPTER_BESIDE, ADAPTER_WEIGHTS, check_config
from reshard.storage.sources.spellings import published_names
from reshard.storage.sources.versions import FileVersions

# Ends of the names of what a model's code computes again, and older programs have saved.
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
READERS = 16  # of small tensors, which wait for a disk or a network, not for a core


class HuggingFaceSource(Source):
    """A Hugging Face directory. Weights that are stored as codes with scales read as
    `dequantize_to`; without it fp8 with 128x128 block scales as bf16, and what compressed-tensors,
    modelopt or mxfp4 has quantized in the config's dtype. `read` makes the model of a config, by default one that a
    mapping table covers."""

    kind = "huggingface"

    def __init__(
        self,
        path: Path,
        dequantize_to: Dtype | None = None,
        read: Callable[[dict[str, Any], str], Model] = Model.from_hf,
    ) -> None:
        self.path, self.notices, self.versions = path, [], FileVersions(path)
        check_config(path)
        with ignored_as_recorded(path):
            self._read_model(path / "config.json", read)
        self.stored = self._as_published(safetensors.read_directory(path, self.notices))
        self.paths = {tensor.file: path / tensor.file for tensor in self.stored.values()}
        unread = sorted(p.name for p in path.glob("*.safetensors") if p.name not in self.paths)
        if (path / ADAPTER).is_file():
            unread = [name for name in unread if name != ADAPTER_WEIGHTS]
            self.notices.append(ADAPTER_BESIDE)
        if unread:
            self.notices.append(f"not read, as transformers and vLLM do not: {listed(unread, 3)}")
        self._hold(dequantize_to)

    def _read_model(self, config: Path, read: Callable[[dict[str, Any], str], Model]) -> None:
        self.config = read_config(config)
        self.model = read(self.config, str(config))
        self.notices += self.model.notices

    def _hold(self, dequantize_to: Dtype | None) -> None:
        """Make canonical tensors of the stored ones. Raises ReshardError unless these are the model's."""
        self.files, self.scratch = OpenFiles(), Scratch()
        prefix = self.model.mtp_prefixes(0)[0]
        if self.model.mtp_layers and not any(name.startswith(prefix) for name in self.stored):
            self.notices.append(
                f"config.json announces {self.model.mtp_layers} MTP layers, but the files "
                f"have none; converted without"
            )
            self.model = replace(self.model, mtp_layers=0)
        self.mapping = self._expanded()
        self._quantization(dequantize_to)
        self._check()
        self._take_beside(self.config)

    def _expanded(self) -> ModelParameters:
        """Return the model's parameters, with the copies that the files have of some of a model without a table."""
        mapping = expand(self.model)
        copies = repeated_in_files(self.model, self.stored)
        if not copies:
            return mapping
        shapes = {name: mapping.shapes[primary] for name, primary in copies.items()}
        return replace(mapping, shapes=mapping.shapes | shapes, copies=mapping.copies | copies)

    def _as_published(self, stored: dict[str, safetensors.Tensor]) -> dict[str, safetensors.Tensor]:
        """Return the files' tensors by their published names, which not all programs write. Raises
        ReshardError where the config speaks of more layers or experts than there are tensors, before they
        are listed."""
        self._count(stored)
        names = published_names(stored, self.model)
        others = [name for name, published in names.items() if name != published]
        if others:
            count = f"{len(others)} tensors are" if len(others) > 1 else "one tensor is"
            self.notices.append(
                f"{count} not named as published: {others[0]} is read as {names[others[0]]}"
                + (", and the others likewise" if len(others) > 1 else "")
            )
        return {names[name]: tensor for name, tensor in stored.items()}

    def _count(self, stored: dict[str, safetensors.Tensor]) -> None:
        """Raise ReshardError where the config speaks of more layers or experts than there are tensors."""
        model = self.model
        # A tensor of three dims may have an expert in each index of its first.
        room = sum(t.shape[0] if len(t.shape) > 2 else 1 for t in stored.values())
        experts = model.num_experts * len(model.moe_layers)
        for what, n, most in (
            ("layers", model.num_layers + model.mtp_layers, len(stored)),
            ("experts in all layers", experts, room),
        ):
            if n > most:
                raise ReshardError(
                    f"{self.path}/config.json says {n:,} {what}, but the files hold only "
                    f"{len(stored):,} tensors"
                )

    def _quantization(self, dequantize_to: Dtype | None) -> None:
        """Find the weights that are stored as codes, and their scales."""
        config = self.model.config.get("quantization_config") or self._config_file_of_modelopt()
        if not isinstance(config, dict):
            raise ReshardError(f"{self.path}: quantization_config is {config!r:.80}, not an object")
        self.quantization_config = config
        method, where = config.get("quant_method"), str(self.path)
        dtype = self.model.config.get("dtype") or self.model.config.get("torch_dtype")
        self.codes: dict[str, StoredWeight]
        if method == compressed_tensors.METHOD:
            self.codes = compressed_tensors.find_weights(config, self.stored, where, self._numbers)
        elif method == modelopt.METHOD:
            self.codes = modelopt.find_weights(config, self.stored, where)
        elif method == mxfp4.METHOD:
            self.codes = mxfp4.find_weights(self.stored, where)
        elif method in (None, fp8_blocks.METHOD, fp8_scales.FBGEMM):
            self.codes, dtype = fp8_blocks.find_weights(config, self.stored, where), None
            self.codes |= fp8_scales.find_weights(config, self.stored, where)
        elif isinstance(method, str) and all(
            t.dtype.floating and not t.dtype.name.startswith("float8") for t in self.stored.values()
        ):
            self.codes = {}
        else:
            raise ReshardError(
                f"{self.path}: weights quantized as {method!r:.80} are not supported, only fp8 with scales for "
                f"matrices, rows or blocks, {mxfp4.METHOD}, and fp8, int8, int4 and nvfp4 by "
                f"{compressed_tensors.METHOD}, and nvfp4 and fp8 by {modelopt.METHOD}: convert the checkpoint that "
                "this one was made of, or save it dequantized"
            )
        if (
            config and not self.codes
        ):  # merged or dequantized, with the config of the model that it was trained as
            self.notices.append(
                f"config.json has quantization_config of {method!r:.80}, but no weight is quantized"
            )
        self.quant_method = method
        self.dequantize_to = dequantize_to or DTYPES[dtype if dtype in ("float16", "float32") else "bfloat16"]
        blocks_alone = all(isinstance(weight.scheme, fp8_blocks.Fp8Blocks) for weight in self.codes.values())
        with_activations = method in (compressed_tensors.METHOD, modelopt.METHOD) or not blocks_alone
        self.left = compressed_tensors.activation_scales(self.stored) if with_activations else []
        if self.left:
            self.notices.append(
                "left behind, since only weights are converted: scales of activations and of the key-value "
                f"cache, {listed(self.left, 3)}"
            )

    def _config_file_of_modelopt(self) -> dict[str, Any]:
        """Return what ModelOpt's own config file says of a directory that holds weights of its
        kind; nothing for others."""
        file = self.path / modelopt.CONFIG
        if (
            any(name.endswith(f".weight{modelopt.GLOBAL_SCALE_SUFFIX}") for name in self.stored)
            and file.is_file()
        ):
            return read_json(file) | {"quant_method": modelopt.METHOD}
        return {}

    def _check(self) -> None:
        """Raise ReshardError unless the files hold exactly the table's tensors, with its shapes."""
        apart = {name for codes in self.codes.values() for name in codes.tensors} | {*self.left}
        self.packed = self._places()
        turned = {
            tensor_of(place) for place in self.packed.values() if place.endswith(".T")
        } & self.codes.keys()
        if turned:
            raise ReshardError(
                f"{self.path}: {min(turned)} has the experts of a layer transposed and quantized, which reshard does "
                "not read: convert the checkpoint in bf16"
            )
        self.experts_packed = bool(self.packed)
        stored = {n: t for n, t in self.stored.items() if n not in apart}
        stored |= {name: self._codes_of(name) for name in self.codes}
        carried = self._carried(stored)
        expected = self.mapping.stored_shapes(self.packed) | carried
        missing = [n for n in expected if n not in stored and n not in self.mapping.dispensable]
        ignored = {n for n in stored if n in self.mapping.ignored or n.endswith(COMPUTED)}
        extra = [n for n in stored if n not in expected and n not in ignored]
        family = self.model.family.name
        if missing or extra:
            self._check_prefix(missing, extra)
            parts = [f"lacks {len(missing)} of {family}'s tensors: {listed(missing)}"] if missing else []
            parts += [f"holds {len(extra)} that {family} does not have: {listed(extra)}"] if extra else []
            head = f"{self.model.published_name(self.model.family.ends[2][1])}.weight"
            hint = ": this is a base model, and a model without an output layer is not supported"
            raise ReshardError(f"{self.path} {'; it '.join(parts)}{hint if missing == [head] else ''}")
        in_blocks = self.quant_method in (None, fp8_blocks.METHOD)
        compressed = self.quant_method == compressed_tensors.METHOD
        singles = {self._tensor_of(name) for name in single_numbers(self.model)}
        whole = {self._tensor_of(name): dtype for name, dtype in whole_dtypes(self.model).items()}
        dtypes = {}
        for name, shape in expected.items():
            if name not in stored:
                continue
            tensor = stored[name]
            in_files = () if name in singles else shape
            if tensor.shape != in_files:
                raise ReshardError(
                    f"{self.path}: {name} has shape {list(tensor.shape)}, expected "
                    f"{list(in_files)} from config.json"
                )
            dtype = tensor.dtype
            coded = dtype.name.startswith("float8") or (compressed and dtype.name == "int8")
            if coded and name not in self.codes:
                suffix = fp8_blocks.SCALE_SUFFIX if in_blocks else channels.SCALE_SUFFIX
                raise ReshardError(f"{self.path}: {name} is {dtype.name} without {name}{suffix}")
            if name in whole and dtype.name != whole[name]:
                raise ReshardError(
                    f"{self.path}: {name} has dtype {dtype.name}, and {family}'s class has whole numbers there, in "
                    f"{whole[name]}: publish the model with save_pretrained"
                )
            if not dtype.floating and name not in self.codes and name not in whole:
                raise ReshardError(f"{self.path}: {name} has dtype {dtype.name}, which is not a weight's")
            dtypes[name] = self.dequantize_to if name in self.codes else dtype
        towers = [name for name in carried if self.model.is_of_tower(name)]
        self.notices += self.model.tower_notices(self.config, towers)
        self.tensors = {
            name: TensorInfo(shape, dtypes[self._tensor_of(name)])
            for name, shape in (self.mapping.shapes | carried).items()
            if self._tensor_of(name) in dtypes
        }
        self.copies = {name: primary for name, primary in self.mapping.copies.items() if name in self.tensors}
        if ignored:
            self.notices.append(f"ignored on purpose: {listed(sorted(ignored), 3)}")

    def _check_prefix(self, missing: list[str], extra: list[str]) -> None:
        """Raise ReshardError, naming it, if one prefix is all by which the names of missing tensors differ
        from others'."""
        others = set(extra)
        for name in extra if missing else ():
            prefix = name.removesuffix(missing[0])
            if prefix != name and all(prefix + each in others for each in missing):
                raise ReshardError(
                    f"{self.path} holds {self.model.family.name}'s tensors with {prefix!r:.200} in front of "
                    "their names, as a program saves a model inside a wrapper: save the model itself, or "
                    "rename them without it"
                )

    def _carried(self, stored: Mapping[str, safetensors.Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are carried along unchanged: of towers, and of an MTP layer of
        which the config says nothing, as trainers that leave it out have it."""
        model, mtp = self.model, self.model.mtp_prefixes(0)[0]
        carried = {n: t.shape for n, t in stored.items() if model.is_of_tower(n)}
        if any(mtp + row.hf in carried for row in model.family.rows["mtp"]):
            if mtp not in model.family.towers:
                self.notices.append(f"carried along, since config.json announces no MTP layer: {mtp}*")
            return carried
        return {name: shape for name, shape in carried.items() if not name.startswith(mtp)}

    def _places(self) -> dict[str, str]:
        """Return the parts of the files' tensors that canonical ones are; none where these stand alone."""
        mapping = self.mapping
        coded = mapping.packed | mapping.packed_codes
        if any(tensor_of(place) in self.codes for place in mapping.packed_codes.values()):
            return coded
        if not mapping.packed and any(len(tensor.shape) == 3 for tensor in self.stored.values()):
            in_memory = self.model.places_in_memory()  # `save_pretrained(save_original_format=False)`
            return in_memory if any(tensor_of(place) in self.stored for place in in_memory.values()) else {}
        packed = any(tensor_of(place) in self.stored for place in mapping.packed.values())
        if packed and mapping.packed_otherwise and self._fit(mapping.packed_otherwise):
            return mapping.packed_otherwise
        return mapping.packed if packed or not self.model.family.experts_apart else {}

    def _fit(self, places: dict[str, str]) -> bool:
        """Tell whether the files' tensors have the shapes that these parts of them make up."""
        shapes = tensor_shapes({place: self.mapping.shapes[name] for name, place in places.items()})
        return all(name in self.stored and self.stored[name].shape == s for name, s in shapes.items())

    def _tensor_of(self, name: str) -> str:
        """Return the tensor of the files that a canonical tensor is, or lies in."""
        return tensor_of(self.packed.get(name, name))

    def _codes_of(self, name: str) -> safetensors.Tensor:
        """Return the stored codes of a weight, with the shape that they have once they are decoded."""
        weight = self.codes[name]
        return replace(self.stored[weight.tensors[0]], shape=weight.shape)

    def compute(self, name: str, start: int, stop: int) -> np.ndarray:
        """Decode rows of a weight that is stored as codes, or of a view of one."""
        info, tensor = self.tensors[name], self._tensor_of(name)
        if tensor == name:
            return self._coded_rows(name, start, stop - start)
        rows = self.scratch.array("view", stop - start, info.columns * info.dtype.size).view(
            info.dtype.numpy()
        )
        for strip in strips_of_view(self.packed.get(name, name), self.codes[tensor].shape, self.path, 0, 1):
            first, last = max(start, strip.start), min(stop, strip.stop)
            if first < last:
                step = strip.width // info.columns
                row = strip.offset // info.columns + (first - strip.start) * step
                rows[first - start : last - start] = self._coded_rows(tensor, row, last - first, step)
        return rows

    def _coded_rows(self, name: str, start: int, count: int, step: int = 1) -> np.ndarray:
        """Decode rows of a weight, from `start` on every `step`-th. A weight of more than two dims
        counts as a matrix of rows of its last."""
        stored = self.codes[name]
        rows, columns = prod(stored.shape[:-1]), stored.shape[-1]
        weight = self.scratch.array("dequantized", count, columns * self.dequantize_to.size)
        out = weight.view(self.dequantize_to.numpy())
        assert step == 1 or stored.scheme.scale_block((rows, columns))[0] == 1, f"{name}: rows share scales"
        ranges = stored.scheme.stored_rows((rows, columns), start, start + (count - 1) * step + 1)
        parts = []
        for part, (first, last) in zip(stored.tensors, ranges, strict=False):
            tensor = self.stored[part]
            if len(stored.shape) > 2:
                height = prod(tensor.shape[: len(stored.shape) - 1])
                tensor = replace(tensor, shape=(height, prod(tensor.shape) // height))
            parts.append(self._rows(tensor, first, last, part.removeprefix(name))[::step])
        stored.decode(parts, start, out, str(self.path))
        return out

    def row_multiple(self, name: str) -> int:
        stored = self.codes.get(self._tensor_of(name))
        shape = (prod(stored.shape[:-1]), stored.shape[-1]) if stored is not None else ()
        if stored is None or stored.scheme.scale_shape(shape)[-1] == 1:
            return 1
        # Some of a block's rows: its numbers are looked up, and all of them would not stay in the
        # cache.
        return -(-stored.scheme.scale_block(shape)[0] // 4)

    def matrix_bytes(self) -> int:
        return largest_matrix(self.packed.values(), self.stored)

    def strips(self, name: str) -> list[Strip] | None:
        if self._tensor_of(name) in self.codes:
            return None
        stored, place = self.stored[self._tensor_of(name)], self.packed.get(name, name)
        return strips_of_view(place, stored.shape, self.paths[stored.file], stored.offset, stored.dtype.size)

    def dequantized_names(self) -> list[str]:
        return sorted(self.codes)

    def _numbers(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the whole numbers that small tensors hold. Many are read at once, since they lie
        all over the files."""

        def read(names_of_run: list[str]) -> list[tuple[str, tuple[int, ...]]]:
            tensors = [(name, self.stored[name]) for name in names_of_run]
            return [
                (name, tuple(self._rows(tensor, 0, tensor.shape[0])[:, 0].tolist()))
                for name, tensor in tensors
            ]

        names = sorted(names, key=lambda name: (self.stored[name].file, self.stored[name].offset))
        step = -(-len(names) // READERS) or 1
        runs = [names[start : start + step] for start in range(0, len(names), step)]
        try:
            with ThreadPoolExecutor(READERS, "reshard-read") as pool:
                return dict(entry for run in pool.map(read, runs) for entry in run)
        finally:
            self.files.close()  # nobody else would, where the source is refused

    def _rows(self, stored: safetensors.Tensor, start: int, stop: int, use: str = "") -> np.ndarray:
        """Return rows of a stored tensor, valid until the thread asks for others of its dtype and
        `use`."""
        width = prod(stored.shape[1:]) * stored.dtype.size
        rows = self.scratch.array(use + stored.dtype.name, stop - start, width)
        self.files.read_into(
            self.paths[stored.file], stored.offset + start * width, memoryview(rows.reshape(-1))
        )
        return rows.view(stored.dtype.numpy())

    def spans(self, file: str) -> list[tuple[int, int]]:
        return safetensors.spans(t for t in self.stored.values() if t.file == file)

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors as the files have them: codes and scales apart, and views in place of
        the tensors whose parts they are; single numbers as vectors of one."""
        views = {n: info for n, info in self.tensors.items() if n not in self.stored and not self.is_coded(n)}
        parted = {self._tensor_of(name) for name in views}
        whole = {n: TensorInfo(t.shape, t.dtype) for n, t in self.stored.items() if n not in parted}
        return whole | {name: self.tensors[name] for name in single_numbers(self.model)} | views

    def is_coded(self, name: str) -> bool:
        """Return True for a canonical tensor that the files have as codes."""
        return self._tensor_of(name) in self.codes

    def read_stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a tensor as the files have it."""
        stored = self.stored.get(name)
        return self.read_rows(name, start, stop) if stored is None else self._rows(stored, start, stop)

    def hf_directory(self) -> Path | None:
        return self.path

    def read_files(self) -> list[Path]:
        small = [self.path / n for n in ("config.json", modelopt.CONFIG, safetensors.INDEX, MANIFEST)]
        return [*small, *self.paths.values(), *self._beside().values()]

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
