"""Weights of an output that are stored as codes with scales, each encoded a slab of rows at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from reshard.core.dtypes import Dtype
from reshard.core.errors import OptionError, listed
from reshard.quantization import compressed_tensors, fp8_blocks
from reshard.quantization.channels import Channels
from reshard.quantization.fp8_blocks import Fp8Blocks
from reshard.quantization.int_groups import IntGroups
from reshard.quantization.nvfp4 import Nvfp4
from reshard.quantization.scheme import Scheme, check_finite
from reshard.storage.io.streams import SLAB_BYTES, StripWriter, TensorInfo

# The schemes that a conversion writes, by the names that --quantize takes.
SCHEMES: dict[str, Scheme] = {
    "fp8": Fp8Blocks(),
    "fp8_per_channel": Channels("float8_e4m3fn"),
    "int4_per_group": IntGroups(4, 128),
    "int4_per_group_32": IntGroups(4, 32),
    "nvfp4": Nvfp4(),
}
# Names that --quantize no longer takes; such weights are read as before.
REMOVED = ("int8_per_channel", "fp8_per_tensor", "fp8_per_block", "int4_per_channel")

# Reads rows `start` .. `stop` of a weight, in the dtype that is to be quantized; valid until the
# next call.
Reader = Callable[[int, int], np.ndarray]
# Reads the slabs of any weight of the source, by its name, in the dtype that it has in the output;
# each is valid until the next.
TensorReader = Callable[[str], Iterator[np.ndarray]]


def scheme_named(quantize: bool | str | None) -> tuple[str, Scheme] | None:
    """Return the name and scheme that `quantize` asks for; None for none. Raises ReshardError for
    another name."""
    if quantize is False or quantize is None:
        return None
    name = "fp8" if quantize is True else quantize
    if name in REMOVED:
        raise OptionError(
            f"--quantize {name} is no longer written: take {listed(SCHEMES)}, or quantize what mcore-to-hf "
            "writes with llm-compressor"
        )
    if name not in SCHEMES:
        raise OptionError(f"--quantize {name} is not one of {', '.join(SCHEMES)}")
    return name, SCHEMES[name]


class Quantized:
    """The weights of an output with these `names`, which are stored by a `scheme`."""

    def __init__(self, names: Iterable[str] = (), scheme: Scheme | None = None) -> None:
        self.names, self.scheme = frozenset(names), scheme or Fp8Blocks()
        # By weight the largest magnitude and the dtype, of those that this process has read to find
        # a scale.
        self.largest: dict[str, tuple[np.float32, np.dtype]] = {}

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that a canonical tensor becomes, its codes first."""
        return tuple(name + end for end in self.scheme.suffixes) if name in self.names else (name,)

    def stored(self, name: str, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Return the dtypes and shapes of the stored tensors that a canonical tensor becomes."""
        if name not in self.names:
            return {name: (info.dtype, info.shape)}
        stored = self.scheme.stored(info.shape, info.dtype)
        return {name + end: stored[end] for end in self.scheme.suffixes}

    def config(self, original: Any, unquantized: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint that had `original`, with the modules
        `unquantized` as they were."""
        if isinstance(self.scheme, Fp8Blocks):
            return fp8_blocks.config_of(self.scheme, original, unquantized)
        return compressed_tensors.config_of(self.scheme, unquantized)

    def copy(
        self, name: str, info: TensorInfo, read: Reader, writer: StripWriter, look: TensorReader
    ) -> dict[str, str]:
        """Stream one quantized weight, each row of which `read` reads once and in order, and return
        the checksums of its parts.

        Other weights that share a scale with it are read by `look`.
        """
        small = self.scheme.small_tensors(name, info.shape, lambda names: self._find_largest(names, look))
        codes_name, scales_name, *others = self.stored_names(name)
        codes_digest, scales_digest = xxhash.xxh3_128(), xxhash.xxh3_128()
        rows_per_scale, _ = self.scheme.scale_block(info.shape)
        for start, stop in info.slabs(SLAB_BYTES, rows_per_scale):
            codes, scales = self.scheme.encode(read(start, stop), small)
            check_finite(name, scales, "; drop --quantize")
            for part, row, values, digest in (
                (codes_name, start, codes, codes_digest),
                (scales_name, start // rows_per_scale, scales, scales_digest),
            ):
                digest.update(memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1)))
                writer.write_rows(part, row, np.ascontiguousarray(values))
        checksums = {codes_name: codes_digest.hexdigest(), scales_name: scales_digest.hexdigest()}
        for part in others:
            numbers = small[part.removeprefix(name)]
            writer.write_rows(part, 0, numbers[:, None])
            checksums[part] = xxhash.xxh3_128_hexdigest(numbers.tobytes())
        return checksums

    def _find_largest(self, names: Sequence[str], look: TensorReader) -> tuple[np.float32, np.dtype]:
        """Return the largest magnitude of those of these weights that are quantized, and their
        dtype."""
        known = [self._largest(name, look) for name in names if name in self.names]
        return max(largest for largest, _ in known), known[0][1]

    def _largest(self, name: str, look: TensorReader) -> tuple[np.float32, np.dtype]:
        if name not in self.largest:
            largest, dtype = np.float32(0), np.dtype(np.float32)
            for slab in look(name):
                # not Python's max, which may pass over NaN
                largest, dtype = np.maximum(largest, np.abs(slab.astype(np.float32)).max()), slab.dtype
            check_finite(name, np.asarray(largest), "; drop --quantize")
            self.largest[name] = largest, dtype
        return self.largest[name]
