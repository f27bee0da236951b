"""Weights in the format of ``compressed-tensors``: fp8 (e4m3) or int8, with a scale for each row, an output channel, or for
all of a matrix, and int4, packed, with one for so many columns of a row, as llm-compressor publishes them for vLLM.

The arithmetic is that of ``calculate_qparams`` and ``quantize`` of compressed-tensors 0.17: in the weights' own dtype, whose
numbers each step rounds to.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.storage.fp8 import BLOCK
from reshard.storage.io.streams import SLAB_BYTES, StripWriter, TensorInfo
from reshard.storage.packed import pack, words
from reshard.storage.quantized import Quantize, Quantized, Reader, TensorReader, check_finite

SUFFIX = "_scale"
METHOD = "compressed-tensors"
# Of what is packed: the codes, the shape that the weight has, zero points, and what all scales are divided by; and the formats that say
# so, of whole numbers in words and of 4 bits in bytes.
PACKED_END, SHAPE_END, ZEROS_END, GLOBAL_END = "_packed", "_shape", "_zero_point", "_global_scale"
PACKED, NVFP4 = "pack-quantized", "nvfp4-pack-quantized"
# Least and largest number that is coded, and what the largest magnitude is divided by.
RANGES = {
    "float8_e4m3fn": (-448.0, 448.0, 448.0),
    "int8": (-128.0, 127.0, 127.5),
    "int4": (-8.0, 7.0, 7.5),
}
TYPES = {"float8_e4m3fn": "float", "int8": "int", "int4": "int"}
BITS = {"float8_e4m3fn": 8, "int8": 8, "int4": 4}


class Scheme(NamedTuple):
    """What codes are (a name of `RANGES`), whether a scale is for a ``channel`` of the output, for a ``group`` of columns of one,
    for a ``block``, or for a whole ``tensor``; the rows and columns of a group or block; and whether codes are packed into
    words."""

    codes: str
    strategy: str
    block: tuple[int, int] | None = None
    packed: bool = False

    def dtype(self) -> Dtype:
        """That in which codes are stored."""
        return DTYPES["int32" if self.packed else self.codes]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight."""
        if self.strategy == "tensor":
            return (1,)
        rows, columns = self.block or (1, shape[1])
        return -(-shape[0] // rows), -(-shape[1] // columns)


def quantize(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows, of rows that begin where blocks do, or of a whole matrix, ``[rows, columns]``, or words of them ``[rows,
    words]``; and the scales in its dtype, of the shape `Scheme.scale_shape`."""
    rows, columns = weight.shape
    height, width = (rows, columns) if scheme.strategy == "tensor" else scheme.block or (1, columns)
    more = (0, -rows % height), (0, -columns % width)
    padded = np.pad(weight, more) if rows % height or columns % width else weight
    blocks = padded.reshape(len(padded) // height, height, -1, width).transpose(0, 2, 1, 3)
    apart = blocks.reshape(-1, height * width)
    scales = _scales(np.abs(apart.astype(np.float32)).max(1, keepdims=True), scheme, weight.dtype)
    codes = _codes(apart, scales, scheme).reshape(blocks.shape).transpose(0, 2, 1, 3)
    codes = np.ascontiguousarray(codes.reshape(padded.shape)[:rows, :columns])
    if scheme.packed:
        codes = pack(codes, BITS[scheme.codes])
    return codes, scales.reshape(scheme.scale_shape(weight.shape))


def _scales(largest: np.ndarray, scheme: Scheme, dtype: np.dtype) -> np.ndarray:
    """The scales of magnitudes in fp32, in a dtype."""
    scales = (largest / np.float32(RANGES[scheme.codes][2])).astype(dtype)
    return np.where(scales == 0, ml_dtypes.finfo(dtype).eps, scales).astype(dtype)


def _codes(weight: np.ndarray, scales: np.ndarray, scheme: Scheme) -> np.ndarray:
    """What rows become by scales ``[rows, 1]`` or ``[1, 1]``."""
    least, most, _ = map(np.float32, RANGES[scheme.codes])
    wide = weight.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of infinities and NaN, which the scales tell of
        scaled = (wide / scales.astype(np.float32)).astype(weight.dtype).astype(np.float32)
        scaled = (scaled + np.float32(0)).clip(least, most)  # the zero point, which makes 0 of -0
        if TYPES[scheme.codes] == "int":
            return np.rint(scaled).astype(np.int8)
        return scaled.astype(DTYPES[scheme.codes].numpy())


class Channels(Quantized):
    """Weights that are stored so, with a scale for each output channel."""

    suffix, rows = SUFFIX, 1
    strategy, inputs = "channel", "token"

    def __init__(self, names: Iterable[str], codes: str) -> None:
        super().__init__(names)
        self.scheme = Scheme(codes, self.strategy)

    def prepare(
        self, name: str, info: TensorInfo, look: TensorReader
    ) -> tuple[Quantize, dict[str, np.ndarray]]:
        return partial(quantize, scheme=self.scheme), {}

    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        return self.scheme.dtype(), info.dtype

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return self.scheme.scale_shape(info.shape)

    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """As llm-compressor writes it, with activations that are quantized by token, or as a whole, as they come; or not at
        all, where codes are packed."""
        kind = TYPES[self.scheme.codes]
        weights = {
            "num_bits": BITS[self.scheme.codes],
            "type": kind,
            "strategy": self.strategy,
            "symmetric": True,
            "dynamic": False,
        }
        inputs = weights | {"strategy": self.inputs, "dynamic": True}
        if self.scheme.block is not None and self.strategy == "block":
            weights |= {"block_structure": list(self.scheme.block)}
            inputs |= {"group_size": self.scheme.block[1]}
        elif self.scheme.block is not None:
            weights |= {"group_size": self.scheme.block[1]}
        if self.scheme.packed:
            return config_of(weights, None, PACKED, kept)
        return config_of(weights, inputs, f"{kind}-quantized", kept)


class Blocks(Channels):
    """Weights that are stored with a scale for each 128x128 block, and activations that are quantized by as many columns."""

    strategy, inputs, rows = "block", "group", BLOCK

    def __init__(self, names: Iterable[str], codes: str) -> None:
        super().__init__(names, codes)
        self.scheme = Scheme(codes, self.strategy, (BLOCK, BLOCK))


class PackedChannels(Channels):
    """Weights that are stored in words, with a scale for each output channel."""

    codes_suffix = PACKED_END
    more_ends = (SHAPE_END,)

    def __init__(self, names: Iterable[str], codes: str) -> None:
        super().__init__(names, codes)
        self.scheme = Scheme(codes, self.strategy, None, True)

    def codes_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.rows, words(info.columns, BITS[self.scheme.codes])

    def prepare(
        self, name: str, info: TensorInfo, look: TensorReader
    ) -> tuple[Quantize, dict[str, np.ndarray]]:
        return partial(quantize, scheme=self.scheme), {SHAPE_END: np.array(info.shape, np.int64)}

    def more(self, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {SHAPE_END: (DTYPES["int64"], (len(info.shape),))}


class PackedGroups(PackedChannels):
    """Weights that are stored in words, with a scale for so many columns of each output channel."""

    strategy = "group"

    def __init__(self, names: Iterable[str], codes: str, columns: int) -> None:
        super().__init__(names, codes)
        self.scheme, self.columns = Scheme(codes, self.strategy, (1, columns), True), columns


class Tensors(Channels):
    """Weights that are stored with one scale each: they are read twice, the first time to find it."""

    strategy = inputs = "tensor"

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return (1,)

    def copy(
        self, name: str, info: TensorInfo, read: Reader, writer: StripWriter, look: TensorReader
    ) -> dict[str, str]:
        largest = np.zeros((1, 1), np.float32)
        for slab in look(name):
            # not Python's max, which may pass over NaN
            largest = np.maximum(largest, np.abs(slab.astype(np.float32)).max())
        scales = _scales(largest, self.scheme, info.dtype.numpy())
        check_finite(name, scales, "; drop --quantize")
        digest = xxhash.xxh3_128()
        for start, stop in info.slabs(SLAB_BYTES):
            codes = _codes(read(start, stop), scales, self.scheme)
            digest.update(memoryview(codes.view(np.uint8).reshape(-1)))
            writer.write_rows(name, start, codes)
        writer.write_rows(name + self.suffix, 0, scales)
        return {name: digest.hexdigest(), name + self.suffix: xxhash.xxh3_128_hexdigest(scales.tobytes())}


def config_of(
    weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, kept: Iterable[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of one group of all linear layers but those that are `kept`."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": [name for name in kept if not name.endswith("embed_tokens")],
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def check_wanted(config: Mapping[str, Any], what: str) -> None:
    """Raise ReshardError where a ``quantization_config`` of this format wants what cannot be made of plain weights."""
    groups = config.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(g, Mapping) for g in groups.values())
    ):
        raise ReshardError(f"{what} wants weights quantized by {METHOD}, but has no config_groups")
    for name, group in groups.items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        how = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric", "group_size")}
        bits, strategy = how["num_bits"], how["strategy"]
        form = group.get("format") or config.get("format")
        # columns that are quantized in the order of what passes them would lie in another one
        in_order = weights.get("actorder") not in ("group", "dynamic")
        if form == NVFP4:
            known = bits == 4 and how["type"] == "float" and strategy == "tensor_group"
            known = known and how["group_size"] == 16 and in_order
        elif form == PACKED and not inputs:
            known = bits in (4, 8) and how["type"] == "int" and strategy in ("channel", "group")
            known = known and in_order
        else:
            known = bits == 8 and how["type"] in TYPES.values() and strategy in ("channel", "tensor", "block")
            known = known and (bool(inputs) or (strategy == "channel" and how["type"] == "float"))
        if not known or how["symmetric"] is False:
            raise ReshardError(
                f"{what} wants weights of {name} quantized by {METHOD} as {how}, and of these reshard makes 8 bits for each "
                f"channel, tensor or block, with activations in 8 bits too, fp8 for each channel, and packed int4 or int8 for "
                f"each channel or group, with plain activations, all symmetric, and nvfp4 with plain activations"
            )
        if inputs and (
            form == NVFP4 or not inputs.get("dynamic")
        ):  # "local" of nvfp4 has a global scale that is not
            raise ReshardError(
                f"{what} wants activations of {name} quantized by scales that come with a checkpoint, which a Megatron "
                f"checkpoint has not: serve it with a config whose input_activations are {'null' if form == NVFP4 else 'dynamic'}"
            )
